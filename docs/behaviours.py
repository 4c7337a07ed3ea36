"""What PyTorch's own tests hold custom Functions to, as programs of ours: run eagerly, by thunder.jit, by thunderfx.

``tests/test_behaviours.py`` runs each of them; the directive ``behaviours-table`` makes the table of the reference from
the same list. A program gets what compiles, or a function that changes nothing; it returns what is compared, or raises.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BEHAVIOURS: list[Behaviour] = []
Compiler = Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Behaviour:
    """What a test asserts of a custom Function.

    Attributes:
        words: the behaviour, in Markdown.
        run: the program.
        eager: ``"works"``, or the class of the exception that eager PyTorch raises.
        jit: what becomes of it under ``thunder.jit``: ``"same"``, or in words what else.
        fx: the same under ``thunderfx``.
    """

    words: str
    run: Callable[[Compiler], Any]
    eager: str
    jit: str
    fx: str


def behaviour(words: str, *, raises: str = "", jit: str = "same", fx: str = "same") -> Callable[[Any], None]:
    """Add a behaviour."""
    eager = f"`{raises}`" if raises else "works"
    return lambda run: BEHAVIOURS.append(Behaviour(words, run, eager, jit, fx))


def vector(n: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf that requires grad."""
    return (torch.arange(1, n + 1) / 4).to(dtype).requires_grad_()


def function(forward: Callable[..., Any], backward: Callable[..., Any] | None = None, **members: Any) -> Any:
    """A Function of two functions; the backward is wrong on purpose where none is given."""
    named = {"forward": staticmethod(forward), "backward": staticmethod(backward or hundred)}
    return type("F", (torch.autograd.Function,), {**named, **members})


def hundred(ctx: Any, *grads: Any) -> Any:
    """The gradient times 100."""
    return grads[0] * 100


def saving(ctx: Any, x: Tensor) -> Tensor:
    """A forward that keeps what it is given."""
    ctx.save_for_backward(x)
    return x * x


def of_saved(ctx: Any, grad: Tensor) -> Tensor:
    """A backward that uses that."""
    return 100 * grad * ctx.saved_tensors[0]


def gradients(program: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """The output of a program, and what its backward leaves on its inputs."""
    output = program(*inputs)
    output.sum().backward()
    return [output.detach(), output.requires_grad, *(x.grad for x in inputs)]


# -------------------------------------------------------------------------------------------------- what ctx keeps


@behaviour("inputs, outputs and intermediates are saved; `saved_tensors` is read twice")
def _(compiled):
    def forward(ctx, x):
        middle = x.exp()
        ctx.save_for_backward(x, middle, out := middle * 2)
        return out

    def backward(ctx, grad):
        (x, middle, _), (_, _, out) = ctx.saved_tensors, ctx.saved_tensors
        return grad * x * middle * out

    return gradients(compiled(function(forward, backward).apply), vector())


@behaviour("a backward for the second time: the saved tensors are freed", raises="RuntimeError")
def _(compiled):
    y = compiled(function(saving, of_saved).apply)(vector()).sum()
    y.backward()
    y.backward()


@behaviour("a backward for the second time with `retain_graph`: gradients are added up")
def _(compiled):
    y = compiled(function(saving, of_saved).apply)(x := vector()).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


@behaviour("a saved input is changed in place before the backward", raises="RuntimeError")
def _(compiled):
    y = compiled(function(saving, of_saved).apply)(x := vector() * 1)
    x.add_(1)
    y.sum().backward()


@behaviour("a saved output is changed in place before the backward", raises="RuntimeError")
def _(compiled):
    def forward(ctx, x):
        ctx.save_for_backward(y := x.exp())
        return y

    y = compiled(function(forward, of_saved).apply)(vector())
    y.mul_(2)
    y.sum().backward()


@behaviour("a tensor is changed in place in forward after it was saved")
def _(compiled):
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return x * y.add_(1)

    return gradients(compiled(function(forward, of_saved).apply), vector())


@behaviour("`save_for_backward` of a number", raises="TypeError")
def _(compiled):
    def forward(ctx, x):
        ctx.save_for_backward(x, 3)
        return x * 2

    return gradients(compiled(function(forward, of_saved).apply), vector())


@behaviour("numbers, strings, dicts and lists as attributes of ctx")
def _(compiled):
    def forward(ctx, x):
        ctx.number, ctx.word, ctx.named, ctx.many = 3, "word", {"x": x * 2, 1: 2}, [x, None]
        return x * 2

    def backward(ctx, grad):
        return grad * ctx.number * len(ctx.word) * ctx.named["x"] * ctx.named[1] + ctx.many[0]

    return gradients(compiled(function(forward, backward).apply), vector())


@behaviour("what a Function saved is freed by the backward, and with the output")
def _(compiled):
    kept = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return saving(ctx, x)

        @staticmethod
        def backward(ctx, grad):
            return of_saved(ctx, grad)

    program = compiled(Kept.apply)
    for backward in (True, False):
        x = vector() * 1
        y = program(x)
        kept.append(weakref.ref(x))
        if backward:
            y.sum().backward()
        else:
            del y
        del x
        gc.collect()
    return [k() is None for k in kept]


@behaviour("an attribute that ctx does not have", raises="AttributeError")
def _(compiled):
    return gradients(compiled(function(lambda ctx, x: x * 2, lambda ctx, grad: grad * ctx.missing).apply), vector())


# -------------------------------------------------------------------------------------------------- inputs


@behaviour("`needs_input_grad` has an item for each argument, tensor or not")
def _(compiled):
    def backward(ctx, grad):
        x, y, _, _ = ctx.needs_input_grad
        return (grad * 100 if x else None), (grad * 10 if y else None), None, None

    F = function(lambda ctx, x, y, n, w: x * y * n, backward)
    return gradients(compiled(lambda x, y: F.apply(x, y, 2, "w")), vector(), vector().detach())


@behaviour("a Function of tensors that need no gradient: no graph, and the backward never runs")
def _(compiled):
    y = compiled(function(saving, of_saved).apply)(vector().detach())
    return y, y.requires_grad, y.grad_fn


@behaviour("tensors of integers beside those of numbers")
def _(compiled):
    F = function(lambda ctx, x, i: x[i] * 2, lambda ctx, grad: (grad * 100, None))
    return gradients(compiled(lambda x: F.apply(x, torch.arange(3))), vector())


@behaviour("complex inputs and outputs")
def _(compiled):
    F = function(saving, of_saved)
    return gradients(compiled(lambda x: F.apply(x).abs()), vector(dtype=torch.complex64))


@behaviour("keyword arguments without `setup_context`, where PyTorch takes them (from 2.13 on)")
def _(compiled):
    F = function(lambda ctx, x, factor: x * factor, lambda ctx, grad: (grad * 100, None))
    try:
        F.apply(vector(), factor=2)
    except TypeError:
        return None
    return gradients(compiled(lambda x: F.apply(x, factor=2)), vector())


@behaviour("too few arguments", raises="TypeError")
def _(compiled):
    F = function(lambda ctx, x, y: x * y)
    return gradients(compiled(lambda x: F.apply(x)), vector())


@behaviour("a Parameter of a module that is returned as it is")
def _(compiled):
    F = function(lambda ctx, w: w)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return F.apply(self.weight) * x

    model = Model()
    compiled(model)(vector().detach()).sum().backward()
    return model.weight.grad


@behaviour("one tensor for two arguments: both gradients count")
def _(compiled):
    F = function(lambda ctx, x, y: x * y, lambda ctx, grad: (grad * 100, grad * 10))
    return gradients(compiled(lambda x: F.apply(x, x)), vector())


# -------------------------------------------------------------------------------------------------- outputs


@behaviour("an input that is returned as it is: another tensor, which has a gradient of its own")
def _(compiled):
    y = compiled(function(lambda ctx, x: x).apply)(x := vector())
    y.sum().backward()
    return y is x, y.data_ptr() == x.data_ptr(), x.grad


@behaviour("a view of an input is returned")
def _(compiled):
    F = function(lambda ctx, x: x[1:], lambda ctx, grad: torch.cat([grad[:1] * 10, grad * 100]))
    return gradients(compiled(F.apply), vector())


@behaviour("a view of an input is returned and changed in place", raises="RuntimeError", jit="refused")
def _(compiled):
    F = function(lambda ctx, x: x.view(3))
    y = compiled(lambda x: F.apply(x * 1).mul_(2))(x := vector())
    y.sum().backward()
    return x.grad


@behaviour("an output that shares memory with nothing is changed in place")
def _(compiled):
    F = function(lambda ctx, x: x * 2)
    return gradients(compiled(lambda x: F.apply(x).mul_(3)), vector())


@behaviour("several outputs; of one that nothing used the gradient is zeros")
def _(compiled):
    F = function(lambda ctx, x: (x * 2, x * 3), lambda ctx, a, b: a * 100 + (b + 1) * 10)
    return gradients(compiled(lambda x: F.apply(x)[0]), vector())


@behaviour("one output in a tuple")
def _(compiled):
    (y,) = compiled(function(lambda ctx, x: (x * 2,)).apply)(x := vector())
    y.sum().backward()
    return x.grad


@behaviour("None beside a tensor")
def _(compiled):
    y, nothing = compiled(function(lambda ctx, x: (x * 2, None), lambda ctx, a, b: a * 100).apply)(x := vector())
    y.sum().backward()
    return nothing, x.grad


@behaviour("no output: None, and an empty tuple")
def _(compiled):
    nothing, empty = function(lambda ctx, x: None), function(lambda ctx, x: ())
    return compiled(lambda x: (nothing.apply(x), empty.apply(x)))(vector())


@behaviour("one tensor returned twice")
def _(compiled):
    def forward(ctx, x):
        y = x * 2
        return y, y

    F = function(forward, lambda ctx, a, b: a * 100 + b * 10)
    return gradients(compiled(lambda x: sum(F.apply(x))), vector())


@behaviour("a number and a string beside a tensor")
def _(compiled):
    F = function(lambda ctx, x: (x * 2, 3, "word"), lambda ctx, a, b, c: a * 100)
    y, number, word = compiled(F.apply)(x := vector())
    y.sum().backward()
    return number, word, x.grad


# -------------------------------------------------------------------------------------------------- what forward marks


@behaviour("`mark_dirty`: the input that is changed in place is what is returned, and counts it")
def _(compiled):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    F = function(forward)

    def program(x):
        y = x * 1
        return F.apply(y) + y

    return gradients(compiled(program), vector())


@behaviour("`mark_dirty` of a leaf that requires grad", raises="RuntimeError")
def _(compiled):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    return gradients(compiled(function(forward).apply), vector())


@behaviour("`mark_dirty` of what is not returned", raises="RuntimeError")
def _(compiled):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2) + 1

    F = function(forward)
    return gradients(compiled(lambda x: F.apply(x * 1)), vector())


@behaviour(
    "`mark_dirty` of a view: what it is a view of is changed, with its gradient",
    fx="refused by PyTorch: Dynamo breaks the graph, and a view that a compiled graph returned is changed in place",
)
def _(compiled):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    F = function(forward)

    def program(x):
        y = x * 1
        F.apply(y[1:])
        return y * 1

    return gradients(compiled(program), vector())


@behaviour("`mark_non_differentiable`: the output requires no grad, its gradient is zeros")
def _(compiled):
    def forward(ctx, x):
        ctx.mark_non_differentiable(sign := x.sign())
        return x * 2, sign

    F = function(forward, lambda ctx, grad, other: grad * 100 + other)
    y, sign = compiled(F.apply)(x := vector())
    y.sum().backward()
    return sign.requires_grad, x.grad


@behaviour("`set_materialize_grads(False)`: an undefined gradient is None")
def _(compiled):
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    F = function(forward, lambda ctx, a, b: a * 100 if b is None else b * 10)
    return gradients(compiled(lambda x: F.apply(x)[0]), vector())


@behaviour("`requires_grad_` of an output in forward is not asked for")
def _(compiled):
    y = compiled(function(lambda ctx, x: torch.ones(3).requires_grad_()).apply)(vector().detach())
    return y.requires_grad


# -------------------------------------------------------------------------------------------------- gradients

GRADIENTS = {
    "None for an input that requires grad": lambda grad: None,
    "too many gradients, all None": lambda grad: (grad * 100, None, None),
    "a gradient with more dimensions, which are summed": lambda grad: grad.expand(2, 3) * 100,
    "a gradient of another dtype is converted": lambda grad: grad.double() * 100,
    "a gradient that is not contiguous": lambda grad: (grad.expand(4, 3) * 100).mT[:, 1],
    "the gradient is changed in place and returned": lambda grad: grad.mul_(100),
    "a gradient of zeros that has no data behind it": lambda grad: torch.zeros(()).expand(3),
}
WRONG_GRADIENTS = {
    "too few gradients": lambda grad: (),
    "too many gradients": lambda grad: (grad * 100, grad),
    "a list of gradients": lambda grad: [grad * 100],
    "a number for a gradient": lambda grad: 1.0,
}
MISFITS = {
    "a gradient of a smaller shape, which would have to be expanded": lambda grad: grad.sum() * 100,
    "a gradient of a shape that does not fit": lambda grad: torch.ones(5),
    "a complex gradient for a real input": lambda grad: grad.to(torch.complex64) * (1 + 1j),
}


def _of_gradient(backward: Callable[[Tensor], Any]) -> Callable[[Compiler], Any]:
    F = function(lambda ctx, x: x * 2, lambda ctx, grad: backward(grad))
    return lambda compiled: gradients(compiled(lambda x: F.apply(x * 1) * 3), vector())


for _words, _backward in GRADIENTS.items():
    behaviour(_words)(_of_gradient(_backward))
for _words, _backward in WRONG_GRADIENTS.items():
    behaviour(_words, raises="RuntimeError")(_of_gradient(_backward))
for _words, _backward in MISFITS.items():
    behaviour(_words, raises="RuntimeError", fx="refused")(_of_gradient(_backward))


@behaviour("a gradient for an argument that is no tensor", raises="RuntimeError")
def _(compiled):
    F = function(lambda ctx, x, n: x * n, lambda ctx, grad: (grad * 100, grad))
    return gradients(compiled(lambda x: F.apply(x, 2)), vector())


@behaviour("grad mode is off in forward, in backward what `create_graph` asks for")
def _(compiled):
    F = function(saving, of_saved)
    y = compiled(F.apply)(x := vector())
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return grad.requires_grad, y.detach()


@behaviour("a second and a third derivative")
def _(compiled):
    F = function(saving, of_saved)
    y = compiled(lambda x: F.apply(x.sin()))(x := vector())
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.detach()


@behaviour("a second derivative of a backward that is `once_differentiable`", raises="RuntimeError")
def _(compiled):
    y = compiled(function(saving, once_differentiable(of_saved)).apply)(x := vector())
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    grad.sum().backward()


@behaviour("a backward that runs a backward of its own (reentrant)")
def _(compiled):
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (inner,) = torch.autograd.grad((x * x * x).sum(), x)
        return grad * inner

    return gradients(compiled(function(saving, backward).apply), vector())


@behaviour("a chain of 20 Functions")
def _(compiled):
    F = function(lambda ctx, x: x * 1, lambda ctx, grad: grad * 1.1)

    def program(x):
        for _ in range(20):
            x = F.apply(x)
        return x

    return gradients(compiled(program), vector())


# -------------------------------------------------------------------------------------------------- around a program


@behaviour("hooks on the input and on the output, `retain_grad` of both")
def _(compiled):
    seen = []
    x = vector() * 1
    x.retain_grad()
    x.register_hook(lambda grad: seen.append(grad.clone()))
    y = compiled(function(saving, of_saved).apply)(x)
    y.retain_grad()
    y.register_hook(lambda grad: grad * 2)
    y.sum().backward()
    return seen, x.grad, y.grad


@behaviour("a hook that runs after a gradient is accumulated")
def _(compiled):
    seen = []
    x = vector()
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    compiled(function(saving, of_saved).apply)(x).sum().backward()
    return seen


@behaviour("anomaly mode: a backward that returns nan", raises="RuntimeError")
def _(compiled):
    F = function(lambda ctx, x: x * 2, lambda ctx, grad: grad * float("nan"))
    with torch.autograd.detect_anomaly(check_nan=True):
        return gradients(compiled(lambda x: F.apply(x) * 2), vector())


@behaviour("inference mode around the call")
def _(compiled):
    with torch.inference_mode():
        y = compiled(function(saving, of_saved).apply)(torch.ones(3))
    return y.clone(), y.is_inference()


@behaviour("`no_grad` around the call, and `enable_grad` inside of that")
def _(compiled):
    F = function(saving, of_saved)

    def program(x):
        with torch.no_grad():
            y = F.apply(x)
            with torch.enable_grad():
                return y, F.apply(x)

    first, second = compiled(program)(x := vector())
    second.sum().backward()
    return first.requires_grad, x.grad


@behaviour("`custom_fwd` and `custom_bwd` under autocast")
def _(compiled):
    forward = torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)(saving)
    F = function(forward, torch.amp.custom_bwd(device_type="cpu")(of_saved))
    with torch.autocast("cpu", torch.bfloat16):
        return gradients(compiled(F.apply), vector())


@behaviour("`torch.vmap` of a Function with `generate_vmap_rule`")
def _(compiled):
    members = {"setup_context": staticmethod(lambda ctx, inputs, output: None), "generate_vmap_rule": True}
    F = function(lambda x: x * 2, **members)
    return gradients(compiled(lambda x: torch.vmap(F.apply)(x.reshape(3, 1))), vector())


@behaviour("`torch.vmap` of a Function with a `vmap` of its own")
def _(compiled):
    members = {
        "setup_context": staticmethod(lambda ctx, inputs, output: None),
        "vmap": staticmethod(lambda info, dims, x: (x * 7, dims[0])),
    }
    F = function(lambda x: x * 2, **members)
    return gradients(compiled(lambda x: torch.vmap(F.apply)(x)), vector())


@behaviour("`torch.vmap` of a Function that has no rule", raises="RuntimeError")
def _(compiled):
    F = function(saving, of_saved)
    return gradients(compiled(lambda x: torch.vmap(F.apply)(x)), vector())


@behaviour("forward-mode differentiation (`torch.func.jvp`) of a Function with a `jvp`")
def _(compiled):
    members = {
        "setup_context": staticmethod(lambda ctx, inputs, output: None),
        "jvp": staticmethod(lambda ctx, tangent: tangent * 7),
    }
    F = function(lambda x: x * 2, **members)
    return compiled(lambda x: torch.func.jvp(F.apply, (x,), (x,))[1])(vector().detach())


@behaviour("`torch.func.grad` of a Function with `setup_context`")
def _(compiled):
    members = {"setup_context": staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))}
    F = function(lambda x: x * x, of_saved, **members)
    return compiled(torch.func.grad(lambda x: F.apply(x).sum()))(vector().detach())


# -------------------------------------------------------------------------------------------------- classes


@behaviour("`setup_context`, with saved inputs and outputs and what it marks")
def _(compiled):
    def setup(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * x * y * 100

    F = function(lambda x: (x * 2, x.sign()), backward, setup_context=staticmethod(setup))
    return gradients(compiled(lambda x: F.apply(x)[0]), vector())


@behaviour("a Function without a backward", raises="NotImplementedError")
def _(compiled):
    F = type("F", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: x * 2)})
    return gradients(compiled(F.apply), vector())


@behaviour("a Function without a forward", raises="NotImplementedError")
def _(compiled):
    return compiled(type("F", (torch.autograd.Function,), {"backward": staticmethod(hundred)}).apply)(vector())


@behaviour("a Function with both `backward` and `vjp`", raises="RuntimeError")
def _(compiled):
    return gradients(compiled(function(lambda ctx, x: x * 2, vjp=staticmethod(hundred)).apply), vector())


@behaviour("an instance of a Function that is called, as long ago", raises="RuntimeError")
def _(compiled):
    F = function(saving, of_saved)
    return compiled(lambda x: F()(x))(vector())


@behaviour("exceptions of a class of the user's, in forward and in backward")
def _(compiled):
    def fails(*_):
        raise LookupError("of the user's")

    found = []
    for F in (function(fails), function(lambda ctx, x: x * 2, fails)):
        with contextlib.suppress(LookupError):
            gradients(compiled(F.apply), vector())
            found.append("nothing raised")
    return found


@behaviour("a module with a Function, copied and pickled")
def _(compiled):
    model = pickle.loads(pickle.dumps(copy.deepcopy(Pickled())))
    return gradients(compiled(model), vector())


class Squared(torch.autograd.Function):
    """A Function that can be pickled."""

    forward = staticmethod(saving)
    backward = staticmethod(of_saved)


class Pickled(nn.Module):
    """A module that holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.function = Squared

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.function.apply(x)


@behaviour(
    "the name of the class in `grad_fn`, and what ctx keeps as attributes of that",
    jit="a program is one node of PyTorch's autograd, which has thunder's name",
    fx="a program is one node of PyTorch's autograd, which has thunder's name",
)
def _(compiled):
    y = compiled(function(saving, of_saved).apply)(vector())
    return y.grad_fn.name(), [*y.grad_fn.saved_tensors]
