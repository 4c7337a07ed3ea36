"""Interpreter values, proxies, and the trees that hold them.

The interpreter hands over wrapped values; traces hold proxies; users' containers hold either. The functions here go
from one to the other and look into containers: tuples (named ones too), lists, dicts, dataclass instances.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from thunder.core import dtypes
from thunder.core.devices import Device, to_device, to_torch_device
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, TensorProxy

__all__ = [
    "PLAIN",
    "Slot",
    "Tag",
    "TensorMetadata",
    "as_torch_names",
    "broadcasts_to",
    "is_container",
    "is_differentiable_dtype",
    "leaves",
    "map_leaves",
    "proxies_in",
    "tensors_in",
    "unwrap_arguments",
    "wrap_result",
]


def unwrap_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Plain values, tensors as proxies, of a call's wrapped arguments; containers hold proxies, too."""
    for value in (*args, *kwargs.values()):
        _proxify(value)
    return tuple(unwrap(a) for a in args), {unwrap(k): unwrap(v) for k, v in kwargs.items()}


def _proxify(value: Any) -> bool:
    """Replace a container that holds tensors, in the wrapped value, by one that holds their proxies.

    thunder's ``recursively_proxy`` does this for sequences; of a dict it looks at the keys.
    """
    if value.original_value is not value.nothing:
        return True
    if isinstance(value.value, str) or not isinstance(value.value, tuple | list | dict):
        if isinstance(value.value, torch.Tensor):
            get_jit_ctx().proxify(value)
        return isinstance(value.value, Proxy)
    value.track_items()
    items = value.item_wrappers.values() if isinstance(value.value, dict) else value.item_wrappers
    found = [_proxify(item) for item in items]
    held = value.value.values() if isinstance(value.value, dict) else value.value
    if any(found) and any(isinstance(h, torch.Tensor) for h in leaves(list(held))):
        get_jit_ctx().proxify(value)
    return any(found)


def wrap_result(value: Any, *origins: Any) -> Any:
    """Wrap what a call returns, in the structure that it has; its provenance is the call's wrapped origins."""
    inputs = [o.provenance for o in origins if o is not None] or [wrap_const(None).provenance]
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=inputs))


def is_container(value: Any) -> bool:
    """Whether a value is looked into."""
    return isinstance(value, tuple | list | dict) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | Proxy)
    )


def children(value: Any) -> Iterator[Any]:
    """What a container holds."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    else:
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in a tree that is not a container, in order."""
    if is_container(tree):
        for child in children(tree):
            yield from leaves(child)
    else:
        yield tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of a tree with a function applied to everything that is not a container."""
    if isinstance(tree, dict):
        mapped = {k: map_leaves(function, v) for k, v in tree.items()}
        if type(tree) is dict:
            return mapped
        result = copy.copy(tree)
        result.update(mapped)
        return result
    if isinstance(tree, tuple | list):
        items = [map_leaves(function, v) for v in tree]
        if type(tree) in (tuple, list):
            return type(tree)(items)
        if hasattr(tree, "_make"):
            return tree._make(items)
        try:
            return type(tree)(items)
        except TypeError:  # torch.return_types.* take one sequence; other subclasses are not known
            return tuple(items)
    if is_container(tree):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(result, field.name, map_leaves(function, getattr(tree, field.name)))
        return result
    return function(tree)


def as_torch_names(value: Any) -> Any:
    """A dtype or device of thunder's as torch's; anything else as it is."""
    if isinstance(value, dtypes.dtype):
        return dtypes.to_torch_dtype(value)
    return to_torch_device(value) if isinstance(value, Device) else value


def proxies_in(tree: Any) -> list[Proxy]:
    """The proxies in a tree, each once, in order."""
    return list({p.name: p for p in leaves(tree) if isinstance(p, Proxy)}.values())


def tensors_in(tree: Any) -> list[TensorProxy]:
    """The tensor proxies in a tree, each once, in order."""
    return [p for p in proxies_in(tree) if isinstance(p, TensorProxy)]


def is_differentiable_dtype(tensor: Any) -> bool:
    """Whether a tensor or tensor proxy is floating point or complex."""
    if isinstance(tensor, TensorProxy):
        return bool(dtypes.is_inexact_dtype(tensor.dtype))
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex)


# Values that are what they look like.
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)


class Tag:
    """A mark on a proxy; thunder hands proxies' tags on to their replacements."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


@attrs.frozen
class TensorMetadata:
    """What thunder knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        """The metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"

    def zeros(self) -> torch.Tensor:
        """A tensor of zeros with this metadata."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    @classmethod
    def of_proxy(cls, proxy: TensorProxy) -> TensorMetadata:
        """The metadata of a proxy."""
        return cls(tuple(proxy.shape), dtypes.to_torch_dtype(proxy.dtype), to_torch_device(proxy.device))

    def proxy(self, requires_grad: bool) -> TensorProxy:
        """A new proxy with this metadata."""
        return TensorProxy(
            shape=self.shape,
            device=to_device(self.device),
            dtype=dtypes.to_dtype(self.dtype),
            requires_grad=requires_grad,
        )


@attrs.frozen
class Slot:
    """The place of an operator's argument or output in a tree of which the rest is constant."""

    index: int


def broadcasts_to(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape broadcasts to another."""
    tail = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))
