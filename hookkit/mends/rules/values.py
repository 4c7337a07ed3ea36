"""Operations of torch of which thunder gets values or structure wrong, or fails: what PyTorch makes of them.

Each says what thunder 0.2.6 does; when that is mended the rule can go.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit
from hookkit.mends.mend import Mend
from hookkit.rules._names import both, of_torch

__all__ = [
    "MENDS",
    "bool_inputs",
    "cross_entropy",
    "empty_inputs",
    "instance_norm",
    "nll_loss",
    "split",
    "unfold_and_take_along_dim",
    "variance_of_all",
]

PRIORITY = -100
F: Any = torch.nn.functional


# thunder takes Tensor.unfold for torch.nn.functional.unfold, and take_along_dim does not count negative indices from
# the end.
unfold_and_take_along_dim = hookkit.rule(
    [*of_torch("Tensor.unfold"), *both("take_along_dim")],
    mode="opaque",
    priority=PRIORITY,
    name="unfold_and_take_along_dim",
)

bool_inputs = hookkit.rule(both("masked_fill", "max"), mode="opaque", priority=PRIORITY + 1, name="bool_inputs")


@bool_inputs.when
def _(input: Any, *args: Any, **kwargs: Any) -> bool:
    """Only of booleans: of what ``masked_fill`` returns thunder makes integers, and in ``max`` it fails."""
    return input.dtype is torch.bool


instance_norm = hookkit.rule(of_torch("nn.functional.instance_norm"), mode="opaque", priority=PRIORITY)


@instance_norm.when
def _(input: Any, running_mean: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Only with running statistics, which thunder does not update."""
    return running_mean is not None


empty_inputs = hookkit.rule(
    [
        *both("chunk", "split", "tensor_split"),
        *of_torch(*(f"nn.functional.{name}" for name in ("cross_entropy", "glu", "group_norm", "linear"))),
    ],
    mode="opaque",
    pass_call=True,
    priority=PRIORITY + 1,
    name="empty_inputs",
)


@empty_inputs.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only of tensors without elements: PyTorch returns empty results and gradients, and thunder none, or fails."""
    return 0 in next(iter((*args, *kwargs.values()))).shape


@hookkit.rule(both("split"), pass_call=True, priority=PRIORITY)
def split(call: hookkit.Call, *args: Any, **kwargs: Any) -> Any:
    """Returns a tuple; thunder returns a list."""
    return tuple(call.callable(*args, **kwargs))


@hookkit.rule(both("std", "var", "var_mean"), pass_call=True, priority=PRIORITY)
def variance_of_all(call: hookkit.Call, input: Any, unbiased: bool) -> Any:
    """Computes the variance of all elements in ``torch.var(x, False)``; thunder takes ``False`` for a dimension."""
    return call.callable(input, correction=int(unbiased))


@variance_of_all.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    return len(args) + len(kwargs) == 2 and isinstance([*args, *kwargs.values()][1], bool)


@hookkit.rule(of_torch("nn.functional.nll_loss"), priority=PRIORITY)
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Gives ``ignore_index`` PyTorch's default, -100; thunder's is -1 in the forward and None in the backward."""
    return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)


cross_entropy = hookkit.rule(of_torch("nn.functional.cross_entropy"), mode="opaque", pass_call=True, priority=PRIORITY)


@cross_entropy.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only for a sum, or for one sample without a batch: their backward fails under thunder, except in float64."""
    given = [*args, *kwargs.values()]
    is_sum = any(isinstance(a, str) and a == "sum" for a in given)
    return any(call.needs) and (is_sum or given[0].ndim == 1)


MENDS = [
    Mend(
        "Tensor.unfold",
        "`Tensor.unfold` is taken for `torch.nn.functional.unfold`.",
        program="""
print(thunder.jit(lambda x: x.unfold(0, 2, 1))(torch.arange(3.0)).tolist())
""",
        stock="RuntimeError",
        eager="[[0.0, 1.0], [1.0, 2.0]]",
        rules=(unfold_and_take_along_dim,),
    ),
    Mend(
        "take_along_dim with negative indices",
        "The gradient of `take_along_dim` does not count negative indices from the end.",
        program="""
x = torch.arange(4.0).reshape(2, 2).requires_grad_()
thunder.jit(lambda x, i: torch.take_along_dim(x, i, 0))(x, torch.tensor([[-1, -1]])).sum().backward()
print(x.grad.tolist())
""",
        stock="RuntimeError: index -1 is out of bounds",
        eager="[[0.0, 0.0], [1.0, 1.0]]",
        rules=(unfold_and_take_along_dim,),
    ),
    Mend(
        "booleans",
        "`masked_fill` makes integers of booleans, and `max` does not find the place of the largest of them.",
        program="""
x = torch.tensor([True, False])
print(thunder.jit(lambda x: x.masked_fill(~x, 1))(x).dtype)
""",
        stock="torch.int64",
        eager="torch.bool",
        rules=(bool_inputs,),
    ),
    Mend(
        "running statistics of instance_norm",
        "`instance_norm` does not update running statistics where a gradient is asked for.",
        program="""
norm = torch.nn.InstanceNorm1d(1, track_running_stats=True, affine=True)
thunder.jit(norm)(torch.ones(2, 1, 3))
print([round(mean, 3) for mean in norm.running_mean.tolist()])
""",
        stock="[0.0]",
        eager="[0.1]",
        rules=(instance_norm,),
    ),
    Mend(
        "tensors without elements",
        "Of a tensor without elements `split` returns nothing, `linear` has no gradient, and the results of `chunk`, "
        "`cross_entropy` and `group_norm` require no grad.",
        program="""
x = torch.ones(0, 2, requires_grad=True)
thunder.jit(lambda x: torch.split(x, 1)[0] * 2)(x).sum().backward()
print(x.grad.shape)
""",
        stock="IndexError",
        eager="torch.Size([0, 2])",
        rules=(empty_inputs,),
    ),
    Mend(
        "split",
        "`split` returns a list.",
        program="""
print(type(thunder.jit(lambda x: torch.split(x, 1))(torch.ones(2))).__name__)
""",
        stock="list",
        eager="tuple",
        rules=(split,),
    ),
    Mend(
        "a variance of all elements",
        "`torch.var(x, False)`, `std` and `var_mean` take `unbiased` for the dimension.",
        program="""
print(thunder.jit(lambda x: torch.var(x, False))(torch.tensor([0.0, 2.0])).item())
""",
        stock="TypeError",
        eager="1.0",
        rules=(variance_of_all,),
    ),
    Mend(
        "ignore_index of nll_loss",
        "The default of `ignore_index` is -1, not -100, and None in the gradient.",
        program="""
x = torch.zeros(2, 3, requires_grad=True)
thunder.jit(torch.nn.functional.nll_loss)(x, torch.tensor([0, -100])).backward()
print(x.grad.tolist())
""",
        stock="ValueError: None had an unexpected type",
        eager="[[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]",
        rules=(nll_loss,),
    ),
    Mend(
        "a sum of cross_entropy",
        "The gradient of a sum of `cross_entropy`, or of one for a single element, fails in every dtype but float64.",
        program="""
x, target = torch.zeros(1, 2, requires_grad=True), torch.tensor([0])
loss = thunder.jit(lambda x, i: torch.nn.functional.cross_entropy(x, i, reduction="sum"))
loss(x, target).backward()
print(x.grad.tolist())
""",
        stock="RuntimeError: expected scalar type Float but found Double",
        eager="[[-0.5, 0.5]]",
        rules=(cross_entropy,),
    ),
]
