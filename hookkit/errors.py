"""Everything that hookkit raises or warns with.

One class per kind of mistake, so that a program can tell them apart. Exceptions that a user's own forward or
backward raises are not here: they reach the user as they are.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = [
    "ConflictError",
    "DataDependencyError",
    "GradientError",
    "HookError",
    "MetaError",
    "MetaWarning",
    "OpaqueFallbackWarning",
    "PluginWarning",
    "RegistrationError",
    "RegistrationWarning",
    "TargetWarning",
    "TransformWarning",
    "UntraceableError",
]


class HookError(RuntimeError):
    """The base of every error that hookkit itself raises.

    A program that wants to catch all of hookkit's refusals, and none of its own exceptions, catches this class.

    Example:
        >>> import hookkit, thunder, torch
        >>> jitted = thunder.jit(lambda x: x.grad_fn)
        >>> try:
        ...     jitted(torch.ones(3, requires_grad=True))
        ... except hookkit.HookError as error:
        ...     print(error)
        grad_fn of a tensor is not supported inside a program compiled by thunder ...
    """

    # Whether a call in which it is raised is not tried as one opaque operator either.
    is_final = False


class RegistrationError(HookError):
    """A rule was declared in a way that cannot work.

    Raised by the decorators, at the line of the declaration: a target that is not callable, a provider whose
    signature cannot take the target's arguments, a second backward provider, a rule that is unregistered twice.

    Example:
        >>> import hookkit
        >>> hookkit.rule("math.sqrt")
        Traceback (most recent call last):
            ...
        hookkit.errors.RegistrationError: the rule target 'math.sqrt' is not a name of the form 'package.module:name'...
    """


class ConflictError(RegistrationError):
    """Two rules claim one target at one priority; both declarations are quoted.

    Example:
        >>> import hookkit
        >>> def halved(x):
        ...     return x / 2
        >>> @hookkit.rule(halved)
        ... def one(x):
        ...     return x * 0.5
        >>> @hookkit.rule(halved)
        ... def another(x):
        ...     return x - x / 2
        Traceback (most recent call last):
            ...
        hookkit.errors.ConflictError: ...
        >>> one.unregister()
    """


class UntraceableError(HookError):
    """A call cannot be traced, and its mode (``"trace"``) does not allow it to run opaque.

    Example:
        >>> import hookkit, thunder, torch
        >>> class Squared(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return torch.from_numpy(x.detach().numpy() ** 2)
        >>> with hookkit.use(mode="trace"):
        ...     thunder.jit(Squared.apply)(torch.ones(3))
        Traceback (most recent call last):
            ...
        hookkit.errors.UntraceableError: ...
    """


class DataDependencyError(UntraceableError, NotImplementedError):
    """A program goes by the value of a tensor, which is not known while it is traced.

    It is a ``NotImplementedError``, too, as thunder's own refusals of this kind are.

    Example:
        >>> import hookkit, thunder, torch
        >>> jitted = thunder.jit(lambda x: x * 2 if x.sum() > 0 else x)
        >>> jitted(torch.ones(3))
        Traceback (most recent call last):
            ...
        hookkit.errors.DataDependencyError: the program uses the value of a tensor ... as a Python boolean ...
    """


class GradientError(HookError):
    """What a provider returned does not fit: the gradients' count, names, shapes, dtypes, or the residuals' place.

    Example:
        >>> import hookkit, thunder, torch
        >>> @hookkit.custom_gradient
        ... def doubled(x):
        ...     return 2 * x, hookkit.save()
        >>> @doubled.backward
        ... def _(saved, grad):
        ...     return {"y": 2 * grad}
        >>> thunder.jit(lambda x: doubled(x))(torch.ones(3, requires_grad=True))
        Traceback (most recent call last):
            ...
        hookkit.errors.GradientError: ... returned a gradient for 'y', which is no argument of the call...
    """


class MetaError(HookError):
    """The metadata of an opaque call is not known, or differs from what the call returned at run time.

    Example:
        >>> import hookkit, thunder, torch
        >>> def large(x):
        ...     return x[x > 0.5]
        >>> rule = hookkit.rule(large, mode="opaque", register=False)
        >>> with hookkit.use(rule):
        ...     thunder.jit(lambda x: large(x))(torch.linspace(0.0, 1.0, 64))
        Traceback (most recent call last):
            ...
        hookkit.errors.MetaError: ...
    """


class OpaqueFallbackWarning(UserWarning):
    """A call could not be traced and runs as one opaque operator; given once per callable and reason.

    ``hookkit.use(mode="trace")`` makes an error of it where programs are compiled, and this filter everywhere:

    Example:
        >>> import hookkit, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", hookkit.OpaqueFallbackWarning)
    """


class MetaWarning(UserWarning):
    """The metadata of an opaque call was found by running it on example values; a meta function avoids that.

    Example:
        >>> import hookkit, thunder, torch, warnings
        >>> def rooted(x):
        ...     return torch.from_numpy(x.detach().numpy() ** 0.5)
        >>> rule = hookkit.rule(rooted, mode="opaque", register=False)
        >>> with hookkit.use(rule), warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = thunder.jit(lambda x: rooted(x))(torch.ones(3))
        >>> [w.category.__name__ for w in caught if issubclass(w.category, hookkit.MetaWarning)]
        ['MetaWarning']
    """


class TargetWarning(UserWarning):
    """A lazy target's module is imported and has no such name; given once, with the nearest names.

    Example:
        >>> import hookkit, thunder, torch, warnings
        >>> rule = hookkit.rule("math:sqroot", mode="opaque", register=False)
        >>> with hookkit.use(rule), warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = thunder.jit(torch.sin)(torch.ones(3))
        >>> [w.category.__name__ for w in caught if issubclass(w.category, hookkit.TargetWarning)]
        ['TargetWarning']
    """


class RegistrationWarning(UserWarning):
    """A rule was declared and never finished, so that it registers nothing: no forward provider was decorated.

    Example:
        >>> import hookkit, math, warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     declaration = hookkit.rule(math.sqrt)
        ...     del declaration
        >>> [w.category.__name__ for w in caught]
        ['RegistrationWarning']
    """


class TransformWarning(UserWarning):
    """A compiled program runs in eager PyTorch, because a transform of ``torch.func`` or forward-mode AD is active.

    Example:
        >>> import hookkit, thunder, torch, warnings
        >>> jitted = thunder.jit(torch.sin)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", hookkit.TransformWarning)
        ...     torch.func.vmap(jitted)(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """


class PluginWarning(UserWarning):
    """Something is left out, and the rest is not touched.

    A package's entry point for hookkit that failed, or a part of hookkit that does not fit the installed torch or
    thunder.

    Example:
        >>> import hookkit, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", hookkit.PluginWarning)
        ...     hookkit.enable()
    """


_warned: dict[Any, int] = {}


def warn_at(place: Any, message: str, category: type[Warning]) -> None:
    """Warn of a place in the user's program, or in a rule's module.

    Args:
        place: a ``Source``, or None where it is not known.
        message: the warning.
        category: its class.
    """
    file, line = (place.file, place.line) if place is not None else ("<unknown>", 1)
    warnings.warn_explicit(message, category, file, line, registry=_warned)


_NOT_USERS = frozenset({"hookkit", "thunder", "torch", "importlib", "contextlib", "functools"})


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is the user's: not hookkit's, thunder's, torch's or the import system's.

    Args:
        message: the warning.
        category: its class.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=known)
