"""Single operations that thunder lacks, of which something must be known beforehand; most need no rule of their own.

And two of Python's own that branch on the values of tensors, where the branch can be computed.
"""

from __future__ import annotations

import builtins
import itertools
from typing import Any

import torch

import hookkit
from hookkit.mends.mend import Mend
from hookkit.rules._names import of_torch

__all__ = [
    "MENDS",
    "builtin_max",
    "builtin_min",
    "combinations",
    "ctc_loss",
    "linalg_lstsq",
    "masked_assignment",
    "requires_grad_",
]


@hookkit.rule(of_torch("Tensor.requires_grad_"), mode="inline", priority=-100)
def requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    """Returns the tensor, if a compiled program can see to it that it requires grad."""
    tensor.requires_grad = requires_grad
    return tensor


# Three whose results have shapes that their arguments tell, though PyTorch does not know them without data.


@hookkit.rule(of_torch("combinations"), priority=-100)
def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Finds the combinations of r elements, in PyTorch's order."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(input.shape[0]), r)), dtype=torch.int64, device=input.device)
    return input[places.reshape(-1, r)]


RETURN_TYPES: Any = torch.return_types

ctc_loss = hookkit.rule(of_torch("nn.functional.ctc_loss"), mode="opaque", priority=-100)


@ctc_loss.meta
def _(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    return log_probs.new_empty(log_probs.shape[1:-1] if reduction == "none" else ())


linalg_lstsq = hookkit.rule(of_torch("linalg.lstsq"), mode="opaque", priority=-100)


@linalg_lstsq.meta
def _(A: Any, B: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Only of matrices of full rank: another rank is refused when the program runs."""
    *batch, m, n = A.shape
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    columns = [] if is_vector else [B.shape[-1]]
    batch = torch.broadcast_shapes(batch, B.shape[: B.ndim - 1 - len(columns)])
    driver = driver or "gelsy"
    residuals = A.new_empty((*batch, *(columns or [1])) if m > n and driver != "gelsy" else (0,))
    rank = A.new_empty(batch if driver != "gels" else (0,), dtype=torch.int64)
    values = A.new_empty((*batch, min(m, n)) if driver in ("gelsd", "gelss") else (0,), dtype=A.abs().dtype)
    returned = RETURN_TYPES.linalg_lstsq((A.new_empty((*batch, n, *columns)), residuals, rank, values))
    return returned, hookkit.mark(hookkit.save(), non_differentiable=[rank, values])


def fills_by_mask(tensor: Any, key: Any, value: Any) -> bool:
    """Whether a tensor is assigned where a mask is true: ``x[mask] = y``, which thunder accepts and cannot execute."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(getattr(k, "dtype", None) is torch.bool for k in keys) and hasattr(value, "dtype")


masked_assignment = hookkit.rule(of_torch("Tensor.__setitem__"), mode="opaque", priority=-100, name="masked_assignment")
masked_assignment.when(fills_by_mask)


def are_scalars(*values: Any, **options: Any) -> bool:
    """Whether Python's max or min is asked for one of several tensors with one element each."""
    if options or len(values) < 2 or not all(hasattr(v, "numel") for v in values):
        return False
    first = values[0]
    return all(
        v.numel() == 1 and (v.shape, v.dtype, v.device) == (first.shape, first.dtype, first.device) for v in values
    )


@hookkit.rule(builtins.max, priority=-100)
def builtin_max(first: Any, *others: Any, **options: Any) -> Any:
    """Finds the first of the largest as Python does, by comparing, with what that means for NaN and ties."""
    for other in others:
        first = torch.where(other > first, other, first)
    return first


@hookkit.rule(builtins.min, priority=-100)
def builtin_min(first: Any, *others: Any, **options: Any) -> Any:
    """Finds the first of the smallest as Python does."""
    for other in others:
        first = torch.where(other < first, other, first)
    return first


builtin_max.when(are_scalars)
builtin_min.when(are_scalars)


MENDS = [
    Mend(
        "requires_grad_",
        "Tensors in a program have no `requires_grad_`.",
        program="""
print(thunder.jit(lambda x: (x * 2).requires_grad_(False))(torch.ones(1)).requires_grad)
""",
        stock="AttributeError: Unknown attribute requires_grad_",
        eager="False",
        rules=(requires_grad_,),
    ),
    Mend(
        "operations whose results have shapes that depend on values",
        "`combinations`, `ctc_loss` and `linalg.lstsq` are refused, though the shapes of their results "
        "follow from the arguments.",
        program="""
print(thunder.jit(torch.linalg.lstsq)(torch.eye(2), torch.ones(2, 1)).solution.tolist())
""",
        stock="DynamicOutputShapeException",
        eager="[[1.0], [1.0]]",
        rules=(combinations, ctc_loss, linalg_lstsq),
    ),
    Mend(
        "assigning where a mask is true",
        "`x[mask] = y` has no gradient.",
        program="""
def f(x, mask, y):
    z = x * 1
    z[mask] = y
    return z

y = torch.ones(1, requires_grad=True)
thunder.jit(f)(torch.zeros(2), torch.tensor([True, False]), y).sum().backward()
print(y.grad)
""",
        stock="NotImplementedError: boolean advanced indexing is not implemented",
        eager="tensor([1.])",
        rules=(masked_assignment,),
    ),
    Mend(
        "Python's max and min",
        "Python's `max` and `min` of tensors with one element are refused: they branch on values.",
        program="""
print(thunder.jit(lambda x, y: max(x, y))(torch.ones(1), torch.zeros(1)).tolist())
""",
        stock="NotImplementedError: casting a TensorProxy to a Python boolean is not supported",
        eager="[1.0]",
        rules=(builtin_max, builtin_min),
    ),
]
