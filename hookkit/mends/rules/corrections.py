"""Operations of torch that thunder has, and gets wrong: what PyTorch makes of them.

Each says what thunder 0.2.6 does; when that is mended the rule can go. Operations that programs are full of stay
traced; those that are rare, or wrong in a way that takes long to write down, PyTorch runs.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit
from hookkit import compat
from hookkit.rules._names import both, of_torch

__all__ = [
    "activations_in_place",
    "bool_inputs",
    "ceil_and_floor",
    "celu",
    "clamp",
    "clamp_to_tensors",
    "clamp_zero_at_bounds",
    "cross_entropy",
    "differentiated_by_pytorch",
    "div_with_rounding",
    "elu",
    "empty_inputs",
    "glu",
    "instance_norm",
    "max_along_dim",
    "mish",
    "nll_loss",
    "relu",
    "selu",
    "sigmoid",
    "softmax",
    "split",
    "tanh",
    "unfold_and_take_along_dim",
    "variance_of_all",
]

PRIORITY = -100
F: Any = torch.nn.functional


# ------------------------------------------------------------------------------------------------ values and structure

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


@hookkit.rule([*both("relu"), *of_torch("nn.functional.relu")], priority=PRIORITY)
def relu(input: Any, inplace: bool = False) -> Any:
    """Leaves NaN as it is; thunder makes it zero."""
    return torch.where(input <= 0, 0, input)


# ---------------------------------------------------------------------------------------- gradients, by PyTorch itself

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


# --------------------------------------------------------------------------------------------------- gradients, traced


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
