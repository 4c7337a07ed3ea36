"""Operations of torch whose gradients thunder gets wrong, and which PyTorch runs where a gradient can be asked for.

They are rare, or wrong in a way that takes long to write down. Each says what thunder 0.2.6 does; when that is mended
it can go from the list.
"""

from __future__ import annotations

from typing import Any

import hookkit
from hookkit.mends.mend import Mend
from hookkit.rules._names import both, of_torch

__all__ = ["MENDS", "differentiated_by_pytorch", "div_with_rounding"]

PRIORITY = -100


# thunder has None for the last tensor of copysign and index_put, and for bernoulli and zero_, whose gradients are 0.
# NaN at zeros: atan2, normalize, pow of two tensors and to the power of 0, prod. NaN from infinities: prelu. Of another
# dtype: frexp. Shared among ties: max_pool1d. Fails: max_pool3d.
differentiated_by_pytorch = hookkit.rule(
    [
        *both("atan2", "bernoulli", "copysign", "frexp", "index_put", "pow", "prelu", "prod"),
        *both("atan2_", "bernoulli_", "ceil_", "clamp_", "copysign_", "floor_", "index_put_", "pow_", "zero_"),
        *of_torch("nn.functional.normalize", "nn.functional.prelu", "Tensor.__pow__", "Tensor.__rpow__"),
        *of_torch(*(f"{where}max_pool{n}d" for where in ("", "nn.functional.") for n in (1, 3))),
    ],
    mode="opaque",
    pass_call=True,
    priority=PRIORITY,
    name="differentiated_by_pytorch",
)


@differentiated_by_pytorch.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only where a gradient can be asked for; of powers, those of two tensors and to the power of 0."""
    is_power = "pow" in call.name
    return any(call.needs) and (not is_power or all(hasattr(a, "shape") or a == 0 for a in args[1:]))


div_with_rounding = hookkit.rule(
    both("div", "divide", "div_", "divide_"), mode="opaque", pass_call=True, priority=PRIORITY, name="div_with_rounding"
)


@div_with_rounding.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only with a ``rounding_mode``: the gradient is zero; thunder's is NaN where it divides by zero."""
    return any(call.needs) and kwargs.get("rounding_mode") is not None


MENDS = [
    Mend(
        "copysign",
        "The gradient of `copysign` for its second tensor is None, not zeros; so is that of `bernoulli`.",
        program="""
y = torch.ones(1, requires_grad=True)
thunder.jit(torch.copysign)(torch.ones(1, requires_grad=True), y).sum().backward()
print(y.grad)
""",
        stock="None",
        eager="tensor([0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "index_put",
        "The gradient of `index_put` for the values is None.",
        program="""
x, values = torch.zeros(2, requires_grad=True), torch.ones(1, requires_grad=True)
thunder.jit(lambda x, i, v: torch.index_put(x, [i], v))(x, torch.tensor([0]), values).sum().backward()
print(values.grad)
""",
        stock="None",
        eager="tensor([1.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "zero_",
        "What `zero_` and `bernoulli` return requires no grad, where PyTorch has a gradient of zeros.",
        program="""
x = torch.ones(1, requires_grad=True)
thunder.jit(lambda x: (x * 2).zero_())(x).sum().backward()
print(x.grad)
""",
        stock="RuntimeError: element 0 of tensors does not require grad",
        eager="tensor([0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "atan2",
        "The gradient of `atan2` of zeros is NaN.",
        program="""
y, x = (torch.zeros(1, requires_grad=True) for _ in range(2))
thunder.jit(torch.atan2)(y, x).sum().backward()
print(y.grad)
""",
        stock="tensor([nan])",
        eager="tensor([0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "normalize",
        "The gradient of `normalize` of zeros is NaN.",
        program="""
x = torch.zeros(2, requires_grad=True)
thunder.jit(lambda x: torch.nn.functional.normalize(x, dim=0))(x).sum().backward()
print(x.grad.isnan().any())
""",
        stock="tensor(True)",
        eager="tensor(False)",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "pow",
        "The gradient of `x ** y` for `y` is NaN where x is 0; and that of `x ** 0` for x.",
        program="""
x, y = torch.zeros(1, requires_grad=True), torch.full((1,), 2.0, requires_grad=True)
thunder.jit(torch.pow)(x, y).sum().backward()
print(y.grad)
""",
        stock="tensor([nan])",
        eager="tensor([0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "prod",
        "The gradient of `prod` is NaN where an element is 0.",
        program="""
x = torch.tensor([0.0, 2.0], requires_grad=True)
thunder.jit(torch.prod)(x).backward()
print(x.grad)
""",
        stock="tensor([nan, 0.])",
        eager="tensor([2., 0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "prelu",
        "The gradient of `prelu` for the weight is NaN where an element is infinite.",
        program="""
x, weight = torch.tensor([float("inf")], requires_grad=True), torch.ones(1, requires_grad=True)
thunder.jit(torch.nn.functional.prelu)(x, weight).sum().backward()
print(weight.grad)
""",
        stock="tensor([nan])",
        eager="tensor([0.])",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "max_pool1d",
        "`max_pool1d` shares the gradient among elements that are equally large.",
        program="""
x = torch.ones(1, 1, 2, requires_grad=True)
thunder.jit(lambda x: torch.nn.functional.max_pool1d(x, 2))(x).sum().backward()
print(x.grad.tolist())
""",
        stock="[[[0.5, 0.5]]]",
        eager="[[[1.0, 0.0]]]",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "max_pool3d",
        "The gradient of `max_pool3d` fails.",
        program="""
x = torch.ones(1, 1, 2, 2, 2, requires_grad=True)
thunder.jit(lambda x: torch.nn.functional.max_pool3d(x, 2))(x).sum().backward()
print(x.grad.sum())
""",
        stock="RuntimeError",
        eager="tensor(1.)",
        rules=(differentiated_by_pytorch,),
    ),
    Mend(
        "div with a rounding_mode",
        "The gradient of `div` with a `rounding_mode` is not zero: it is infinite, or NaN, where the divisor is 0.",
        program="""
x = torch.ones(1, requires_grad=True)
thunder.jit(lambda x: torch.div(x, 0.0, rounding_mode="floor"))(x).sum().backward()
print(x.grad)
""",
        stock="tensor([inf])",
        eager="tensor([0.])",
        rules=(div_with_rounding,),
    ),
]
