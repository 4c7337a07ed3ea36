"""What user code sees of a call before it runs: tensors that have the metadata of torch's, and no values.

Conditions, predicates and meta functions are plain Python, run while the program is traced. They get neither thunder's
proxies, whose dtypes and devices are thunder's own, nor data, which there is none of yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from thunder.core import dtypes
from thunder.core.devices import Device, to_torch_device
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, ProxyTag, StringProxy, TensorProxy
from thunder.core.trace import TraceCtx

from hookkit.engine.trace import gradflow
from hookkit.engine.values.wrapping import as_torch_names, leaves, map_leaves
from hookkit.errors import HookError

__all__ = ["SeenTensor", "shows"]


class SeenTensor(torch.Tensor):
    """A tensor of a program that is being traced, as conditions, predicates and ``Call.args`` have it.

    Metadata is torch's, and answered by torch itself: nothing of it is kept here but ``requires_grad``, of which an
    ordinary tensor would have to be a leaf.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _requires_grad: bool
    _is_param: bool

    @staticmethod
    def of(proxy: TensorProxy, requires_grad: bool) -> SeenTensor:
        """What is seen of a proxy."""
        made: SeenTensor = torch.Tensor._make_wrapper_subclass(
            SeenTensor,
            tuple(int(n) for n in proxy.shape),
            dtype=dtypes.to_torch_dtype(proxy.dtype),
            device=to_torch_device(proxy.device),
        )
        made._requires_grad = requires_grad
        made._is_param = ProxyTag.STATIC_MEMORY_LOCATION in proxy.tags  # what isinstance(x, torch.nn.Parameter) asks
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _refusal(_described(args, kwargs or {}), f"torch.ops.{operation} computes with it")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._requires_grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        needs = ", requires_grad=True" if self._requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{needs}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _refusal(what: str, why: str) -> HookError:
    return HookError(
        f"of the tensor {what} only shape, dtype, device and requires_grad are known while the program is traced, and "
        f"no values: {why}. Decide by what is known; a choice by values belongs in the forward provider, in operations "
        "such as torch.where."
    )


def _described(args: Any, kwargs: Any) -> str:
    return next((repr(a) for a in leaves((list(args), kwargs)) if isinstance(a, SeenTensor)), "argument")


def _refused_method(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SeenTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal(repr(self), f"{name} reads them")

    return refuse


def _unknown_method(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SeenTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise HookError(
            f"{name} of the tensor {self!r} is not known while the program is traced: thunder compiles one program for "
            "tensors of all memory layouts, and does not check it when the program runs. Where a provider needs a "
            "layout, call contiguous() in it, or make the rule opaque and look at the real tensor."
        )

    return refuse


_READ_VALUES = (
    *("__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__", "__index__", "__int__"),
    *("__iter__", "item", "numpy", "tolist"),
)
_LAYOUT = ("data_ptr", "is_contiguous", "storage", "storage_offset", "stride", "untyped_storage")
for _name in _READ_VALUES:
    setattr(SeenTensor, _name, _refused_method(f"{_name}()"))
for _name in _LAYOUT:
    setattr(SeenTensor, _name, _unknown_method(f"{_name}()"))
for _name in ("grad", "grad_fn", "is_leaf"):
    setattr(SeenTensor, _name, property(_unknown_method(_name)))


def shows(trace: TraceCtx) -> Callable[[Any], Any]:
    """What gives a tree of a call's arguments as user code sees it; a proxy is the same tensor each time."""
    known: dict[str, SeenTensor] = {}

    def seen(value: Any) -> Any:
        if isinstance(value, TensorProxy):
            if value.name not in known:
                known[value.name] = SeenTensor.of(value, gradflow.requires_grad(trace, value))
            return known[value.name]
        if isinstance(value, NumberProxy | StringProxy):
            return value.value
        if isinstance(value, AnyProxy):
            return value._o
        return as_torch_names(value)

    def show(tree: Any) -> Any:
        if not any(isinstance(leaf, Proxy | dtypes.dtype | Device) for leaf in leaves(tree)):
            return tree
        return map_leaves(seen, tree)

    return show
