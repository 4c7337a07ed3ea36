"""The kinds of target that a rule can have, and how each matches a call.

A target never imports anything: a dotted name is looked up among the modules that the program has imported.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import attrs

from hookkit.call import Call
from hookkit.errors import HookError, RegistrationError, TargetWarning

__all__ = [
    "CallableTarget",
    "Decline",
    "FunctionTarget",
    "NameTarget",
    "PredicateTarget",
    "Target",
    "decline",
    "make_target",
    "where",
]


@attrs.frozen
class Decline:
    """A rule's or predicate's reason for not taking a call; false in a condition."""

    reason: str

    def __bool__(self) -> bool:
        return False


def decline(reason: str) -> Decline:
    """Decline a call, with a reason.

    Return it from a ``.when`` provider or from a predicate; ``hookkit.explain`` shows the reason.

    Args:
        reason: why the rule is not for this call.

    Returns:
        A value that is false in a condition.

    Example:
        >>> import hookkit
        >>> bool(hookkit.decline("x is a scalar"))
        False
    """
    return Decline(reason)


@attrs.frozen
class CallableTarget:
    """One callable: a function, builtin, method, torch function, operator overload or higher-order operator."""

    callable: Callable[..., Any]
    specificity = 3

    def __str__(self) -> str:
        return describe_callable(self.callable)

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return self.callable

    def signature(self) -> inspect.Signature | None:
        """The signature of the callable, or None where Python does not know it."""
        return signature_of(self.callable)


@attrs.frozen
class FunctionTarget:
    """The ``apply`` of an autograd Function subclass and, unless said otherwise, of its subclasses."""

    function: type[Any]
    subclasses: bool = True
    specificity = 2

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return self.function

    def signature(self) -> inspect.Signature | None:
        """The signature of ``apply``: that of ``forward`` without ctx; None for Function itself."""
        import torch

        base = torch.autograd.Function
        forward = self.function.forward
        if forward is base.forward:
            return None
        found = signature_of(forward)
        if found is None or self.function.setup_context is not base.setup_context:
            return found
        return found.replace(parameters=list(found.parameters.values())[1:])


@attrs.frozen
class PredicateTarget:
    """Every call for which a predicate is true; made by :func:`where`."""

    predicate: Callable[[Call], object]
    specificity = 0

    def __str__(self) -> str:
        return f"where({describe_callable(self.predicate)})"

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return self.predicate

    def signature(self) -> inspect.Signature | None:
        """None: a predicate says nothing about arguments."""
        return None

    def matches(self, call: Call) -> object:
        """Ask the predicate about a call.

        Raises:
            HookError: if the predicate raises; predicate and call are named.
        """
        try:
            return self.predicate(call)
        except Exception as error:
            raise HookError(
                f"the predicate {describe_callable(self.predicate)} raised {type(error).__name__}: {error} "
                f"when it was asked about {call}; a predicate must return true, false or hookkit.decline(reason)"
            ) from error


@attrs.define(eq=False)
class NameTarget:
    """A dotted name ``"pkg.mod:Qual.name"`` that is looked up once the module is imported by anyone."""

    module: str
    qualname: str
    _resolved: CallableTarget | FunctionTarget | None = None
    _warned: bool = False
    specificity = 3

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return f"{self.module}:{self.qualname}"

    def signature(self) -> inspect.Signature | None:
        """The signature of what the name stands for, or None until that is imported."""
        found = self.resolve()
        return found.signature() if found is not None else None

    def resolve(self) -> CallableTarget | FunctionTarget | None:
        """What the name stands for, or None while its module is not (wholly) imported.

        Warns once, with the nearest names, when the module is there and the name is not.
        """
        if self._resolved is not None:
            return self._resolved
        module = sys.modules.get(self.module)
        spec = getattr(module, "__spec__", None)
        if module is None or getattr(spec, "_initializing", False):
            return None
        found: Any = module
        for part in self.qualname.split("."):
            holder, found = found, getattr(found, part, None)
            if found is None:
                self._warn_missing(holder, part)
                return None
        target = make_target(found)
        assert isinstance(target, CallableTarget | FunctionTarget)
        self._resolved = target
        return target

    def _warn_missing(self, holder: Any, part: str) -> None:
        if self._warned:
            return
        self._warned = True
        near = difflib.get_close_matches(part, dir(holder), n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        warnings.warn(
            f"the rule target {str(self)!r} does not resolve: {self.module} is imported and has no {part!r}{hint}",
            TargetWarning,
            stacklevel=3,
        )


Target = CallableTarget | FunctionTarget | NameTarget | PredicateTarget


def where(predicate: Callable[[Call], object]) -> PredicateTarget:
    """A target that matches every call for which a predicate is true.

    Args:
        predicate: takes a :class:`hookkit.Call`; returns true, false, or ``hookkit.decline(reason)``. It is asked
            about every call that the program makes, so it should look at ``call.callable`` first.

    Returns:
        A target for :func:`hookkit.rule`.

    Raises:
        RegistrationError: if the predicate is not callable.

    Example:
        >>> import hookkit
        >>> target = hookkit.where(lambda call: call.name.startswith("fused_"))
    """
    if not callable(predicate):
        raise RegistrationError(f"hookkit.where(...) takes a callable, got {predicate!r}")
    return PredicateTarget(predicate)


def make_target(target: Any) -> Target:
    """The target that a user's object means.

    Raises:
        RegistrationError: if it means none.
    """
    import torch

    if isinstance(target, CallableTarget | FunctionTarget | NameTarget | PredicateTarget):
        return target
    if isinstance(target, str):
        module, colon, qualname = target.partition(":")
        if not (colon and module and qualname):
            raise RegistrationError(
                f"the rule target {target!r} is not a name of the form 'package.module:name'; "
                "write the module, a colon, and the name in the module"
            )
        return NameTarget(module, qualname)
    if isinstance(target, type):
        if issubclass(target, torch.autograd.Function):
            return FunctionTarget(target)
        raise RegistrationError(
            f"the rule target {target.__qualname__} is a class, but not a subclass of torch.autograd.Function; "
            "give the function or method that the program calls"
        )
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and target == owner.apply:
        return FunctionTarget(owner)
    if not callable(target):
        raise RegistrationError(
            f"the rule target {target!r} ({type(target).__name__}) is not callable; give a callable, a subclass of "
            "torch.autograd.Function, hookkit.where(predicate), or a name 'package.module:name'"
        )
    try:
        hash(target)
    except TypeError:
        raise RegistrationError(
            f"the rule target {target!r} is not hashable, so calls cannot be looked up by it; use hookkit.where(...)"
        ) from None
    return CallableTarget(target)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a callable, or None where Python does not know it (many builtins)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def describe_callable(function: Any) -> str:
    """A callable's module and name, for messages."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else str(name)
