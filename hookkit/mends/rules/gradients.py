"""Operations of torch whose gradients thunder gets wrong, and which stay traced: what PyTorch makes of them.

Each says what thunder 0.2.6 does; when that is mended the rule can go.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit
from hookkit import compat
from hookkit.mends.mend import Mend
from hookkit.rules._names import both, of_torch

__all__ = [
    "MENDS",
    "activations_in_place",
    "ceil_and_floor",
    "celu",
    "clamp",
    "clamp_to_tensors",
    "clamp_zero_at_bounds",
    "elu",
    "glu",
    "max_along_dim",
    "mish",
    "relu",
    "selu",
    "sigmoid",
    "softmax",
    "tanh",
]

PRIORITY = -100
F: Any = torch.nn.functional


@hookkit.rule(both("ceil", "floor"), pass_call=True, priority=PRIORITY)
def ceil_and_floor(call: hookkit.Call, input: Any, *, out: None = None) -> Any:
    """Has a gradient of zeros; under thunder it is None."""
    return call.callable(input), hookkit.save()


@ceil_and_floor.when
def _(call: hookkit.Call, *args: Any, out: Any = None, **kwargs: Any) -> bool:
    return out is None


@ceil_and_floor.backward
def _(call: hookkit.Call, saved: Any, gradient: Any) -> Any:
    return {"input": torch.zeros_like(gradient)}


@hookkit.rule([*both("sigmoid"), *of_torch("nn.functional.sigmoid", "special.expit")], priority=PRIORITY)
def sigmoid(input: Any, *, out: None = None) -> Any:
    """Has a gradient of zero where ``exp(-input)`` overflows, below -88 in float32; thunder's is NaN."""
    output = torch.sigmoid(input)
    return output, hookkit.save(output=output)


@sigmoid.backward
def _(saved: Any, gradient: Any) -> Any:
    return {"input": gradient * saved.output * (1 - saved.output)}


@sigmoid.when
def _(input: Any, *, out: Any = None) -> bool:
    return out is None and input.dtype not in (torch.complex64, torch.complex128)


# In bfloat16 and float16 thunder rounds after each step of these gradients, and PyTorch once, at the end.


def is_short(dtype: Any) -> bool:
    """Whether a dtype has half the bits of float32."""
    return dtype in (torch.bfloat16, torch.float16)


@hookkit.rule([*both("tanh"), *of_torch("nn.functional.tanh")], priority=PRIORITY)
def tanh(input: Any, *, out: None = None) -> Any:
    """Computes its gradient in float32, for inputs in half precision; thunder rounds after each operation."""
    output = torch.tanh(input)
    return output, hookkit.save(output=output)


@tanh.backward
def _(saved: Any, gradient: Any) -> Any:
    output = saved.output.float()
    return {"input": (gradient.float() * (1 - output * output)).to(gradient.dtype)}


@tanh.when
def _(input: Any, *, out: Any = None) -> bool:
    return out is None and is_short(input.dtype)


@hookkit.rule([*both("softmax"), *of_torch("nn.functional.softmax")], pass_call=True, priority=PRIORITY)
def softmax(call: hookkit.Call, input: Any, dim: Any = None, *args: Any, **options: Any) -> Any:
    """Computes its gradient in float32, for inputs in half precision; thunder rounds after each operation."""
    output = call.callable(input, dim)
    return output, hookkit.save(output=output, dim=dim)


@softmax.backward
def _(call: hookkit.Call, saved: Any, gradient: Any) -> Any:
    output, gradient = saved.output.float(), gradient.float()
    total = (gradient * output).sum(saved.dim, keepdim=True)
    return {"input": (output * (gradient - total)).to(saved.output.dtype)}


@softmax.when
def _(call: hookkit.Call, input: Any, dim: Any = None, *args: Any, dtype: Any = None, **options: Any) -> bool:
    known = not args and dtype is None and options.get("out") is None and options.keys() <= {"_stacklevel", "out"}
    return known and is_short(input.dtype) and isinstance(dim, int)


@hookkit.rule(of_torch("nn.functional.glu"), priority=PRIORITY)
def glu(input: Any, dim: int = -1) -> Any:
    """Uses the sigmoid above, whose gradient has no NaN."""
    first, second = torch.chunk(input, 2, dim)
    return first * torch.sigmoid(second)


def _elu(input: Any, alpha: float, scale: float, input_scale: float) -> Any:
    """As in aten/src/ATen/native/cpu/Activation.cpp; the exponential is never taken of a large number."""
    negative = alpha * scale * torch.expm1(torch.where(input > 0, 0, input) * input_scale)
    return torch.where(input > 0, input * scale, negative)


@hookkit.rule([*both("relu"), *of_torch("nn.functional.relu")], priority=PRIORITY)
def relu(input: Any, inplace: bool = False) -> Any:
    """Leaves NaN as it is; thunder makes it zero."""
    return torch.where(input <= 0, 0, input)


@hookkit.rule(of_torch("nn.functional.elu"), priority=PRIORITY)
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Has a gradient of one where ``exp(input)`` overflows; thunder's is NaN."""
    return _elu(input, alpha, 1.0, 1.0)


@hookkit.rule([*both("celu"), *of_torch("nn.functional.celu")], priority=PRIORITY)
def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Has the gradient of ``elu`` above, without NaN for large inputs."""
    return _elu(input, alpha, 1.0, 1 / alpha)


@hookkit.rule([*both("selu"), *of_torch("nn.functional.selu")], priority=PRIORITY)
def selu(input: Any, inplace: bool = False) -> Any:
    """Has the gradient of ``elu`` above, without NaN for large inputs."""
    return _elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


@hookkit.rule(of_torch("nn.functional.mish"), priority=PRIORITY)
def mish(input: Any, inplace: bool = False) -> Any:
    """Has a gradient of one where ``exp(input)`` overflows; thunder's is NaN."""
    return input * torch.tanh(F.softplus(input))


CLAMPS = both("clamp", "clamp_max", "clamp_min", "clip")


@hookkit.rule(CLAMPS, pass_call=True, priority=PRIORITY)
def clamp(call: hookkit.Call, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes the gradient on at a bound, where the installed PyTorch does; thunder's is zero there."""
    output = call.callable(input, *args, **kwargs)
    return output, hookkit.save(inside=output == input)


@clamp.backward
def _(call: hookkit.Call, saved: Any, gradient: Any) -> Any:
    return {"input": torch.where(saved.inside, gradient, 0)}


@clamp.when
def _(call: hookkit.Call, input: Any, *args: Any, **kwargs: Any) -> bool:
    return between_numbers(call, input, *args, **kwargs) and compat.clamp_has_gradient_at_bounds()


@hookkit.rule(CLAMPS, pass_call=True, priority=PRIORITY + 1)
def clamp_zero_at_bounds(call: hookkit.Call, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Has a gradient of zero at a bound and for NaN, where the installed PyTorch does; thunder passes it on for NaN."""
    output = call.callable(input, *args, **kwargs)
    inside = output == input
    for bound in (*args, *kwargs.values()):
        if bound is not None:
            inside = inside & (input != bound)
    return output, hookkit.save(inside=inside)


@clamp_zero_at_bounds.backward
def _(call: hookkit.Call, saved: Any, gradient: Any) -> Any:
    return {"input": torch.where(saved.inside, gradient, 0)}


@clamp_zero_at_bounds.when
def _(call: hookkit.Call, input: Any, *args: Any, **kwargs: Any) -> bool:
    return between_numbers(call, input, *args, **kwargs) and not compat.clamp_has_gradient_at_bounds()


def between_numbers(call: hookkit.Call, input: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the bounds are numbers, in order."""
    bounds = [b for b in (*args, *kwargs.values()) if b is not None]
    return all(isinstance(b, int | float) for b in bounds) and bounds == sorted(bounds)


clamp_to_tensors = hookkit.rule(CLAMPS, mode="opaque", pass_call=True, priority=PRIORITY - 1, name="clamp_to_tensors")


@clamp_to_tensors.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only with bounds that are tensors, or out of order, where a gradient can be asked for."""
    return any(call.needs) and not between_numbers(call, *args, **kwargs)


@hookkit.rule(both("max"), pass_call=True, priority=PRIORITY)
def max_along_dim(call: hookkit.Call, input: Any, dim: int, keepdim: bool = False, *, out: None = None) -> Any:
    """Gives the whole gradient to the element whose index is returned; thunder shares it among ties."""
    returned = call.callable(input, dim, keepdim)
    return returned, hookkit.save(indices=returned[1], dim=dim, keepdim=keepdim, shape=input.shape)


@max_along_dim.backward
def _(call: hookkit.Call, saved: Any, gradients: Any) -> Any:
    gradient, indices = gradients[0], saved.indices
    if not saved.keepdim:
        gradient, indices = gradient.unsqueeze(saved.dim), indices.unsqueeze(saved.dim)
    zeros = torch.zeros(saved.shape, dtype=gradient.dtype, device=gradient.device)
    return {"input": zeros.scatter(saved.dim, indices, gradient)}


@max_along_dim.when
def _(call: hookkit.Call, input: Any, *args: Any, out: Any = None, **kwargs: Any) -> bool:
    dim = args[0] if args else kwargs.get("dim")
    return out is None and isinstance(dim, int) and input.ndim > 0


# What is left of these: calls that work in place.
ACTIVATIONS = of_torch(*(f"nn.functional.{name}" for name in ("celu", "elu", "mish", "selu")))


def makes_a_tensor(*args: Any, **kwargs: Any) -> bool:
    """Whether a call is not asked to work in place."""
    return not kwargs.get("inplace") and not any(a is True for a in args)


for activation in (celu, elu, mish, relu, selu):
    activation.when(makes_a_tensor)

activations_in_place = hookkit.rule(
    ACTIVATIONS, mode="opaque", pass_call=True, priority=PRIORITY - 1, name="activations_in_place"
)


@activations_in_place.when
def _(call: hookkit.Call, *args: Any, **kwargs: Any) -> bool:
    """Only in place, where a gradient can be asked for."""
    return any(call.needs)


MENDS = [
    Mend(
        "ceil and floor",
        "What `ceil` and `floor` return requires no grad, where PyTorch has a gradient of zeros.",
        program="""
x = torch.ones(1, requires_grad=True)
thunder.jit(torch.floor)(x).sum().backward()
print(x.grad)
""",
        stock="RuntimeError: element 0 of tensors does not require grad",
        eager="tensor([0.])",
        rules=(ceil_and_floor,),
    ),
    Mend(
        "sigmoid",
        "The gradient of `sigmoid`, and of `glu`, is NaN where the exponential overflows.",
        program="""
x = torch.tensor([-100.0], requires_grad=True)
thunder.jit(torch.sigmoid)(x).sum().backward()
print(x.grad)
""",
        stock="tensor([nan])",
        eager="tensor([0.])",
        rules=(sigmoid, glu),
    ),
    Mend(
        "tanh and softmax of bfloat16",
        "In bfloat16 and float16 the gradients of `tanh` and `softmax` are rounded after each step, not once.",
        program="""
x = torch.tensor([-2.0], dtype=torch.bfloat16, requires_grad=True)
thunder.jit(torch.tanh)(x).sum().backward()
print(x.grad.item())
""",
        stock="0.07080078125",
        eager="0.06884765625",
        rules=(tanh, softmax),
    ),
    Mend(
        "elu, celu, selu and mish",
        "The gradients of `elu`, `celu`, `selu` and `mish` are NaN where the exponential overflows.",
        program="""
x = torch.tensor([100.0], requires_grad=True)
thunder.jit(torch.nn.functional.elu)(x).sum().backward()
print(x.grad)
""",
        stock="tensor([nan])",
        eager="tensor([1.])",
        rules=(elu, celu, selu, mish, activations_in_place),
    ),
    Mend(
        "relu of NaN",
        "`relu` makes zero of NaN where a gradient is asked for.",
        program="""
x = torch.tensor([float("nan")], requires_grad=True)
print(thunder.jit(lambda x: torch.relu(x))(x).tolist())
""",
        stock="[0.0]",
        eager="[nan]",
        rules=(relu,),
    ),
    Mend(
        "clamp of NaN",
        "The gradient of `clamp` of NaN is one.",
        program="""
x = torch.tensor([float("nan")], requires_grad=True)
thunder.jit(lambda x: torch.clamp(x, min=0.0))(x).sum().backward()
print(x.grad)
""",
        stock="tensor([1.])",
        eager="tensor([0.])",
        rules=(clamp, clamp_zero_at_bounds),
    ),
    Mend(
        "clamp between tensors",
        "`clamp` of a tensor that is equal to a bound gives the bound all of the gradient.",
        program="""
x, low = (torch.zeros(1, requires_grad=True) for _ in range(2))
thunder.jit(lambda x, low: torch.clamp(x, min=low))(x, low).sum().backward()
print(x.grad.item() > 0)
""",
        stock="False",
        eager="True",
        rules=(clamp_to_tensors,),
    ),
    Mend(
        "max along a dimension",
        "`max` along a dimension shares the gradient among elements that are equally large.",
        program="""
x = torch.ones(2, requires_grad=True)
thunder.jit(lambda x: torch.max(x, 0)[0])(x).backward()
print(x.grad)
""",
        stock="tensor([0.5000, 0.5000])",
        eager="tensor([1., 0.])",
        rules=(max_along_dim,),
    ),
]
if compat.clamp_has_gradient_at_bounds():
    MENDS.append(
        Mend(
            "clamp at a bound",
            "The gradient of `clamp` is zero where a number is equal to a bound.",
            program="""
x = torch.zeros(1, requires_grad=True)
thunder.jit(lambda x: torch.clamp(x, min=0.0))(x).sum().backward()
print(x.grad)
""",
            stock="tensor([0.])",
            eager="tensor([1.])",
            rules=(clamp,),
        )
    )
