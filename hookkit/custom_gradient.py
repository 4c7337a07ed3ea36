"""A function that is defined with its gradient: the same providers in eager PyTorch and under thunder."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from hookkit.call import Call, Source
from hookkit.declared import Origin
from hookkit.errors import RegistrationError
from hookkit.modes import RuleMode, check_mode
from hookkit.registry import registry
from hookkit.residuals import Residuals
from hookkit.rule import Rule
from hookkit.targets import make_target, place_of

__all__ = ["CustomFunction", "custom_gradient"]

P = ParamSpec("P")
R = TypeVar("R")
Provider = TypeVar("Provider", bound=Callable[..., Any])


class CustomFunction(Generic[P, R]):
    """A function with a gradient of its own; made by :func:`custom_gradient`.

    Attributes:
        rule: the rule by which thunder takes its calls over.

    Example:
        >>> import hookkit, torch
        >>> @hookkit.custom_gradient
        ... def reversed_gradient(x):
        ...     return x.clone(), hookkit.save()
        >>> @reversed_gradient.backward
        ... def _(saved, grad):
        ...     return {"x": -grad}
        >>> x = torch.ones(2, requires_grad=True)
        >>> reversed_gradient(x).sum().backward()
        >>> x.grad, reversed_gradient.rule.name
        (tensor([-1., -1.]), 'reversed_gradient')
    """

    rule: Rule[..., Any]

    def __init__(self, forward: Callable[..., Any], mode: RuleMode, name: str | None, frame: types.FrameType) -> None:
        functools.update_wrapper(self, forward)
        declared_at = place_of(forward) or Source(frame.f_code.co_filename, frame.f_lineno)
        self.rule = Rule(
            name=name or forward.__name__,
            targets=(make_target(self),),
            forward=forward,
            mode=mode,
            priority=0,
            declared_at=declared_at,
            origin=Origin.of(frame, forward),
        )
        registry.add(self.rule)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in eager PyTorch, whose autograd gets its gradients from the backward provider.

        Raises:
            RegistrationError: if it has no backward provider.
        """
        return self._eager(*args, **kwargs)  # type: ignore[no-any-return]

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        """The function as a method of an object."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<hookkit.CustomFunction {self.rule.name}, defined at {self.rule.declared_at}>"

    def backward(self, provider: Provider) -> Provider:
        """Declare the backward provider.

        Args:
            provider: as for :meth:`Rule.backward`.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the function has a backward provider, or the provider cannot be called so.
            GradientError: if what the provider returned does not fit the arguments.
        """
        return self.rule.backward(provider)

    def meta(self, provider: Provider) -> Provider:
        """Declare the meta function, for programs in which the call is opaque.

        Args:
            provider: as for :meth:`Rule.meta`.

        Returns:
            The provider.

        Raises:
            RegistrationError: if the function has a meta function, or its signature does not fit.

        Example:
            >>> import hookkit, torch
            >>> @hookkit.custom_gradient(mode="opaque")
            ... def sine(x):
            ...     return torch.from_numpy(__import__("numpy").sin(x.detach().numpy())), hookkit.save(x=x)
            >>> @sine.backward
            ... def _(saved, grad):
            ...     return {"x": grad * saved.x.cos()}
            >>> @sine.meta
            ... def _(x):
            ...     return torch.empty_like(x), hookkit.save(x=x)
        """
        return self.rule.meta(provider)

    @functools.cached_property
    def _eager(self) -> Callable[..., Any]:
        if self.rule.backward_provider is None:
            raise RegistrationError(
                f"the function {self.rule.name}, defined at {self.rule.declared_at} by hookkit.custom_gradient, has no "
                f"backward provider: @{self.rule.name}.backward declares it"
            )
        # thunder is imported when the function is first called, and not where it is defined
        providers = importlib.import_module("hookkit.engine.pytorch.provider_function")
        callee: Callable[..., Any] = providers.provider_callee(self.rule, Call(self, None, (), {}))

        def call(*args: Any, **kwargs: Any) -> Any:
            return callee(*args, **kwargs, **providers.parameters(self.rule, args, kwargs))

        disabled: Callable[..., Any] = torch.compiler.disable(call)  # Dynamo has no business in it
        return disabled


@overload
def custom_gradient(forward: Callable[P, tuple[R, Residuals]], /) -> CustomFunction[P, R]: ...


@overload
def custom_gradient(
    *, mode: RuleMode = ..., name: str | None = ...
) -> Callable[[Callable[P, tuple[R, Residuals]]], CustomFunction[P, R]]: ...


def custom_gradient(
    forward: Callable[..., Any] | None = None, /, *, mode: RuleMode = "auto", name: str | None = None
) -> Any:
    """Define a function with its gradient.

    For a function of one's own, which no rule has to find elsewhere. In eager PyTorch it is an operation that autograd
    differentiates by the backward provider, to any order; a program that thunder compiles takes its calls over by a
    rule with the same two providers. Define it once, at the top of a module or a class: each definition is a rule.

    Args:
        forward: the forward provider, which returns the output and ``hookkit.save(...)``.
        mode: as for :func:`hookkit.rule`; ``"opaque"`` for what cannot be traced.
        name: the name in traces and messages; by default the function's.

    Returns:
        The function, a :class:`CustomFunction`; its ``backward`` is the decorator of the backward provider. Without
        ``forward`` a decorator.

    Raises:
        RegistrationError: if what is decorated is no function, or the mode is none.

    Example:
        >>> import hookkit, torch
        >>> @hookkit.custom_gradient
        ... def clipped(x, bound=1.0):
        ...     return x.clamp(-bound, bound), hookkit.save()
        >>> @clipped.backward
        ... def _(saved, grad):
        ...     return {"x": grad}
        >>> x = torch.tensor([0.5, 3.0], requires_grad=True)
        >>> clipped(x).sum().backward()
        >>> x.grad
        tensor([1., 1.])
    """
    check_mode(mode)
    frame = sys._getframe(1)

    def define(forward: Callable[..., Any]) -> CustomFunction[..., Any]:
        if not isinstance(forward, types.FunctionType):
            raise RegistrationError(f"@hookkit.custom_gradient decorates a function, got {forward!r}")
        return CustomFunction(forward, mode, name, frame)

    return define if forward is None else define(forward)
