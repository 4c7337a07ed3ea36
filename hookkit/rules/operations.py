"""Operations of torch that thunder lacks, or lacks in the form in which a program calls them: PyTorch runs them.

``torch.linspace``, ``x.mH``, ``torch.special.bessel_j0``, ``torch.zeros_like(x, requires_grad=True)``: functions,
methods and attributes of tensors. Each becomes one operator with PyTorch's own gradient. And two of Python's own that
branch on the values of tensors, where the branch can be computed.
"""

from __future__ import annotations

import builtins
from typing import Any

import thunder
import torch

import hookkit

__all__ = ["assignment", "maximum", "minimum", "operations", "requires_grad_"]


def is_unsupported(call: hookkit.Call) -> bool:
    """Whether thunder would refuse the call."""
    return call.unsupported is not None


operations = hookkit.rule(hookkit.where(is_unsupported), mode="opaque", priority=-200, name="operations")


@hookkit.rule(torch.Tensor.requires_grad_, mode="trace")
def requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    """The tensor, if a compiled program can see to it that it requires grad."""
    tensor.requires_grad = requires_grad
    return tensor


def fills_by_mask(tensor: Any, key: Any, value: Any) -> bool:
    """Whether a tensor is assigned where a mask is true: ``x[mask] = y``, which thunder accepts and cannot execute."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(getattr(k, "dtype", None) is thunder.bool8 for k in keys) and hasattr(value, "dtype")


assignment = hookkit.rule(torch.Tensor.__setitem__, mode="opaque")
assignment.when(fills_by_mask)


def are_scalars(*values: Any, **options: Any) -> bool:
    """Whether Python's max or min is asked for one of several tensors with one element each."""
    if options or len(values) < 2 or not all(hasattr(v, "numel") for v in values):
        return False
    first = values[0]
    return all(
        v.numel == 1 and (v.shape, v.dtype, v.device) == (first.shape, first.dtype, first.device) for v in values
    )


@hookkit.rule(builtins.max)
def maximum(first: Any, *others: Any, **options: Any) -> Any:
    """The first of the largest, as Python finds it: by comparing, with what that means for NaN and ties."""
    for other in others:
        first = torch.where(other > first, other, first)
    return first


@hookkit.rule(builtins.min)
def minimum(first: Any, *others: Any, **options: Any) -> Any:
    """The first of the smallest, as Python finds it."""
    for other in others:
        first = torch.where(other < first, other, first)
    return first


maximum.when(are_scalars)
minimum.when(are_scalars)
