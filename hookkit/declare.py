"""The decorator that declares a rule, and what becomes of one that is not finished."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, cast, overload

from hookkit.call import Source
from hookkit.declared import Origin
from hookkit.errors import RegistrationError, RegistrationWarning, warn_at
from hookkit.modes import RuleMode, check_mode
from hookkit.registry import SHIPPED, registry
from hookkit.rule import Rule, Track
from hookkit.targets import default_name, is_lambda, make_target, place_of

__all__ = ["Declaration", "rule"]

P = ParamSpec("P")
R = TypeVar("R")


class Declaration:
    """What ``hookkit.rule(target)`` returns: a decorator for the forward provider. It registers nothing by itself.

    Example:
        >>> import hookkit, math
        >>> declaration = hookkit.rule(math.hypot, register=False)
        >>> @declaration
        ... def hypotenuse(x, y):
        ...     return (x * x + y * y) ** 0.5
        >>> hypotenuse.name
        'hypotenuse'
    """

    def __init__(self, declare: Callable[..., Rule[..., Any]], target: str, declared_at: Source) -> None:
        self._declare, self._target, self._declared_at = declare, target, declared_at
        self._is_used = False
        registry.unfinished.add(self)

    def __call__(self, forward: Callable[P, R], /) -> Rule[P, R]:
        """Declare the rule, with its forward provider."""
        self._is_used = True
        registry.unfinished.discard(self)
        made: Any = self._declare(forward)  # the provider's own types are those of the rule
        return cast(Rule[P, R], made)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RegistrationError(f"{self.problem}; it has no {name!r} before that")

    def __repr__(self) -> str:
        return f"<hookkit.rule for {self._target}, declared at {self._declared_at}, without a forward provider>"

    @property
    def problem(self) -> str:
        """What is missing."""
        return (
            f"hookkit.rule({self._target}) at {self._declared_at} has no forward provider yet, and registers nothing: "
            "put it as a decorator, @hookkit.rule(target), on the function that stands for the target"
        )

    def warn(self) -> None:
        """Say, once, that nothing is registered."""
        self._is_used = True
        warn_at(self._declared_at, self.problem, RegistrationWarning)

    def __del__(self) -> None:
        if not self.__dict__.get("_is_used", True) and sys.exc_info()[0] is None:
            self.warn()


def _refuse_bare_use(target: Any, frame: types.FrameType) -> None:
    """Refuse ``@hookkit.rule`` without parentheses, which would make what it decorates the target."""
    code = getattr(target, "__code__", None)
    if code is None or is_lambda(target) or code is frame.f_code or code.co_filename != frame.f_code.co_filename:
        return
    body = [line for _, _, line in code.co_lines() if line is not None]
    # Python takes the line of the first decorator for that of the function
    if code in frame.f_code.co_consts and code.co_firstlineno <= frame.f_lineno <= min(body):
        raise RegistrationError(
            f"@hookkit.rule at {frame.f_code.co_filename}:{frame.f_lineno} decorates {target.__qualname__} without a "
            f"target: write @hookkit.rule(target), where the target is the function whose calls "
            f"{target.__qualname__} stands for."
        )


if TYPE_CHECKING:

    class OpaqueRule(Rule[..., Any]):
        """A rule that is registered already, and takes a forward provider yet."""

        def __call__(self, forward: Callable[P, R], /) -> Rule[P, R]: ...


@overload
def rule(
    target: Any,
    *,
    mode: Literal["opaque"],
    priority: int = ...,
    name: str | None = ...,
    pass_call: bool = ...,
    track: Track = ...,
    subclasses: bool = ...,
    opaque_callee: bool = ...,
    writes: Iterable[str] | None = ...,
    captures: bool = ...,
    register: bool = ...,
) -> OpaqueRule: ...


@overload
def rule(
    target: Any,
    *,
    mode: Literal["auto", "trace", "region", "inline"] = ...,
    priority: int = ...,
    name: str | None = ...,
    pass_call: bool = ...,
    track: Track = ...,
    subclasses: bool = ...,
    opaque_callee: bool = ...,
    writes: Iterable[str] | None = ...,
    captures: bool = ...,
    register: bool = ...,
) -> Declaration: ...


def rule(
    target: Any,
    *,
    mode: RuleMode = "auto",
    priority: int = 0,
    name: str | None = None,
    pass_call: bool = False,
    track: Track = "tree",
    subclasses: bool = True,
    opaque_callee: bool = False,
    writes: Iterable[str] | None = None,
    captures: bool = False,
    register: bool = True,
) -> Rule[..., Any] | Declaration:
    """Declare a rule: which calls it takes over, and what stands for them.

    Used as a decorator on the forward provider. The provider has the target's own signature, takes plain tensors
    and returns what the target returns, with ``hookkit.save(...)`` beside it if there is a backward provider. A rule
    without one leaves the gradient to thunder, which differentiates the traced forward provider.

    With ``mode="opaque"`` the call is also a statement of its own: ``r = hookkit.rule(target, mode="opaque")``
    registers a rule at once. Where nothing is decorated with it the callee itself is run by PyTorch, which also gives
    its gradients; ``@r.meta`` and ``@r.when`` can be declared.

    Args:
        target: a callable; a subclass of ``torch.autograd.Function`` (its subclasses included); a
            :func:`hookkit.where` predicate; a name ``"package.module:name"``, which imports nothing; or a list of
            these.
        mode: ``"auto"`` traces the forward provider and falls back to one opaque operator; ``"trace"`` makes the
            fallback an error; ``"opaque"`` makes it an operator at once; ``"inline"`` has no operator: the program goes
            on in the forward provider, as if that had been called, and thunder differentiates what it does;
            ``"region"`` compiles what is traced by itself, once for all calls that do the same, see
            :func:`hookkit.region`; without a backward provider a call that cannot be a region is inline.
        priority: among the rules that match, the one with the highest priority wins.
        name: the name in traces and messages; by default the provider's.
        pass_call: whether the providers get the :class:`hookkit.Call` as their first argument.
        track: which tensors are differentiated: ``"tree"``, all in the arguments and outputs, however nested;
            ``"positional"``, as ``torch.autograd.Function`` does, those given or returned directly.
        subclasses: whether a target that is a Function stands for its subclasses, too.
        opaque_callee: whether the opaque form of a call runs the callee itself under PyTorch's autograd, instead of
            the providers.
        writes: the names of parameters whose tensors the call, or its backward, overwrites in place without PyTorch's
            counting it, as a kernel does that gets an address; ``()`` for none. By default that is found by running the
            call on example values; where a meta function is declared nothing runs, and all are taken to be overwritten.
        captures: whether tensors that functions among the arguments capture (by their closures, globals, modules) are
            arguments of an opaque call, too, and get gradients. By default a function that captures a tensor of the
            program is refused.
        register: False to have the rule only in ``with hookkit.use(rule)``.

    Returns:
        The decorator, a :class:`Declaration`, which returns the :class:`Rule`; with ``mode="opaque"`` the rule, which
        is also the decorator.

    Raises:
        RegistrationError: if the target is no target, or the provider's signature cannot take its arguments.
        ConflictError: if another rule has the same target and priority; both places are quoted. The same declaration
            run again, in a cell of a notebook or by ``importlib.reload``, is none: it replaces the first.

    Warns:
        RegistrationWarning: if the decorator is dropped, or a program is traced, before it got a forward provider.

    Example:
        >>> import hookkit, torch
        >>> def swish(x):
        ...     return x * torch.sigmoid(x)
        >>> @hookkit.rule(swish)
        ... def swish_rule(x):
        ...     s = torch.sigmoid(x)
        ...     return x * s, hookkit.save(x=x, s=s)
        >>> @swish_rule.backward
        ... def _(saved, grad):
        ...     return {"x": grad * (saved.s + saved.x * saved.s * (1 - saved.s))}
        >>> swish_rule.unregister()
    """
    check_mode(mode, "inline")
    if track not in ("tree", "positional"):
        raise RegistrationError(f'track={track!r}; expected "tree" or "positional"')
    if isinstance(writes, str):
        raise RegistrationError(f"writes={writes!r}; expected names of parameters, as in writes=[{writes!r}]")
    if not (name is None or (isinstance(name, str) and name)):
        raise RegistrationError(f"name={name!r}; expected a string")
    if not isinstance(priority, int):
        raise RegistrationError(f"priority={priority!r}; expected an int")
    given = list(target) if isinstance(target, list | tuple) else [target]
    ships = str(sys._getframe(1).f_globals.get("__name__")).startswith(SHIPPED)
    if not given and not ships:
        raise RegistrationError("the list of targets is empty; give at least one")
    targets = tuple(make_target(t, subclasses=subclasses) for t in given)
    frame = sys._getframe(1)
    _refuse_bare_use(target, frame)
    declared_at, origin = Source(frame.f_code.co_filename, frame.f_lineno), Origin.of(frame, None)

    def declare(forward: Callable[..., Any] | None) -> Rule[..., Any]:
        if isinstance(forward, Rule) or not (forward is None or callable(forward)):
            raise RegistrationError(f"@hookkit.rule(...) decorates a function, got {forward!r}")
        if forward is None and mode != "opaque":
            raise RegistrationError(
                f'a rule for {targets[0]} with mode="{mode}" needs a forward provider; only mode="opaque" can leave '
                "the call to the callee"
            )
        made: Rule[..., Any] = Rule(
            name=name or default_name(forward, targets),
            targets=targets,
            forward=forward,
            mode=mode,
            priority=priority,
            declared_at=place_of(forward) or declared_at,
            pass_call=pass_call,
            track=track,
            opaque_callee=opaque_callee,
            writes=tuple(writes) if writes is not None else None,
            captures=captures,
            is_named=name is not None,
            ships=ships,
            origin=origin.on(forward),
        )
        if forward is not None:
            made._check_fits("forward provider", forward)
        if register and targets:  # what ships may stand for something that this torch lacks
            registry.add(made)
        return made

    return declare(None) if mode == "opaque" else Declaration(declare, str(target), declared_at)
