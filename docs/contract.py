"""The contract of ``torch.autograd.Function``: small programs, and what becomes of each under thunder.jit.

``tests/test_contract.py`` runs every case against eager PyTorch and holds its state; the directive ``contract-table``
makes the table of the reference from the same list.

The states: *traced*, the operations stand in the trace; *opaque*, the call is one operator, run by PyTorch, and right;
*refused*, hookkit raises an error that says what to do; *as eager*, the program raises what it raises in eager PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton_kernels
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from triton_kernels import scale_in_place, scaled

CASES: list[Case] = []


@dataclass(frozen=True)
class Case:
    """A point of the contract.

    Attributes:
        group: the heading under which it is listed.
        point: what it is, in Markdown.
        state: what becomes of it.
        make: returns the program and its arguments.
    """

    group: str
    point: str
    state: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


group = ""


def case(point: str, state: str = "traced") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a case to the group that was begun last."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(group, point, state, make))
        return make

    return add


def vector(n: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that requires grad."""
    values = torch.arange(1, n + 1, dtype=torch.float32) / 4
    return values.to(dtype).requires_grad_(dtype.is_floating_point or dtype.is_complex)


def function(forward: Callable[..., Any], backward: Callable[..., Any], **members: Any) -> Any:
    """A Function made of two functions. Gradients are times 100 in most cases, to be told from thunder's own."""
    named = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("F", (torch.autograd.Function,), {**named, **members})


def hundred(ctx: Any, *grads: Any) -> Any:
    """A backward that is wrong on purpose."""
    return grads[0] * 100


def batched() -> Any:
    """A Function for which PyTorch makes the rule of vmap."""
    keeps_nothing = staticmethod(lambda ctx, inputs, output: None)
    return function(lambda x: x * 2, hundred, setup_context=keeps_nothing, generate_vmap_rule=True)


group = "ctx"


@case("`save_for_backward`: inputs, outputs, intermediates, None, one tensor twice; `saved_tensors` read many times")
def _():
    def forward(ctx, x):
        middle = x.exp()
        out = middle * 2
        ctx.save_for_backward(x, middle, out, None, x)
        return out

    def backward(ctx, grad):
        x, middle, out, nothing, again = ctx.saved_tensors
        assert nothing is None
        return 100 * grad * (x + middle + out + again + ctx.saved_tensors[0])

    return function(forward, backward).apply, (vector(),)


@case("`save_for_backward` called twice: the last call wins; `save_for_forward` is accepted")
def _():
    def forward(ctx, x):
        ctx.save_for_backward(x, x)
        ctx.save_for_backward(x.exp())
        ctx.save_for_forward(x)
        return x * 2

    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return 100 * grad * saved

    return function(forward, backward).apply, (vector(),)


@case("attributes that hold tensors: inputs, intermediates, lists and dicts of them")
def _():
    def forward(ctx, x):
        ctx.x, ctx.many, ctx.named = x, [x.exp(), x.sin()], {"cos": x.cos()}
        return x * 2

    def backward(ctx, grad):
        return 100 * grad * (ctx.x + ctx.many[0] * ctx.many[1] + ctx.named["cos"])

    return function(forward, backward).apply, (vector(),)


@case("attributes of any other kind: numbers, strings, shapes, dtypes, devices, callables, objects")
def _():
    class Options:
        factor = 3.0

    def forward(ctx, x):
        ctx.shape, ctx.dtype, ctx.device, ctx.how, ctx.call, ctx.options = (
            x.shape,
            x.dtype,
            x.device,
            "twice",
            torch.sin,
            Options(),
        )
        return x * 2

    def backward(ctx, grad):
        ones = torch.ones(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return 100 * ctx.call(grad) * ones * ctx.options.factor * len(ctx.how)

    return function(forward, backward).apply, (vector(),)


@case("ctx handed to helpers; `setattr`, `hasattr`")
def _():
    def keep(ctx, **values):
        for name, value in values.items():
            setattr(ctx, name, value)

    def forward(ctx, x):
        keep(ctx, a=x, b=2)
        return x * 2

    def backward(ctx, grad):
        return grad * ctx.a * (100 if hasattr(ctx, "b") and not hasattr(ctx, "c") else 1)

    return function(forward, backward).apply, (vector(),)


@case("`needs_input_grad`, in forward and backward, right for intermediates too")
def _():
    def forward(ctx, x, y):
        ctx.seen = ctx.needs_input_grad
        return x * y

    def backward(ctx, grad):
        assert tuple(ctx.seen) == tuple(ctx.needs_input_grad) == (True, False)
        return 100 * grad, None

    F = function(forward, backward)
    return lambda x, y: F.apply(x.sin(), y.sin()), (vector(), vector().detach())


@case("`mark_non_differentiable`")
def _():
    def forward(ctx, x):
        values, indices = x * 2, x.round()
        ctx.mark_non_differentiable(indices)
        return values, indices

    return function(forward, hundred).apply, (vector(),)


@case("`mark_dirty`: an argument changed in place", "opaque")
def _():
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    F = function(forward, hundred)
    return lambda x: F.apply(x * 1), (vector(),)


@case("`mark_dirty` on a leaf that requires grad", "as eager")
def _():
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    return function(forward, hundred).apply, (vector(),)


@case("`set_materialize_grads(False)`, one output that requires grad")
def _():
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    return function(forward, hundred).apply, (vector(),)


@case("`set_materialize_grads(False)`, several: which gradients are None is known at run time only", "opaque")
def _():
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    def backward(ctx, first, second):
        return None if first is None and second is None else 100 * (second if first is None else first)

    F = function(forward, backward)
    return lambda x: F.apply(x)[1], (vector(),)


@case("a backward that returns None or a gradient as values decide", "opaque")
def _():
    def forward(ctx, x):
        ctx.is_large = bool(x.sum() > 1e6)
        return x * 2

    F = function(forward, lambda ctx, grad: 100 * grad if ctx.is_large else None)
    return lambda x: F.apply(x.exp()) + x, (vector(),)


@case("a checkpoint that is given parameters and asks for their gradients in its backward", "opaque")
def _():
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        return (None, *torch.autograd.grad(out, [x, *ctx.parameters], 100 * grad, allow_unused=True))

    F, layer = function(forward, backward), nn.Linear(4, 4)
    return lambda x, *parameters: F.apply(layer, x, *parameters), (vector(), *layer.parameters())


@case("an output that nothing used: its gradient is zeros")
def _():
    def forward(ctx, x):
        return x * 2, x * 3

    def backward(ctx, first, second):
        return 100 * (first + second)

    F = function(forward, backward)
    return lambda x: F.apply(x)[1], (vector(),)


if hasattr(torch.autograd.Function, "boxed_grads_call"):  # torch 2.13

    @case("`boxed_grads_call`, `clear_saved_tensors_on_access` as class attributes")
    def _():
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        def backward(ctx, grads):
            (x,) = ctx.saved_tensors
            return 100 * grads.pop() * x

        F = function(forward, backward, boxed_grads_call=True, clear_saved_tensors_on_access=True)
        return F.apply, (vector(),)


group = "Forms of a Function"


@case("`forward(...)` with `setup_context(ctx, inputs, output)`")
def _():
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return 100 * grad * x * out

    return function(lambda x: x.exp(), backward, setup_context=staticmethod(setup_context)).apply, (vector(),)


@case("`once_differentiable`")
def _():
    return function(lambda ctx, x: x * 2, once_differentiable(hundred)).apply, (vector(),)


@case("class methods; inherited forward and backward")
def _():
    class Base(torch.autograd.Function):
        factor = 2

        @classmethod
        def forward(cls, ctx, x):
            return x * cls.factor

        @classmethod
        def backward(cls, ctx, grad):
            return grad * 100 * cls.factor

    class Child(Base):
        factor = 3

    return Child.apply, (vector(),)


@case("`vjp` as the name of the backward")
def _():
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, grad):
            return grad * 100

    return F.apply, (vector(),)


@case("`vmap` and `jvp` static methods present; `generate_vmap_rule`")
def _():
    F = function(
        lambda ctx, x: x * 2,
        hundred,
        jvp=staticmethod(lambda ctx, t: t * 2),
        generate_vmap_rule=True,
    )
    return F.apply, (vector(),)


@case("made inside a function, reading closed-over values")
def _():
    factor = 3.0
    return function(lambda ctx, x: x * factor, lambda ctx, grad: grad * 100 * factor).apply, (vector(),)


@case("`torch.amp.custom_fwd` and `custom_bwd`, with and without `cast_inputs`", "opaque")
def _():
    def forward(ctx, x):
        return x * 2

    forward = torch.amp.custom_fwd(forward, device_type="cpu", cast_inputs=torch.float32)
    backward = torch.amp.custom_bwd(hundred, device_type="cpu")
    return function(forward, backward).apply, (vector(),)


@case("inside an autocast region", "opaque")
def _():
    F = function(lambda ctx, x: x @ x, lambda ctx, grad: grad.float() * 100)

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.apply(x.reshape(2, 2))

    return program, (vector(),)


@case("`apply` aliased, handed on as an argument, wrapped by `functools.partial`, applied in a loop")
def _():
    F = function(lambda ctx, n, x: x * n, lambda ctx, grad: (None, grad * 100))

    def twice(f, x):
        return f(f(x))

    def program(x):
        apply = F.apply
        for n in range(2):
            x = apply(n + 1, x)
        return twice(functools.partial(F.apply, 3), x)

    return program, (vector(),)


@case("in `nn.Module`s, with parameters and buffers")
def _():
    F = function(lambda ctx, x, w: x * w, lambda ctx, grad: (grad * 100, grad * 300))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return F.apply(x, self.weight)

    return nn.Sequential(Layer(), Layer()), (vector(),)


group = "Arguments and results"


@case("the same tensor twice; tensors that need no gradient")
def _():
    F = function(lambda ctx, x, y, z: x * y * z, lambda ctx, grad: (grad * 100, grad * 10, None))
    return lambda x, z: F.apply(x, x, z), (vector(), vector().detach())


@case("None, numbers, strings, bools, dtypes, devices, callables as arguments")
def _():
    def forward(ctx, x, *rest):
        return rest[5](x) * rest[1]

    F = function(forward, lambda ctx, grad: (grad * 100, *([None] * 6)))
    return lambda x: F.apply(x, None, 2.0, "s", True, torch.float32, torch.sin), (vector(),)


@case("tensors in lists, tuples and dicts: handed on; they get no gradient, as in eager")
def _():
    def forward(ctx, x, many, named):
        return x * many[0] * named["a"]

    F = function(forward, lambda ctx, grad: (grad * 100, None, None))
    return lambda x, y: F.apply(x, [y, y], {"a": y}), (vector(), vector().detach())


@case("`*args`; default values; keyword arguments with `setup_context`")
def _():
    class F(torch.autograd.Function):
        @staticmethod
        def forward(x, factor=2.0):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * 100 * ctx.factor, None

    return lambda x: F.apply(x) + F.apply(x, 3.0), (vector(),)


@case("integer and bool tensors; half, bfloat16, double and complex; 0-dim and empty")
def _():
    F = function(lambda ctx, x, n: x * n, lambda ctx, grad: (grad * 100, None))
    kinds = [vector(3, d) for d in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)]

    def program(*xs):
        return [F.apply(x, torch.ones(3, dtype=torch.int64) if x.ndim else True) for x in xs]

    return program, tuple(kinds)


@case("expanded and non-contiguous tensors")
def _():
    F = function(lambda ctx, x: x * 2, hundred)
    return lambda x: F.apply(x.expand(3, 4)) + F.apply(x.reshape(2, 2).mT).reshape(4), (vector(),)


@case("outputs: tuples and lists, nested, with None and numbers between; structure kept exactly")
def _():
    F = function(lambda ctx, x: (x * 2, None, 3, [x * 4]), lambda ctx, grad, *_: grad * 100)
    return F.apply, (vector(),)


@case("a one-tuple stays a one-tuple")
def _():
    return function(lambda ctx, x: (x * 2,), hundred).apply, (vector(),)


@case("an input handed on unchanged; a view of an input; the same tensor twice")
def _():
    F = function(lambda ctx, x: x, hundred)
    G = function(lambda ctx, x: x.reshape(2, 2), lambda ctx, grad: 100 * grad.reshape(4))
    return lambda x: (F.apply(x), G.apply(x * 1)), (vector(),)


@case("an in-place change of a view that a Function returned", "refused")
def _():
    G = function(lambda ctx, x: x.reshape(2, 2), lambda ctx, grad: 100 * grad.reshape(4))

    def program(x):
        y = G.apply(x * 1)
        y.add_(1)
        return y

    return program, (vector(),)


group = "Gradients"


@case("None for an input that requires grad")
def _():
    F = function(lambda ctx, x: x * 2, lambda ctx, grad: None)
    return lambda x: F.apply(x) + x, (vector(),)


@case("a wrong number of gradients", "as eager")
def _():
    return function(lambda ctx, x, y: x * y, hundred).apply, (vector(), vector())


@case("the shape of the output for a broadcast input: summed, as in eager")
def _():
    F = function(lambda ctx, x, y: x + y, lambda ctx, grad: (grad * 100, grad * 10))
    return F.apply, (vector(), torch.ones(1, requires_grad=True))


@case("a shape that does not fit", "as eager")
def _():
    return function(lambda ctx, x: x * 2, lambda ctx, grad: torch.ones(7)).apply, (vector(),)


@case("another dtype: converted, as in eager")
def _():
    return function(lambda ctx, x: x * 2, lambda ctx, grad: grad.double() * 100).apply, (vector(),)


group = "Grad mode"


@case("`no_grad` around the call: the backward is not traced")
def _():
    def backward(ctx, grad):
        raise AssertionError("traced")

    F = function(lambda ctx, x: x * 2, backward)

    def program(x):
        with torch.no_grad():
            y = F.apply(x)
        return x * y

    return program, (vector(),)


@case("no input requires grad: the backward is not traced")
def _():
    def backward(ctx, grad):
        raise AssertionError("traced")

    return function(lambda ctx, x: x * 2, backward).apply, (vector().detach(),)


@case("`no_grad` and `enable_grad` inside forward or backward", "opaque")
def _():
    def forward(ctx, x):
        with torch.no_grad():
            y = x * 2
        with torch.enable_grad():
            return y * 3

    return function(forward, hundred).apply, (vector(),)


@case("`torch.is_grad_enabled()` in forward is false, as in eager")
def _():
    return function(lambda ctx, x: x * (3 if torch.is_grad_enabled() else 2), hundred).apply, (vector(),)


@case("`detach` before and after the call; `requires_grad` of intermediates read by the program")
def _():
    F = function(lambda ctx, x: x * 2, hundred)

    def program(x):
        y = F.apply(x.sin())
        z = F.apply(y.detach())
        return y * (1 if y.requires_grad else 5) + z * (7 if z.requires_grad else 1)

    return program, (vector(),)


@case("`torch.autograd.grad` inside forward or backward", "opaque")
def _():
    def forward(ctx, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(y.square().sum(), y)
        ctx.save_for_backward(slope)
        return slope * 2

    return function(forward, lambda ctx, grad: 100 * grad * ctx.saved_tensors[0]).apply, (vector(),)


group = "In place, views, nesting"


@case("in-place operations on temporaries, in forward and backward")
def _():
    def forward(ctx, x):
        y = x * 2
        y.add_(1)
        y *= 3
        return y

    def backward(ctx, grad):
        g = grad * 1
        g.mul_(100)
        return g

    return function(forward, backward).apply, (vector(),)


@case("assignment to slices of a temporary")
def _():
    def forward(ctx, x):
        y = torch.zeros_like(x)
        for i in range(4):
            y[i] = x[i] * i
        return y

    return function(forward, hundred).apply, (vector(),)


@case("a saved tensor that the program changes later", "as eager")
def _():
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    F = function(forward, lambda ctx, grad: 100 * grad * ctx.saved_tensors[0])

    def program(x):
        y = F.apply(x)
        y.add_(1)
        return y * 1

    return program, (vector(),)


@case("Functions that call Functions, in forward and in backward")
def _():
    Inner = function(lambda ctx, x: x * 2, lambda ctx, grad: grad * 7)
    Outer = function(lambda ctx, x: Inner.apply(x) + 1, lambda ctx, grad: Inner.apply(grad) * 100)
    return Outer.apply, (vector(),)


@case("inside `torch.utils.checkpoint`")
def _():
    F = function(lambda ctx, x: x.sin(), hundred)
    return lambda x: checkpoint(lambda y: F.apply(y).sin(), x, use_reentrant=False), (vector(),)


group = "What cannot be traced"


@case("NumPy, C extensions", "opaque")
def _():
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    return function(forward, hundred).apply, (vector(),)


@case(f"launches of kernels of {triton_kernels.NAME}, in forward and backward", "opaque")
def _():
    return function(lambda ctx, x: scaled(x, 2), lambda ctx, grad: scaled(grad, 100)).apply, (vector(),)


@case("a kernel that overwrites its argument, which something before it returned", "opaque")
def _():
    def forward(ctx, x):
        out = scaled(x, 2)
        scale_in_place(x, 3)
        return out

    kernel = function(forward, hundred).apply
    return lambda x: kernel((x * 2).clamp(-1, 1)) + kernel(torch.tanh(x)), (vector(),)


@case("a backward whose kernel overwrites the gradient that it is given, which something else is given, too", "opaque")
def _():
    kernel = function(lambda ctx, x: x.detach() * 2, lambda ctx, grad: scale_in_place(grad, 100)).apply
    return lambda x, y: (x + kernel(y)) * 3, (vector(), vector())


@case("control flow that depends on the values of tensors; `item()`", "opaque")
def _():
    return function(lambda ctx, x: x * 2 if x.max() > 0.5 else x * 3, hundred).apply, (vector(),)


@case("changes of Python state: counters, caches, lists outside", "opaque")
def _():
    calls: list[int] = []

    def forward(ctx, x):
        calls.append(1)
        return x * 2

    return function(forward, hundred).apply, (vector(),)


@case("random numbers of Python or NumPy", "opaque")
def _():
    return function(lambda ctx, x: x * random.choice([2]), hundred).apply, (vector(),)


@case("outputs whose shape depends on values", "refused")
def _():
    return function(lambda ctx, x: x[x > 0.5], lambda ctx, grad: torch.ones(4)).apply, (vector(),)


@case("a second derivative (`create_graph=True`): PyTorch runs the program again for it")
def _():
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 100 * grad * ctx.saved_tensors[0] ** 2

    def second(program: Any, x: Tensor) -> Any:
        (first,) = torch.autograd.grad(program(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    F = function(lambda ctx, x: ctx.save_for_backward(x) or x**3, backward)
    return F.apply, (vector(), second)


@case("gradients for many cotangents at once (`is_grads_batched=True`)")
def _():
    def many(program: Any, x: Tensor) -> Any:
        return torch.autograd.grad(program(x), x, torch.eye(4), is_grads_batched=True)

    return function(lambda ctx, x: x * 2, hundred).apply, (vector(), many)


@case("`torch.func.grad` and `vmap` around the program: PyTorch runs it, eagerly")
def _():
    F = batched()

    def transformed(program: Any, x: Tensor) -> Any:
        return torch.vmap(torch.func.grad(program))(x.detach())

    return F.apply, (vector(), transformed)


@case("`torch.vmap` and `torch.func.grad` inside the program", "opaque")
def _():
    F = batched()

    slopes = torch.vmap(torch.func.grad(lambda row, k: (F.apply(row) * k).sum()), in_dims=(0, None))

    def program(x: Tensor) -> Any:
        k = x.exp()
        return slopes(torch.stack([x, k]), k)

    return program, (vector(),)


@case("`torch.autograd.grad` inside the program: PyTorch runs again what it differentiates")
def _():
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 100 * grad * ctx.saved_tensors[0] ** 2

    F = function(lambda ctx, x: ctx.save_for_backward(x) or x**3, backward)

    def program(x: Tensor) -> Any:
        energy = F.apply(x).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy - slope.square().sum()

    return program, (vector(),)


group = "Errors"


@case("an exception that forward raises reaches the caller as it is", "as eager")
def _():
    def forward(ctx, x):
        raise KeyError("mine")

    return function(forward, hundred).apply, (vector(),)


@case("caught by the program, which goes on as if the call had not been")
def _():
    def forward(ctx, x):
        y = x * 2
        if x.ndim == 1:
            raise KeyError(y.shape)
        return y

    F, G = function(forward, hundred), function(lambda ctx, x: x * 2, hundred)

    def program(x):
        with contextlib.suppress(KeyError):
            F.apply(x)
        return G.apply(x)

    return program, (vector(),)
