"""Rule: what is matched, and which providers stand for it. What declares one is in ``hookkit.declare``."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import attrs

from hookkit.answers import check_answer, decline
from hookkit.call import Call, Source
from hookkit.declared import Origin, is_same_function
from hookkit.errors import HookError, RegistrationError
from hookkit.modes import RuleMode
from hookkit.registry import SHIPPED, registry
from hookkit.signatures import (
    POSITIONAL,
    Difference,
    count_misfit,
    difference,
    misfit,
    refuse_kind,
    returns_nothing,
    torch_signature,
)
from hookkit.targets import (
    CallableTarget,
    NameTarget,
    Target,
    declaration_of,
    default_name,
    describe_callable,
    place_of,
    signature_of,
)

__all__ = ["Rule", "Track"]

P = ParamSpec("P")
R = TypeVar("R")
Provider = TypeVar("Provider", bound=Callable[..., Any])
Track = Literal["tree", "positional"]

_serials = itertools.count(1)


@attrs.define(eq=False, repr=False, slots=False)
class Rule(Generic[P, R]):
    """A declared rule; made by :func:`rule`.

    Calling it calls its forward provider, so that the decorated name stays a function, with its name, docstring and
    signature. A rule that has none yet is a decorator for it.

    Attributes:
        name: the name in traces, reports and messages.
        targets: what it matches.
        forward: the forward provider, or None: the callee itself, run by PyTorch (opaque rules only).
        mode: ``"auto"``, ``"trace"``, ``"opaque"``, ``"region"`` or ``"inline"``.
        priority: the higher one wins.
        declared_at: file and line of the declaration.
        writes: the parameters that an opaque call overwrites, or None if that is to be found out.
        captures: whether tensors that functions among an opaque call's arguments capture are arguments, too.

    Example:
        >>> import hookkit, torch
        >>> def halved(x):
        ...     return x / 2
        >>> @hookkit.rule(halved, register=False)
        ... def lean_halved(x):
        ...     return x * 0.5
        >>> lean_halved.name, lean_halved.mode, lean_halved.priority
        ('lean_halved', 'auto', 0)
        >>> lean_halved(torch.tensor(3.0))
        tensor(1.5000)
    """

    name: str
    targets: tuple[Target, ...]
    forward: Callable[P, R] | None
    mode: RuleMode
    priority: int
    declared_at: Source
    pass_call: bool = False
    track: Track = "tree"
    writes: tuple[str, ...] | None = None
    captures: bool = False
    _opaque_callee: bool = False
    _is_named: bool = True
    serial: int = attrs.field(factory=lambda: next(_serials))
    _backward: Callable[..., Any] | None = None
    _meta: Callable[..., Any] | None = None
    _when: Callable[..., Any] | None = None
    _ships: bool = False
    _origin: Origin | None = None
    _differences: dict[Target, Difference] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.forward is not None:
            functools.update_wrapper(self, self.forward)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the forward provider; or, where there is none and nothing else is declared, take one and return self."""
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        is_provider = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Rule)
        if not is_provider or any((self._backward, self._meta, self._when)):
            raise RegistrationError(
                f"the rule {self.name}, declared at {self.declared_at}, has no forward provider to call: its target "
                "runs itself. Decorate one before anything else of the rule is declared."
            )
        self._take_forward(args[0])
        return self  # type: ignore[return-value]

    def _take_forward(self, provider: Any) -> None:
        self._check_fits("forward provider", provider)
        self.forward = provider
        functools.update_wrapper(self, provider)
        if not self._is_named:
            self.name = default_name(provider, self.targets)
        self.declared_at = place_of(provider) or self.declared_at
        self._renew()

    def _renew(self) -> None:
        """The rule means something else from here on: programs that it took part in are traced again."""
        self.serial = next(_serials)
        registry.changed()

    def __str__(self) -> str:
        targets = ", ".join(map(str, self.targets))
        return f"{self.name}: {targets} (mode {self.mode}, priority {self.priority}, declared at {self.declared_at})"

    def __repr__(self) -> str:
        return f"<hookkit.Rule {self}>"

    @property
    def ships(self) -> bool:
        """Whether the rule is hookkit's own."""
        return self._ships

    def described(self, kind: str) -> str:
        """A provider in words, with the place where it is declared.

        Args:
            kind: ``"forward provider"``, ``"backward provider"`` or ``"meta function"``.
        """
        providers = {"forward provider": self.forward, "backward provider": self._backward, "meta function": self._meta}
        place = place_of(providers[kind]) or self.declared_at
        return f"the {kind} of the rule {self.name} ({place})"

    def is_declared_again_by(self, other: Rule[..., Any]) -> bool:
        """Whether another rule is this one, declared a second time.

        By the same statement that closes over the same; or by one of the same name in code that was compiled again: a
        module that is reloaded, a cell of a notebook that is run again.
        """
        mine, its = self._origin, other._origin
        if mine is None or its is None or (self.priority, self.name) != (other.priority, other.name):
            return False
        if list(map(str, self.targets)) != list(map(str, other.targets)):
            return False
        if mine.is_repeated(its):
            keys = [t.key for t in self.targets] == [t.key for t in other.targets]
            return keys and is_same_function(self.forward, other.forward)
        return mine.is_run_again(its)

    def backward(self, provider: Provider) -> Provider:
        """Declare the backward provider.

        Args:
            provider: takes the residuals and one gradient for each differentiable output (None or zeros where an
                output was not used, see :func:`hookkit.mark`); returns the gradients: a dict by parameter name, in
                which a missing name means no gradient, or a tuple with one entry for each positional argument. The
                gradient of a tensor has its shape, or one that it broadcasts to, which is summed; its device; and a
                floating-point dtype, which is converted. That of a list or dict of tensors has its structure.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the rule has a backward provider, or the provider cannot be called so.
            GradientError: when a program is compiled, if what the provider returned does not fit the arguments.

        Example:
            >>> import hookkit
            >>> def cubed(x, scale):
            ...     return scale * x**3
            >>> @hookkit.rule(cubed, register=False)
            ... def lean_cubed(x, scale):
            ...     square = x * x
            ...     return scale * square * x, hookkit.save(square=square, scale=scale)
            >>> @lean_cubed.backward
            ... def _(saved, grad):
            ...     return {"x": 3 * saved.scale * saved.square * grad}
        """
        if self.forward is None:
            raise RegistrationError(
                f"the rule {self.name}, declared at {self.declared_at}, has no forward provider, so PyTorch gives the "
                "gradients of its target; a backward provider needs a forward provider that saves residuals for it"
            )
        if self.mode == "inline":
            raise RegistrationError(
                f'the rule {self.name}, declared at {self.declared_at}, has mode="inline": thunder differentiates what '
                "its forward provider does; a backward provider needs another mode"
            )
        self._check_provider("backward", self._backward, provider)
        refuse_kind(f"the backward provider of the rule {self.name}, {declaration_of(provider)},", provider)
        if returns_nothing(provider) and not self._ships:
            raise RegistrationError(
                f"the backward provider of the rule {self.name} ({place_of(provider)}) returns None: is its return "
                "statement missing? It returns the gradients by argument name; {} says that there are none"
            )
        signature = signature_of(provider)
        if signature is not None:
            positional = [p for p in signature.parameters.values() if p.kind in POSITIONAL]
            variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
            shown = f"{getattr(provider, '__name__', provider)}{signature}, {declaration_of(provider)}"
            least = 2 + self.pass_call
            required = [
                p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty
            ]
            if required:
                raise RegistrationError(
                    f"the backward provider of the rule {self.name} is declared as {shown}; nothing gives "
                    f"it {required[0]!r}: what it needs is kept by hookkit.save({required[0]}=...)"
                )
            if len(positional) < least and not variadic:
                raise RegistrationError(
                    f"the backward provider of the rule {self.name} is declared as {shown}; it takes "
                    f"{'the call, ' if self.pass_call else ''}the residuals and the gradient of each output, "
                    f"say {'(call, saved, grad)' if self.pass_call else '(saved, grad)'}"
                )
        self._backward = provider
        self._renew()
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
            MetaError: when a program is compiled, if the provider raises; and when it runs, if the call returns
                something else.

        Example:
            >>> import hookkit, torch
            >>> def outer_by_numpy(a, b):
            ...     return torch.from_numpy(a.detach().numpy()[:, None] * b.detach().numpy())
            >>> outer = hookkit.rule(outer_by_numpy, mode="opaque", register=False)
            >>> @outer.meta
            ... def _(a, b):
            ...     return a.new_empty(a.shape[0], b.shape[0])
        """
        self._check_provider("meta", self._meta, provider)
        self._check_fits("meta function", provider)
        self._meta = provider
        self._renew()
        return provider

    def when(self, provider: Provider) -> Provider:
        """Declare a condition.

        Args:
            provider: takes the target's arguments, and returns true, false, or ``hookkit.decline(reason)``. Tensors
                have torch's metadata (``x.dtype is torch.float64``, ``x.device``, ``x.requires_grad``,
                ``isinstance(x, torch.Tensor)``) and no values: what would read them is refused.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the rule has a condition, or its signature does not fit the target.
            HookError: when a program is compiled, if the provider raises.

        Example:
            >>> import hookkit, torch
            >>> def rounded(x):
            ...     return x.round()
            >>> @hookkit.rule(rounded, register=False)
            ... def passed_through(x):
            ...     return x + (x.round() - x).detach()
            >>> @passed_through.when
            ... def _(x):
            ...     return x.dtype is torch.float32 or hookkit.decline("only float32 is trained")
        """
        self._check_provider("when", self._when, provider)
        self._check_fits("condition (.when)", provider)
        if returns_nothing(provider):
            raise RegistrationError(
                f"the condition (.when) of the rule {self.name} ({place_of(provider)}) returns None, so that the rule "
                "never takes a call: is its return statement missing?"
            )
        self._when = provider
        self._renew()
        return provider

    def unregister(self) -> None:
        """Take the rule out of the registry.

        Programs in which it took part are compiled anew at their next call.

        Raises:
            RegistrationError: if it is not registered.

        Example:
            >>> import hookkit, math
            >>> @hookkit.rule(math.cbrt if hasattr(math, "cbrt") else math.exp)
            ... def root(x):
            ...     return x ** (1 / 3)
            >>> root.unregister()
            >>> root in hookkit.rules()
            False
        """
        registry.remove(self)

    def accepts(self, call: Call) -> object:
        """Ask the condition about a call.

        Raises:
            HookError: if the condition raises; rule and call are named.
        """
        if self._when is None and not self._differences:
            return True
        args, kwargs = self.known_arguments(call, call.args, call.kwargs)
        if self._when is None:
            return True
        args, kwargs = call.shown(args), call.shown(kwargs)
        args = (call.seen, *args) if self.pass_call else args
        try:
            answer = self._when(*args, **kwargs)
            check_answer(answer)
            return answer
        except Exception as error:
            if not self.fits(call):
                return decline("the arguments do not fit the signature of the target")
            raise HookError(
                f"the condition (.when) of the rule {self.name}, {declaration_of(self._when)}, raised "
                f"{type(error).__name__}: {error} when it was asked about {call}; it returns true, false "
                "or hookkit.decline(reason)"
            ) from error

    def _note_difference(
        self, target: Target, wanted: inspect.Signature, given: inspect.Signature, provider: Callable[..., Any]
    ) -> None:
        """Note how the installed target differs from the one for which the rule was written."""
        known = self._differences.get(target)
        if provider is self.forward or self.forward is None:
            found = difference(wanted, given)
        else:  # the forward provider says what is known
            obstacle = misfit(known.known if known is not None else wanted, given)
            found = Difference(wanted, wanted, obstacle) if obstacle is not None else None
        if found is not None and (known is None or known.misfit is None):
            self._differences[target] = found

    def known_arguments(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[Any], Any] = lambda v: v
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the providers know them; a newer target may have more.

        Args:
            call: the call.
            args: its positional arguments.
            kwargs: its keyword arguments.
            plain: gives the value of an argument.

        Raises:
            HookError: if the providers cannot take them.
        """
        for target, found in self._differences.items():
            resolved = target.resolve() if isinstance(target, NameTarget) else target
            if call.callable in getattr(resolved, "callables", ()):
                return found.arguments(f"rule {self.name} for {target}, asked about {call},", args, kwargs, plain)
        return args, kwargs

    @property
    def misfits(self) -> list[str]:
        """For each target that the rule cannot stand for as it is installed, why; calls of it are refused."""
        found = self._differences.items()
        return [f"{target}{d.target}: {d.misfit}" for target, d in found if d.misfit is not None]

    def fits(self, call: Call) -> bool:
        """Whether the target can take the arguments of a call; if not, calling it is a TypeError."""

        def takes(signature: inspect.Signature | None) -> bool:
            try:
                return signature is None or signature.bind(*call.args, **call.kwargs) is not None
            except TypeError:
                return False

        return any(takes(target.signature()) for target in self.targets)

    @property
    def is_named(self) -> bool:
        """Whether the name was given, and is not the provider's or the target's."""
        return self._is_named

    def as_opaque(self) -> Rule[..., Any]:
        """A rule like this one, not registered, whose calls are opaque at once."""
        return attrs.evolve(self, mode="opaque", serial=next(_serials))

    @property
    def opaque_callee(self) -> bool:
        """Whether the opaque form of a call runs the callee itself, and not the providers."""
        return self._opaque_callee or self.forward is None

    @property
    def is_mend(self) -> bool:
        """Whether the rule ships with hookkit to mend a single operation of thunder."""
        return self._ships and self._origin is not None and self._origin.module.startswith("hookkit.mends.")

    @property
    def is_conditional_correction(self) -> bool:
        """Whether the rule ships with hookkit, for the calls alone for which its condition is true."""
        return str(getattr(self._when, "__module__", "")).startswith(SHIPPED)

    @property
    def inlines(self) -> bool:
        """Whether the program goes on in the forward provider, as for ``"inline"``, where a call cannot be a region."""
        return self.mode == "region" and self.forward is not None and self._backward is None

    @property
    def backward_provider(self) -> Callable[..., Any] | None:
        """The backward provider, or None."""
        return self._backward

    @property
    def meta_provider(self) -> Callable[..., Any] | None:
        """The meta function, or None."""
        return self._meta

    def _check_provider(self, kind: str, present: Any, provider: Any) -> None:
        if not callable(provider):
            raise RegistrationError(f"@{self.name}.{kind} takes a function, got {provider!r}")
        if present is not None:
            raise RegistrationError(
                f"the rule {self.name} has a {kind} provider already:\n"
                f"  {declaration_of(present)}\n  {declaration_of(provider)}\nRemove one of them."
            )

    def check_names(self) -> None:
        """Compare the providers with what lazy names stand for, which was not known when they were declared.

        Raises:
            RegistrationError: if a provider cannot take the arguments of its target.
        """
        if any(isinstance(target, NameTarget) for target in self.targets):
            for kind, provider in (
                ("forward provider", self.forward),
                ("meta function", self._meta),
                ("condition (.when)", self._when),
            ):
                if provider is not None:
                    self._check_fits(kind, provider)

    def _check_fits(self, kind: str, provider: Callable[..., Any]) -> None:
        refuse_kind(f"the {kind} of the rule {self.name}, {declaration_of(provider)},", provider)
        for target in self.targets:
            wanted, given = target.signature(), signature_of(provider)
            loose = False
            if wanted is None and not self._ships and isinstance(target, CallableTarget):
                loose = True
                wanted = torch_signature(target.callable)
            if wanted is None or given is None:
                continue
            if self.pass_call:
                given = given.replace(parameters=list(given.parameters.values())[1:])
            if self._ships:
                self._note_difference(target, wanted, given, provider)
                continue
            obstacle = count_misfit(wanted, given) if loose else misfit(wanted, given)
            if obstacle:
                raise RegistrationError(
                    f"the {kind} of the rule {self.name} cannot take the arguments of its target: {obstacle}\n"
                    f"  target    {target}{wanted}\n"
                    f"  provider  {describe_callable(provider)}{given}, {declaration_of(provider)}"
                )
        if not self._ships and returns_nothing(provider) and not kind.startswith("condition"):
            for target in self.targets:
                self._check_returns(kind, provider, target)

    def _check_returns(self, kind: str, provider: Callable[..., Any], target: Target) -> None:
        """Refuse a provider that returns nothing where its target, a function of Python's or of torch's, does."""
        found = target.resolve() if isinstance(target, NameTarget) else target
        called = getattr(found, "callable", None) or getattr(getattr(found, "function", None), "forward", None)
        returns = inspect.isroutine(called) and hasattr(called, "__code__") and not returns_nothing(called)
        if returns or torch_signature(called) is not None or self._backward is not None:
            raise RegistrationError(
                f"the {kind} of the rule {self.name} ({place_of(provider)}) returns None, and its target {target} "
                "does not: is its return statement missing?"
            )
