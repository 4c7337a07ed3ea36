"""Methods of tensors as the program names them.

In a traced program a tensor is a ``TensorProxy``, whose methods are thunder's own. Rules know ``torch.Tensor.sin`` and
``torch.Tensor.__add__``; here one is found for the other.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import record_source_loc_in_symbol_header
from thunder.core.langctxs import Languages, resolve_language, resolve_method
from thunder.core.proxies import TensorProxy
from torch._library.custom_ops import CustomOpDef

from hookkit.engine.interpreter import call_log
from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.interpreter.reasons import user_source
from hookkit.errors import HookError
from hookkit.registry import registry

__all__ = ["TensorMethod", "attribute_lookup", "fallback_of", "is_attribute", "method_lookup", "torch_callee"]

_TORCH_METHODS = {
    function: getattr(torch.Tensor, name)
    for name, function in inspect.getmembers(TensorProxy, inspect.isfunction)
    if callable(getattr(torch.Tensor, name, None)) and getattr(torch.Tensor, name) is not getattr(object, name, None)
}
_TORCH_METHODS.update(
    (getattr(TensorProxy, name).fget, getattr(torch.Tensor, name).__get__) for name in ("T", "imag", "mT", "real")
)

# Of its memory a proxy knows nothing; a call that asks runs opaque.
_LAYOUT = frozenset({"data_ptr", "is_contiguous", "is_non_overlapping_and_dense", "storage_offset", "stride"})


@attrs.frozen
class TensorMethod:
    """What the program gets when it looks up a method of a tensor about which a rule wants to be asked."""

    name: str

    @property
    def is_known(self) -> bool:
        """Whether thunder has the method."""
        return bool(resolve_language(Languages.TORCH).has_method(self.name))

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
    return function._opoverload if isinstance(function, CustomOpDef) else function


def method_lookup(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to do instead of ``TensorProxy.__getattr__``, if a rule could take a call of the method that it finds."""
    if function is not TensorProxy.__getattr__:
        return None
    if args[1].value in _LAYOUT and call_log.inside_a_call():
        refusal = HookError(f"{args[1].value}() of a tensor is not known while a call is traced")
        return lambda *_, **__: raise_in_program(refusal)
    if args[1].value == "numel" and callable(args[0].value._numel):  # under thunder's cache of symbolic values
        return None
    method = getattr(torch.Tensor, args[1].value, None)
    if call_log.all_candidates_wanted():
        call_log.note_form(method, user_source)
    if not callable(method) or not registry.matching(method, None):
        return None
    return interpreter_needs_wrap(_bound_method)  # type: ignore[no-any-return]


def is_attribute(callee: Any) -> bool:
    """Whether a callable is how torch names an attribute of tensors: ``torch.Tensor.mT.__get__``."""
    return (
        isinstance(callee, types.MethodWrapperType)
        and isinstance(callee.__self__, types.GetSetDescriptorType)
        and callee.__self__.__objclass__ in torch.Tensor.__mro__
    )


def attribute_lookup(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """How torch names the attribute of a tensor that ``TensorProxy.__getattr__`` is asked for, if thunder lacks it."""
    if function is not TensorProxy.__getattr__:
        return None
    attribute = inspect.getattr_static(torch.Tensor, args[1].value, None)
    if not isinstance(attribute, types.GetSetDescriptorType) or TensorMethod(args[1].value).is_known:
        return None
    return attribute.__get__


def _bound_method(tensor: Any, name: str) -> Any:
    return partial(TensorMethod(name), tensor)


def fallback_of(function: Any) -> Callable[..., Any] | None:
    """What calls a looked-up method that no rule took."""
    return (
        interpreter_needs_wrap(record_source_loc_in_symbol_header(function)) if type(function) is TensorMethod else None
    )
