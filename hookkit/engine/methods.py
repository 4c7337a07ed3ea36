"""Methods of tensors as the program names them.

In a traced program a tensor is a ``TensorProxy``, whose methods are thunder's own. Rules know ``torch.Tensor.sin`` and
``torch.Tensor.__add__``; here one is found for the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.langctxs import resolve_method
from thunder.core.proxies import TensorProxy

from hookkit.engine import records
from hookkit.engine.tracing import raise_in_program
from hookkit.errors import HookError
from hookkit.registry import registry

__all__ = ["TensorMethod", "fallback_of", "method_lookup", "torch_callee"]

_TORCH_METHODS = {
    function: getattr(torch.Tensor, name)
    for name, function in inspect.getmembers(TensorProxy, inspect.isfunction)
    if callable(getattr(torch.Tensor, name, None)) and getattr(torch.Tensor, name) is not getattr(object, name, None)
}


@attrs.frozen
class TensorMethod:
    """What the program gets when it looks up a method of a tensor about which a rule wants to be asked."""

    name: str

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What thunder does without a rule."""
        method = resolve_method(self.name, tensor, *args, **kwargs)
        if method is None:
            raise AttributeError(f"thunder does not know the tensor method {self.name!r}, and no rule takes the call")
        return method(tensor, *args, **kwargs)


def torch_callee(function: Any) -> Any:
    """What a program calls, as torch names it."""
    if type(function) is TensorMethod:
        return getattr(torch.Tensor, function.name)
    if inspect.isfunction(function):
        return _TORCH_METHODS.get(function, function)
    return function


def method_lookup(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to do instead of ``TensorProxy.__getattr__``, if a rule could take a call of the method that it finds."""
    if function is not TensorProxy.__getattr__:
        return None
    if args[1].value == "is_contiguous" and records.inside_a_call():
        return partial(raise_in_program, HookError("is_contiguous() of a tensor is not known while a call is traced"))
    method = getattr(torch.Tensor, args[1].value, None)
    if not callable(method) or not registry.matching(method, None):
        return None
    return interpreter_needs_wrap(_bound_method)  # type: ignore[no-any-return]


def _bound_method(tensor: Any, name: str) -> Any:
    return partial(TensorMethod(name), tensor)


def fallback_of(function: Any) -> Callable[..., Any] | None:
    """What calls a looked-up method that no rule took."""
    return interpreter_needs_wrap(function) if type(function) is TensorMethod else None
