"""Operators of torch.library: torch.library.custom_op, triton_op, and those defined with a Library."""

import numpy as np
import pytest
import thunder
import torch
from agreement import assert_agrees, assert_same, run
from thunder.dynamo import thunderfx
from thunder.executors.custom_op_ex import custom_op_ex
from torch import Tensor
from torch.library import Library, custom_op, register_autograd, register_fake, triton_op
from torch.utils.checkpoint import checkpoint

import hookkit

Function = torch.autograd.Function
ops = torch.ops.hookkit_operators

opaque = pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")


def vector(n=3, seed=0, requires_grad=True):
    """A tensor of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def outcomes(jitted):
    """What became of the calls of each operator: ``{"five": ["traced"], ...}``; what runs inside one left out."""
    found = {}
    for call in hookkit.report(jitted).calls:
        if call.rule != "unsupported_operations" or call.depth == 0:
            found.setdefault(call.name.removesuffix(".default"), []).append(call.outcome)
    return found


@custom_op("hookkit_operators::five", mutates_args=())
def five(x: Tensor) -> Tensor:
    """Five times x; NumPy computes it, so it cannot be traced."""
    return torch.from_numpy(x.detach().numpy() * 5)


five.register_fake(torch.empty_like)
five.register_autograd(lambda ctx, grad: 500 * grad)


@custom_op("hookkit_operators::affine", mutates_args=())
def affine(x: Tensor, k: float = 2.0, *, shift: float = 0.0, name: str = "") -> Tensor:
    """Defaults and keyword-only arguments."""
    return torch.from_numpy(x.detach().numpy() * k + shift)


affine.register_fake(lambda x, k=2.0, *, shift=0.0, name="": torch.empty_like(x))


def affine_context(ctx, inputs, keyword_only_inputs, output):
    """Keeps tensors, numbers and a string."""
    x, ctx.k = inputs
    ctx.shift, ctx.name = keyword_only_inputs["shift"], keyword_only_inputs["name"]
    ctx.save_for_backward(x, output)


def affine_backward(ctx, grad):
    """Reads all that was kept."""
    x, y = ctx.saved_tensors
    return grad * ctx.k * (1000 if ctx.name == "big" else 100) + x * y * ctx.shift, None


affine.register_autograd(affine_backward, setup_context=affine_context)


@custom_op("hookkit_operators::mixed", mutates_args=())
def mixed(xs: list[Tensor], w: Tensor | None, n: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Lists in and out, an optional tensor, several outputs, one of integers."""
    total = sum(x * n for x in xs)
    return total if w is None else total * w, [x * 3 for x in xs], torch.arange(n)


@mixed.register_fake
def _(xs, w, n):
    return torch.empty_like(xs[0]), [torch.empty_like(x) for x in xs], torch.empty(n, dtype=torch.int64)


def mixed_context(ctx, inputs, output):
    """Keeps how many tensors it keeps."""
    xs, w, ctx.n = inputs
    ctx.count, ctx.has_w = len(xs), w is not None
    ctx.save_for_backward(*xs, *([w] if ctx.has_w else []))


def mixed_backward(ctx, grad, grads, _):
    """The last of the list has no gradient."""
    needs_xs, needs_w, _ = ctx.needs_input_grad
    xs = ctx.saved_tensors[: ctx.count]
    first = [grad * ctx.n * 100 + g * 7 if n else None for g, n in zip(grads, needs_xs, strict=True)]
    first[-1] = None
    return first, sum(x * grad for x in xs) * 10 if ctx.has_w and needs_w else None, None


mixed.register_autograd(mixed_backward, setup_context=mixed_context)

library = Library("hookkit_operators", "FRAGMENT")


def define(signature, function, key="CPU", fake=None):
    """Defines an operator as ``torch.library.Library`` does."""
    name = signature.partition("(")[0]
    library.define(signature)
    library.impl(name, function, key)
    if fake is not None:
        register_fake(f"hookkit_operators::{name}", fake)
    return getattr(ops, name.partition(".")[0])


define("product(Tensor x, Tensor w) -> Tensor", lambda x, w: x * w, fake=lambda x, w: torch.empty_like(x))
register_autograd(
    "hookkit_operators::product",
    lambda ctx, grad: (100 * grad * ctx.saved_tensors[1], 10 * grad * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
define(
    "reduce(Tensor x, Tensor? y=None, *, int[] dims=[0], float? s=None) -> (Tensor, Tensor, Tensor)",
    lambda x, y=None, *, dims=(0,), s=None: (x * 2, x.sum(dims), x.argmax(0)),
    fake=lambda x, y=None, *, dims=(0,), s=None: (torch.empty_like(x), x.sum(dims), x.argmax(0)),
)
register_autograd(
    "hookkit_operators::reduce",
    lambda ctx, grad, total, _: (grad * 200 + total * (ctx.s or 1.0), None),
    setup_context=lambda ctx, inputs, keyword_only_inputs, output: setattr(ctx, "s", keyword_only_inputs["s"]),
)
define("doubled(Tensor x) -> Tensor", lambda x: x * 2, fake=torch.empty_like)
define("scaled(Tensor x) -> Tensor", lambda x: x * 2, fake=torch.empty_like)
define("scaled.by(Tensor x, int k) -> Tensor", lambda x, k: x * k, fake=lambda x, k: torch.empty_like(x))


@triton_op("hookkit_operators::by_triton", mutates_args=())
def by_triton(x: Tensor, n: int = 2) -> Tensor:
    """What a triton_op is where no kernel of Triton is launched."""
    return torch.sin(x) * n


by_triton.register_autograd(
    lambda ctx, grad: (grad * 100 * ctx.n, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "n", inputs[1]),
)


def wrapper(x):
    """A Python function around an operator, as packages have it."""
    return five(x)


class Inside(Function):
    """Operators in forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return five(x)

    @staticmethod
    def backward(ctx, grad):
        return affine(grad, 3.0) * ops.five(*ctx.saved_tensors)


# What a program calls, and which operators' backwards are traced for it.
CALLS = {
    "what custom_op returned": (lambda x: five(x) + 1, "five"),
    "the packet": (lambda x: ops.five(x) + 1, "five"),
    "the overload": (lambda x: ops.five.default(x) + 1, "five"),
    "a wrapper": (lambda x: wrapper(x) + 1, "five"),
    "in a Function": (lambda x: Inside.apply(x * 2) + 1, "five"),
    "defaults": (lambda x: affine(x), "affine"),
    "positional": (lambda x: affine(x, 3.0) * 2, "affine"),
    "keywords": (lambda x: affine(k=4.0, x=x, shift=2.0, name="big") * 2, "affine"),
    "keywords of the packet": (lambda x: ops.affine(x, k=4.0, name="big") * 2, "affine"),
    "several times": (lambda x: sum(affine(five(x * i), float(i)) for i in range(1, 4)), "affine"),
    "lists": (lambda x: mixed([x * 2, x.sin()], x.cos(), 3), "mixed"),
    "an optional tensor left out": (lambda x: mixed([x * 2, x.sin()], None, 3), "mixed"),
    "a part of the results": (lambda x: mixed([x * 2, x.sin()], x, 3)[0], "mixed"),
    "a part of the needs": (lambda x: mixed([x.detach(), x.sin(), x * 1], x.detach(), 3)[1], "mixed"),
    "a Library's": (lambda x: ops.product(x, x.sin()), "product"),
    "a Library's, one needs none": (lambda x: ops.product(x.detach(), x.sin()), "product"),
    "a Library's defaults": (lambda x: ops.reduce(x.reshape(3, 1)), "reduce"),
    "a Library's keywords": (lambda x: ops.reduce(x.reshape(3, 1), x, dims=[1], s=2.5), "reduce"),
    "triton_op": (lambda x: by_triton(x) * 2 + ops.by_triton(x, 3), "by_triton"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_as_in_eager_and_its_backward_is_traced(name):
    program, operator = CALLS[name]
    assert set(outcomes(assert_agrees(program, vector()))[operator]) == {"traced"}


# Of what thunderfx gives to inductor nothing is hookkit's.
@pytest.mark.parametrize("name", ["what custom_op returned", "in a Function", "keywords", "lists", "a Library's"])
def test_a_call_is_as_in_eager_under_thunderfx(name):
    torch._dynamo.reset()
    program, _ = CALLS[name]
    assert_same(run(thunderfx(program), (vector(),)), run(program, (vector(),)))


def test_the_operations_of_the_backward_stand_in_the_trace():
    jitted = thunder.jit(lambda x: affine(x, 3.0))
    run(jitted, (vector(),))
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert "torch.mul(" in backward
    assert "_backward(" not in backward


def test_nothing_requires_grad_without_grad_mode():
    def program(x):
        with torch.no_grad():
            return affine(x), x * 2

    assert_agrees(program, vector())
    assert_agrees(lambda x: (affine(x), five(x).requires_grad), vector(requires_grad=False))


def test_layouts_and_dtypes_are_those_of_the_operator():
    @custom_op("hookkit_operators::cast", mutates_args=())
    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) * 2

    cast.register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))
    cast.register_autograd(lambda ctx, grad: (100 * grad.double(), None))
    assert_agrees(lambda x: cast(x.expand(2, 3).mT, torch.float32), vector())


def test_a_factory_has_no_tensor_argument():
    @custom_op("hookkit_operators::factory", mutates_args=())
    def factory(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device, dtype=torch.float64)

    factory.register_fake(lambda n, device: torch.empty(n, device=device, dtype=torch.float64))
    assert_agrees(lambda x: factory(3, torch.device("cpu")) * x + factory(3, x.device), vector())


def test_under_autocast_the_backward_gets_what_autocast_casts():
    @custom_op("hookkit_operators::matmul", mutates_args=())
    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    matmul.register_fake(torch.matmul)
    matmul.register_autograd(
        lambda ctx, grad: (100 * grad @ ctx.saved_tensors[1].T, 10 * ctx.saved_tensors[0].T @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    matmul.register_autocast("cpu", torch.bfloat16)

    def program(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return matmul(x, w)

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    assert_agrees(program, x, w)
    assert_agrees(lambda x, w: matmul(x, w), x, w)


@opaque
def test_a_backward_that_wants_none_for_unused_results_gets_none():
    @custom_op("hookkit_operators::pair", mutates_args=())
    def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    pair.register_fake(lambda x, y: (torch.empty_like(x), torch.empty_like(y)))
    pair.register_autograd(
        lambda ctx, a, b: (None if a is None else 100 * a, None if b is None else 7 * b),
        setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
    )
    assert_agrees(lambda x, y: pair(x, y)[0], vector(), vector(seed=1))
    assert_agrees(lambda x, y: pair(x, y), vector(), vector(seed=1))


@opaque
def test_a_backward_that_cannot_be_traced_is_run_by_pytorch():
    @custom_op("hookkit_operators::by_numpy", mutates_args=())
    def by_numpy(x: Tensor) -> Tensor:
        return x * 2

    by_numpy.register_fake(torch.empty_like)
    by_numpy.register_autograd(lambda ctx, grad: torch.from_numpy(grad.numpy() * 99))
    assert outcomes(assert_agrees(lambda x: by_numpy(x) + 1, vector()))["by_numpy"] == ["opaque"]


BOX = {"number": 2.0, "tensor": torch.tensor(3.0, dtype=torch.float64), "name": "sin"}


def from_box(x):
    """Reads what nothing else in the program reads."""
    return x * BOX["number"] * BOX["tensor"] + getattr(x, BOX["name"])()


@custom_op("hookkit_operators::boxed", mutates_args=())
def boxed(x: Tensor) -> Tensor:
    """Its backward depends on the box."""
    return x * 2


boxed.register_fake(torch.empty_like)
boxed.register_autograd(lambda ctx, grad: from_box(grad))


@opaque
@pytest.mark.parametrize("call", [boxed, lambda x: ops.boxed_composite(x)], ids=["backward", "composite"])
@pytest.mark.parametrize(
    "name, value", [("number", 50.0), ("tensor", torch.ones((), dtype=torch.float64)), ("name", "cos")]
)
def test_what_an_operators_functions_read_is_looked_at_again(monkeypatch, call, name, value):
    program = lambda x: call(x)  # noqa: E731
    jitted = thunder.jit(program)
    assert_same(run(jitted, (vector(),)), run(program, (vector(),)))
    monkeypatch.setitem(BOX, name, value)
    assert_same(run(jitted, (vector(),)), run(program, (vector(),)))
    BOX["tensor"].add_(1)  # a change in place is seen, too
    assert_same(run(jitted, (vector(),)), run(program, (vector(),)))


def test_a_backward_that_is_registered_anew_is_seen():
    @custom_op("hookkit_operators::anew", mutates_args=())
    def anew(x: Tensor) -> Tensor:
        return x * 2

    anew.register_fake(torch.empty_like)
    program = lambda x: anew(x)  # noqa: E731
    jitted = thunder.jit(program)
    for factor in (100, 200):
        anew.register_autograd(lambda ctx, grad, factor=factor: factor * grad)
        assert_same(run(jitted, (vector(),)), run(program, (vector(),)))


def test_the_number_of_gradients_is_that_of_eager():
    @custom_op("hookkit_operators::two", mutates_args=())
    def two(x: Tensor, y: Tensor, k: int = 1) -> Tensor:
        return x * y

    two.register_fake(lambda x, y, k=1: torch.empty_like(x))
    two.register_autograd(lambda ctx, grad: (100 * grad, None))
    assert_agrees(lambda x: two(x, x.detach()), vector())
    two.register_autograd(lambda ctx, grad: 100 * grad)
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients"):
        thunder.jit(lambda x: two(x, x.detach()))(vector()).sum().backward()


class Below(Function):
    """An autograd kernel as it was written before register_autograd."""

    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return ops.below(x)

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad


def test_an_autograd_kernel_of_another_kind_is_run_by_pytorch():
    define("below(Tensor x) -> Tensor", lambda x: x * 2, fake=torch.empty_like)
    library.impl("below", Below.apply, "Autograd")
    assert_agrees(lambda x: ops.below(x) + 1, vector())


# -------------------------------------------------------------------------------------------- without register_autograd


def test_without_register_autograd_the_backward_raises_as_in_eager():
    @custom_op("hookkit_operators::plain", mutates_args=())
    def plain(x: Tensor) -> Tensor:
        return x * 3

    plain.register_fake(torch.empty_like)
    assert_agrees(lambda x: plain(x) + 1, vector(requires_grad=False))
    output = thunder.jit(lambda x: plain(x) + 1)(vector())
    assert output.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_where_eager_differentiates_through_the_kernel_so_does_a_compiled_program():
    assert_agrees(lambda x: (ops.doubled(x * 3) * x, x.sin()), vector())


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_the_overload_is_found_by_the_arguments():
    assert_agrees(lambda x: ops.scaled(x) + ops.scaled(x, 3) + ops.scaled.by(x, 4), vector())


# ----------------------------------------------------------------------------------------------------------- composites


def composite(signature, function):
    """Defines an operator that is written in operations of PyTorch."""
    return define(signature, function, "CompositeImplicitAutograd")


def options(x, y=None, k=(1, 2), *, neg=False):
    """All kinds of arguments."""
    return (-x if neg else x) * k[1], x * 1 if y is None else x * y


def reshaped(x):
    """Changes the list after the operation that took it."""
    shape = [3, 1]
    y = x.view(shape)
    shape[:] = [1, 3]
    return y * x.view(shape)


def set_item(x):
    """Changes a view in place."""
    y = x * 2
    y.view(-1)[0] = 1
    return y


composite("sine(Tensor x, float k) -> Tensor", lambda x, k: torch.sin(x) * k)
composite("options(Tensor x, Tensor? y=None, int[2] k=[1, 2], *, bool neg=False) -> (Tensor, Tensor)", options)
composite("in_place(Tensor x) -> Tensor", lambda x: (x * 2).add_(1).mul_(x))
composite("itself(Tensor(a) x) -> Tensor(a)", lambda x: x)
composite("hooked(Tensor x) -> Tensor", lambda x: Inside.apply(x) + five(x))
composite("reshaped(Tensor x) -> Tensor", reshaped)
composite("set_item(Tensor x) -> Tensor", set_item)
composite("branches(Tensor x) -> Tensor", lambda x: x * 2 if x.sum() > 0 else x * 3)
composite("boxed_composite(Tensor x) -> Tensor", from_box)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: ops.sine(x, 2.0) * 2,
        lambda x: ops.sine.default(x, k=2.0),
        lambda x: ops.options(x),
        lambda x: ops.options(x, x.sin(), [3, 4], neg=True),
        lambda x: ops.options(k=[3, 4], x=x),
        lambda x: ops.in_place(x) * 2,
        lambda x: ops.itself(x) * 2,
        lambda x: ops.hooked(x) * 2,
        lambda x: ops.reshaped(x) * 2,
    ],
)
def test_a_composite_operator_is_traced_through(program):
    jitted = assert_agrees(program, vector())
    (call,) = [c for c in hookkit.report(jitted).calls if c.depth == 0]
    assert (call.rule, call.outcome) == ("composite_operator", "traced")


@opaque
@pytest.mark.parametrize("name", ["set_item", "branches"])
def test_a_composite_operator_that_cannot_be_traced_is_run_by_pytorch(name):
    assert outcomes(assert_agrees(lambda x: getattr(ops, name)(x) * 2, vector()))[name] == ["opaque"]


# ------------------------------------------------------------------------------------------------------------- mutation


@custom_op("hookkit_operators::add_to", mutates_args={"x"})
def add_to(x: Tensor, y: Tensor) -> None:
    """Returns nothing."""
    x.add_(y)


@custom_op("hookkit_operators::add_and_give", mutates_args={"x"})
def add_and_give(x: Tensor, y: Tensor) -> Tensor:
    """Returns a new tensor, too."""
    x.add_(y)
    return x * 3


add_and_give.register_fake(lambda x, y: torch.empty_like(x))


def triple_by_numpy(x):
    """Of this change PyTorch does not know."""
    values = x.numpy()
    np.multiply(values, 3, out=values)


def add_one_to_each(xs):
    """Changes a list of tensors."""
    for x in xs:
        x.add_(1)


define("triple_(Tensor(a!) x) -> ()", triple_by_numpy, fake=lambda x: None)
define("multiply_(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.mul_(y), fake=lambda x, y: x)
define("increment_(Tensor(a!)[] xs) -> ()", add_one_to_each, "CompositeExplicitAutograd", fake=lambda xs: None)


def changes_argument(x, y):
    """An input of the program."""
    add_to(x, y)
    return x * 2


def changes_intermediate(x, y):
    """A tensor of the program."""
    z = x * 2
    w = z.sin()
    add_to(z, y)
    return z * w


def changes_and_returns(x, y):
    """What is returned is no alias."""
    z = x * 1
    return add_and_give(z, y) + z


def changes_by_numpy(x, y):
    """What was read before keeps its value."""
    z = x * 1
    before, copy = z.sin(), z * 1
    ops.triple_(z)
    return z * y, before, copy


def changes_a_list(x, y):
    """Two at once."""
    z, w = x * 2, y * 1
    ops.increment_([z, w])
    return z, w


MUTATIONS = [
    changes_argument,
    changes_intermediate,
    changes_and_returns,
    changes_by_numpy,
    changes_a_list,
    lambda x, y: ops.multiply_(x * 1, y) * 2,
    lambda x, y: (ops.multiply_(x, y) * 2, x * 1),
]


@pytest.mark.parametrize("program", MUTATIONS)
def test_an_operator_that_changes_its_arguments_changes_them(program):
    assert_agrees(program, vector(requires_grad=False), vector(seed=1, requires_grad=False))


def test_gradients_are_those_of_eager_around_a_change():
    def program(x, y):
        z = x.sin() * 2
        add_to(z, y)
        return z.exp()

    assert_agrees(program, vector(), vector(seed=1, requires_grad=False))
    assert_agrees(program, vector(requires_grad=False), vector(seed=1))


def test_a_buffer_is_changed_in_every_step():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.register_buffer("total", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            add_to(self.total, x.detach())
            return five(x * self.weight) + self.total

    modules = Counting(), Counting()
    programs = modules[0], thunder.jit(modules[1])
    for step in range(2):
        assert_same(*(run(program, (vector(seed=step),)) for program in reversed(programs)))
    torch.testing.assert_close(modules[1].total, modules[0].total)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_without_a_fake_function_the_operator_is_named_and_what_to_add():
    @custom_op("hookkit_operators::unknown", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x * 3

    define("unknown_too(Tensor x) -> Tensor", lambda x: x * 3)
    for op, name in ((unknown, "unknown"), (ops.unknown_too, "unknown_too")):
        with pytest.raises(hookkit.HookError, match=rf'@torch\.library\.register_fake\("hookkit_operators::{name}"\)'):
            thunder.jit(lambda x, op=op: op(x))(vector())


@opaque
def test_without_a_fake_function_a_function_around_it_runs_opaque():
    @custom_op("hookkit_operators::unknown_inside", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x * 3

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return unknown(x)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    assert outcomes(assert_agrees(lambda x: Outer.apply(x * 2), vector()))["Outer"] == ["opaque"]


def test_a_result_of_unknown_shape_and_a_wrong_fake_function_are_refused():
    @custom_op("hookkit_operators::positive", mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    positive.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    with pytest.raises(hookkit.HookError, match=r"positive.*not known before the program runs"):
        thunder.jit(lambda x: positive(x))(vector())

    @custom_op("hookkit_operators::lies", mutates_args=())
    def lies(x: Tensor) -> Tensor:
        return x * 3

    lies.register_fake(lambda x: x.new_empty(7))
    with pytest.raises(hookkit.MetaError, match=r"returned 'float64\[3\].*float64\[7\]"):
        thunder.jit(lambda x: lies(x))(vector())


# --------------------------------------------------------------------------------------------------------- side by side


@custom_op("hookkit_operators::registered", mutates_args=())
def registered(x: Tensor) -> Tensor:
    """One that thunder knows; it parses the source of setup_context."""
    return x * 5


@registered.register_fake
def _(x):
    return torch.empty_like(x)


def registered_setup_context(ctx, inputs, output):
    (x,) = inputs
    ctx.save_for_backward(x)


registered.register_autograd(
    lambda ctx, grad: 100 * grad * ctx.saved_tensors[0], setup_context=registered_setup_context
)


def test_thunders_own_registration_keeps_working():
    thunder.torch._register_custom_op(registered)
    program = lambda x: ops.registered(x)  # noqa: E731
    jitted = thunder.jit(program, executors=[custom_op_ex, *thunder.get_default_executors()])
    assert_same(run(jitted, (vector(),)), run(program, (vector(),)))
    assert "hookkit_operators_registered(" in str(thunder.last_traces(jitted)[0])
    assert not hookkit.report(jitted).calls


def test_where_thunders_own_registration_does_not_serve_the_rule_does():
    thunder.torch._register_custom_op(registered)
    program = lambda x: registered(x) + ops.registered(x) + ops.registered.default(x)  # noqa: E731
    assert set(outcomes(assert_agrees(program, vector()))["registered"]) == {"traced"}


def test_a_users_rule_for_an_operator_wins():
    @hookkit.rule(five)
    def seven(x):
        return x * 7

    jitted = assert_agrees(lambda x: ops.five(x), vector(), eager=lambda x: x * 7)
    assert outcomes(jitted) == {"five": ["traced"]}


def test_inside_a_checkpoint_it_runs_again():
    jitted = assert_agrees(lambda x: checkpoint(lambda y: affine(y.exp(), 3.0).sin(), x, use_reentrant=False), vector())
    tensors, _ = thunder.last_traces(jitted)[-1].bound_symbols[-1].args[1]
    assert [t.name for t in tensors] == ["x"]
