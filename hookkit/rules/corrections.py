"""Operations of torch that thunder has, and gets wrong: what PyTorch makes of them.

Each says what thunder 0.2.6 does; when that is mended the rule can go. Operations that programs are full of stay
traced; those that are rare, or wrong in a way that takes long to write down, PyTorch runs.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit

__all__ = [
    "differentiated_by_pytorch",
    "instance_norm",
    "nll_loss",
    "run_by_pytorch",
    "split",
    "steps",
    "unbiased",
]

PRIORITY = -100
F: Any = torch.nn.functional


def both(*names: str) -> list[Any]:
    """The function of torch and the method of tensors of each name."""
    return [getattr(owner, name) for name in names for owner in (torch, torch.Tensor) if hasattr(owner, name)]


def needs_gradient(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Whether a gradient can be asked for; without one thunder is right."""
    return any(call.needs)


# Gradients. copysign and index_put have one for their last tensor too; bernoulli, fill_ and zero_ have zeros, not None;
# where a factor is zero the gradient of prod is that of the others, not NaN.
differentiated_by_pytorch = hookkit.rule(
    both("bernoulli", "copysign", "index_put", "index_put_", "prod", "zero_", "ceil_", "floor_", "copysign_"),
    mode="opaque",
    pass_call=True,
    priority=PRIORITY,
    name="differentiated_by_pytorch",
)
differentiated_by_pytorch.when(needs_gradient)

# Values. thunder takes Tensor.unfold for torch.nn.functional.unfold, and take_along_dim does not count negative indices
# from the end.
run_by_pytorch = hookkit.rule(
    [torch.Tensor.unfold, torch.take_along_dim, torch.Tensor.take_along_dim],
    mode="opaque",
    priority=PRIORITY,
    name="run_by_pytorch",
)


@hookkit.rule(both("ceil", "floor"), pass_call=True, priority=PRIORITY)
def steps(call: hookkit.Call, tensor: Any) -> Any:
    """A step function, whose gradient is zero and not None."""
    return call.callable(tensor), hookkit.save()


@steps.backward
def _(call: hookkit.Call, saved: Any, gradient: Any) -> Any:
    return (torch.zeros_like(gradient),)


@hookkit.rule(both("split"), pass_call=True, priority=PRIORITY)
def split(call: hookkit.Call, *args: Any, **kwargs: Any) -> Any:
    """A tuple, where thunder returns a list."""
    return tuple(call.callable(*args, **kwargs))


@hookkit.rule(both("std", "std_mean", "var", "var_mean"), pass_call=True, priority=PRIORITY)
def unbiased(call: hookkit.Call, tensor: Any, unbiased: bool) -> Any:
    """A variance of all elements: ``torch.var(x, False)``, of which thunder takes the second argument for a dim."""
    return call.callable(tensor, correction=int(unbiased))


@unbiased.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    return len(args) + len(kwargs) == 2 and isinstance([*args, *kwargs.values()][1], bool)


@hookkit.rule(F.nll_loss, priority=PRIORITY)
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """With PyTorch's default of ``ignore_index``; thunder's is -1, and None to its backward."""
    return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)


# thunder's does not update the running statistics.
instance_norm = hookkit.rule(F.instance_norm, mode="opaque", priority=PRIORITY)


@instance_norm.when
def _(input: Any, running_mean: Any = None, *args: Any, **kwargs: Any) -> bool:
    return running_mean is not None
