"""Transforms of PyTorch's around a compiled program: forward-mode differentiation, and those of ``torch.func``.

What they hand to the program are tensors that stand for more than their data: a tangent, a batch, another level of
differentiation. A compiled program would lose that, so it is refused. Where no such transform is active, that costs the
question whether one is; a program that is compiled while one is active looks at its inputs each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import Symbol
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from hookkit.errors import HookError

__all__ = ["check_inputs", "is_transform_active", "is_transformed", "refuse_transformed"]


def is_transform_active() -> bool:
    """Whether a program that is called now may be given a tensor that stands for more than its data."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def refuse_transformed(*values: Any) -> None:
    """Refuse tensors that stand for more than their data.

    Raises:
        HookError: if there is one among the values, or in containers among them.
    """
    for value in tree_flatten(values)[0]:
        what = _transform_of(value) if isinstance(value, torch.Tensor) else None
        if what is not None:
            raise HookError(
                f"a program compiled by thunder is given a tensor of {what}, which it does not support: it is compiled "
                "for plain tensors, and differentiable once, backwards. Apply the transform to the function as it is, "
                "before it is compiled"
            )


def _transform_of(tensor: torch.Tensor) -> str | None:
    if is_functorch_wrapped_tensor(tensor):
        return "torch.func or torch.vmap (grad, jvp, jacrev, hessian, vmap and others)"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for more than its data."""
    return _transform_of(tensor) is not None


def check_inputs(stock: Callable[..., Any], trace: Any, **options: Any) -> Any:
    """Have a program that is compiled while a transform is active look at all its inputs when it runs.

    Parameters and what a closure holds are among them; they are not known when it is called.

    Args:
        stock: ``thunder.transform_to_torch_types``, the last that thunder does to a computation, and to an epilogue.
        trace: the trace.
        **options: what else it takes.
    """
    result = stock(trace, **options)
    if not is_transform_active():
        return result
    symbol = Symbol("refuse_transformed", meta=lambda *_: None, is_prim=True)
    check = symbol.bind(*(a for a in result.args or () if isinstance(a, TensorProxy)), output=None)
    check._call_ctx = {symbol.name: refuse_transformed}
    result.bound_symbols.insert(0, check)
    return result
