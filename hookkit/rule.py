"""Rule: what is matched, and which providers stand for it; and the decorator that declares one."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import attrs

from hookkit.call import Call, Source
from hookkit.errors import RegistrationError
from hookkit.registry import registry
from hookkit.targets import Target, describe_callable, make_target, signature_of

__all__ = ["Rule", "rule"]

Provider = TypeVar("Provider", bound=Callable[..., Any])
Mode = Literal["auto", "trace", "opaque"]
Track = Literal["tree", "positional"]

_serials = itertools.count(1)


@attrs.define(eq=False)
class Rule:
    """A declared rule; made by :func:`rule`.

    Calling it calls its forward provider, so that the decorated name stays a function.

    Attributes:
        name: the name in traces, reports and messages.
        targets: what it matches.
        forward: the forward provider, or None: the callee itself, run by PyTorch (opaque rules only).
        mode: ``"auto"``, ``"trace"`` or ``"opaque"``.
        priority: the higher one wins.
        declared_at: file and line of the declaration.
    """

    name: str
    targets: tuple[Target, ...]
    forward: Callable[..., Any] | None
    mode: Mode
    priority: int
    declared_at: Source
    pass_call: bool = False
    track: Track = "tree"
    opaque_callee: bool = False
    serial: int = attrs.field(factory=lambda: next(_serials))
    _backward: Callable[..., Any] | None = None
    _meta: Callable[..., Any] | None = None
    _when: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward provider."""
        if self.forward is None:
            raise RegistrationError(f"the rule {self.name} has no forward provider to call")
        return self.forward(*args, **kwargs)

    def __str__(self) -> str:
        targets = ", ".join(map(str, self.targets))
        return f"{self.name}: {targets} (mode {self.mode}, priority {self.priority}, declared at {self.declared_at})"

    def backward(self, provider: Provider) -> Provider:
        """Declare the backward provider.

        Args:
            provider: takes the residuals and one gradient for each differentiable output (None or zeros where an
                output was not used, see :func:`hookkit.mark`); returns the gradients: a dict by parameter name, in
                which a missing name means no gradient, or a tuple with one entry for each positional argument.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the rule has a backward provider, or the provider cannot be called so.
        """
        self._backward = self._provider("backward", self._backward, provider)
        signature = signature_of(provider)
        if signature is not None:
            positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
            variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
            least = 2 + self.pass_call
            if len(positional) < least and not variadic:
                raise RegistrationError(
                    f"the backward provider of the rule {self.name} is declared as {_show(provider)}; it takes "
                    f"{'the call, ' if self.pass_call else ''}the residuals and the gradient of each output, "
                    f"say {'(call, saved, grad)' if self.pass_call else '(saved, grad)'}"
                )
        return provider

    def meta(self, provider: Provider) -> Provider:
        """Declare the meta function of an opaque call.

        Args:
            provider: takes the target's arguments, with tensors that have no data, and returns what the forward
                provider returns, with the right shapes, dtypes and devices. For a rule whose callee runs itself it
                returns the outputs alone.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the rule has a meta function, or its signature does not fit the target.
        """
        self._meta = self._provider("meta", self._meta, provider)
        self._check_fits("meta function", provider, self.pass_call)
        return provider

    def when(self, provider: Provider) -> Provider:
        """Declare a condition.

        Args:
            provider: takes the target's arguments, tensors as thunder's proxies (shape, dtype, device, ndim can be
                asked), and returns true, false, or ``hookkit.decline(reason)``.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the rule has a condition, or its signature does not fit the target.
        """
        self._when = self._provider("when", self._when, provider)
        self._check_fits("condition (.when)", provider, self.pass_call)
        return provider

    def unregister(self) -> None:
        """Take the rule out of the registry.

        Raises:
            RegistrationError: if it is not registered.
        """
        registry.remove(self)

    def accepts(self, call: Call) -> object:
        """Ask the condition about a call."""
        if self._when is None:
            return True
        args = (call, *call.args) if self.pass_call else call.args
        return self._when(*args, **call.kwargs)

    @property
    def backward_provider(self) -> Callable[..., Any] | None:
        """The backward provider, or None."""
        return self._backward

    @property
    def meta_provider(self) -> Callable[..., Any] | None:
        """The meta function, or None."""
        return self._meta

    def _provider(self, kind: str, present: Any, provider: Any) -> Any:
        if not callable(provider):
            raise RegistrationError(f"@{self.name}.{kind} takes a function, got {provider!r}")
        if present is not None:
            raise RegistrationError(
                f"the rule {self.name} has a {kind} provider already:\n"
                f"  {_place(present)}\n  {_place(provider)}\nRemove one of them."
            )
        return provider

    def _check_fits(self, kind: str, provider: Callable[..., Any], pass_call: bool) -> None:
        for target in self.targets:
            wanted, given = target.signature(), signature_of(provider)
            if wanted is None or given is None:
                continue
            if pass_call:
                given = given.replace(parameters=list(given.parameters.values())[1:])
            misfit = _misfit(wanted, given)
            if misfit:
                raise RegistrationError(
                    f"the {kind} of the rule {self.name} cannot take the arguments of its target: {misfit}\n"
                    f"  target    {target}{wanted}\n"
                    f"  provider  {describe_callable(provider)}{given}, {_place(provider)}"
                )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def rule(
    target: Any,
    *,
    mode: Mode = "auto",
    priority: int = 0,
    name: str | None = None,
    pass_call: bool = False,
    track: Track = "tree",
    opaque_callee: bool = False,
    register: bool = True,
) -> Any:
    """Declare a rule: which calls it takes over, and what stands for them.

    Used as a decorator on the forward provider. The provider has the target's own signature, takes plain tensors
    and returns what the target returns, with ``hookkit.save(...)`` beside it if there is a backward provider. A rule
    without one leaves the gradient to thunder, which differentiates the traced forward provider.

    With ``mode="opaque"`` and nothing decorated (the returned decorator is called with ``None``) the callee itself
    is run by PyTorch, which also gives its gradients.

    Args:
        target: a callable; a subclass of ``torch.autograd.Function`` (its subclasses included); a
            :func:`hookkit.where` predicate; a name ``"package.module:name"``, which imports nothing; or a list of these.
        mode: ``"auto"`` traces the forward provider and falls back to one opaque operator; ``"trace"`` makes the
            fallback an error; ``"opaque"`` makes it an operator at once.
        priority: among the rules that match, the one with the highest priority wins.
        name: the name in traces and messages; by default the provider's.
        pass_call: whether the providers get the :class:`hookkit.Call` as their first argument.
        track: which tensors are differentiated: ``"tree"``, all in the arguments and outputs, however nested;
            ``"positional"``, as ``torch.autograd.Function`` does, those given or returned directly.
        opaque_callee: whether the opaque form of a call runs the callee itself under PyTorch's autograd, instead of
            the providers.
        register: False to have the rule only in ``with hookkit.use(rule)``.

    Returns:
        The decorator; it returns the :class:`Rule`.

    Raises:
        RegistrationError: if the target is no target, or the provider's signature cannot take its arguments.
        ConflictError: if another rule has the same target and priority; both places are quoted.

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
    if mode not in ("auto", "trace", "opaque"):
        raise RegistrationError(f'mode={mode!r}; expected "auto", "trace" or "opaque"')
    if track not in ("tree", "positional"):
        raise RegistrationError(f'track={track!r}; expected "tree" or "positional"')
    if not isinstance(priority, int):
        raise RegistrationError(f"priority={priority!r}; expected an int")
    given = list(target) if isinstance(target, list | tuple) else [target]
    if not given:
        raise RegistrationError("the list of targets is empty")
    targets = tuple(make_target(t) for t in given)
    source = _caller()

    def declare(forward: Callable[..., Any] | None = None) -> Rule:
        if isinstance(forward, Rule) or (forward is not None and not callable(forward)):
            raise RegistrationError(f"@hookkit.rule(...) decorates a function, got {forward!r}")
        if forward is None and mode != "opaque":
            raise RegistrationError(
                f'a rule for {targets[0]} with mode="{mode}" needs a forward provider; only mode="opaque" can leave '
                "the call to the callee"
            )
        made = Rule(
            name=name or getattr(forward, "__name__", None) or str(targets[0]).rpartition(".")[2].rpartition(":")[2],
            targets=targets,
            forward=forward,
            mode=mode,
            priority=priority,
            declared_at=_place_of(forward) or source,
            pass_call=pass_call,
            track=track,
            opaque_callee=opaque_callee or forward is None,
        )
        if forward is not None:
            made._check_fits("forward provider", forward, pass_call)
        if register:
            registry.add(made)
        return made

    return declare


def _misfit(wanted: inspect.Signature, given: inspect.Signature) -> str | None:
    """Why a provider cannot take a target's arguments, or None."""
    have = list(given.parameters.values())
    positional = [p for p in have if p.kind in _POSITIONAL]
    names = {p.name for p in have if p.kind is not p.POSITIONAL_ONLY}
    variadic = any(p.kind is p.VAR_POSITIONAL for p in have)
    keywords = any(p.kind is p.VAR_KEYWORD for p in have)
    wanted_names = set()
    position = 0
    for parameter in wanted.parameters.values():
        wanted_names.add(parameter.name)
        if parameter.kind in _POSITIONAL:
            if position >= len(positional) and not variadic:
                return f"no place for the positional argument {parameter.name!r}"
            by_name = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if by_name and position < len(positional) and positional[position].name != parameter.name:
                return f"argument {position} is called {parameter.name!r}, not {positional[position].name!r}"
            if by_name and parameter.name not in names and not keywords:
                return f"the argument {parameter.name!r} cannot be given by name"
            position += 1
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.name not in names and not keywords:
                return f"no place for the keyword argument {parameter.name!r}"
        elif parameter.kind is parameter.VAR_POSITIONAL and not variadic:
            return f"no place for *{parameter.name}"
        elif parameter.kind is parameter.VAR_KEYWORD and not keywords:
            return f"no place for **{parameter.name}"
    for extra in have:
        required = extra.default is extra.empty and extra.kind not in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
        in_variadic = any(p.kind is p.VAR_POSITIONAL for p in wanted.parameters.values()) and extra.kind in _POSITIONAL
        if required and extra.name not in wanted_names and not in_variadic:
            return f"the target never gives {extra.name!r}"
    return None


def _caller() -> Source:
    frame = sys._getframe(2)
    return Source(frame.f_code.co_filename, frame.f_lineno)


def _place_of(function: Any) -> Source | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return Source(code.co_filename, code.co_firstlineno) if code is not None else None


def _place(function: Any) -> str:
    place = _place_of(function)
    return f"declared at {place}" if place else repr(function)


def _show(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__name__', repr(function))}{signature_of(function)}, {_place(function)}"


