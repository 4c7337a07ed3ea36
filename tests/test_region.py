"""Regions: calls that are compiled once for all that do the same; programs with them against eager PyTorch.

Each Function's gradient is wrong on purpose.
"""

import threading
import warnings

import pytest
import thunder
import torch
from agreement import assert_same, run
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hookkit


@pytest.fixture(autouse=True)
def everything_is_a_region():
    with hookkit.use(mode="region"), warnings.catch_warnings():
        warnings.simplefilter("ignore", hookkit.OpaqueFallbackWarning)
        warnings.simplefilter("ignore", hookkit.MetaWarning)
        yield


class Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return 3 * grad * (s + x * s * (1 - s))


class Product(Function):
    """Keeps what it has computed, gives two gradients, and returns two outputs."""

    @staticmethod
    def forward(ctx, x, y, factor):
        made = torch.exp(x * y)
        ctx.save_for_backward(x, y, made)
        ctx.factor = factor
        return made * factor, x + y

    @staticmethod
    def backward(ctx, grad, of_sum):
        x, y, made = ctx.saved_tensors
        common = 3 * grad * made * ctx.factor
        return common * y + of_sum, common * x + 2 * of_sum, None


def vector(*shape, requires_grad=True, dtype=torch.float64):
    return torch.linspace(-1, 1, 6, dtype=dtype).reshape(shape or (6,)).clone().requires_grad_(requires_grad)


def checked(program, *inputs):
    """The report of a program that was compared with itself run eagerly."""
    jitted = thunder.jit(program)
    for _ in range(2):
        assert_same(run(jitted, inputs), run(program, inputs))
    return hookkit.report(jitted)


def shared(report):
    """How many calls each region has."""
    return [region.calls for region in report.regions]


def reasons(report):
    """Why calls are no regions."""
    return [call.no_region for call in report.calls if call.no_region]


# ------------------------------------------------------------------------------------------------------- Functions


def test_calls_that_do_the_same_are_one_region():
    def program(x):
        for _ in range(4):
            x = Swish.apply(x)
        return x

    report = checked(program, vector())
    assert shared(report) == [4]
    assert [call.outcome for call in report.calls if call.name == "Swish"] == ["region"] * 4
    assert report.regions[0].seconds > 0
    assert "region Swish: 4 calls, compiled in" in str(report)
    assert report.to_dict()["regions"][0]["calls"] == 4


def test_calls_that_differ_are_different_regions():
    def program(x, y):
        a = Product.apply(x, y, 2.0)[0] + Product.apply(x, y, 3.0)[0] + Product.apply(x, x, 2.0)[0]
        return a, Swish.apply(x.reshape(2, 3)), Swish.apply(x.detach()), Swish.apply(y.float())

    assert sorted(shared(checked(program, vector(), vector() + 1))) == [1] * 6


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_an_output_that_is_not_used_has_no_gradient(used):
    def program(x, y):
        first, second = Product.apply(x, y, 2.0)
        return (first if used[0] else x.detach()), (second if used[1] else x.detach())

    assert shared(checked(program, vector(), vector(requires_grad=False))) == [1]


@pytest.mark.parametrize("given", ["first", "second"])
def test_an_output_of_the_program_that_is_not_used_runs_no_backward(given):
    class Constant(Function):  # whose gradient is not that of zeros
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 + 1

    def program(x, y):
        return Constant.apply(x), Constant.apply(y)

    def gradients(function):
        x, y = vector(), vector()
        outputs = function(x, y)
        return torch.autograd.grad(outputs[given == "second"].sum(), (x, y), allow_unused=True)

    jitted = thunder.jit(program)
    for got, wanted in zip(gradients(jitted), gradients(program), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)
    assert shared(hookkit.report(jitted)) == [2]


def test_a_backward_that_returns_none_feeds_zeros_to_the_call_before():
    class Stops(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return None

    class AddsOne(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad + 1

    assert shared(checked(lambda x: Stops.apply(AddsOne.apply(x)) + x, vector())) == [1, 1]


def test_a_program_without_gradients_runs_the_forward_alone():
    def program(x):
        with torch.no_grad():
            y = Swish.apply(x)
        return y + Swish.apply(x)

    assert shared(checked(program, vector())) == [1, 1]
    jitted = thunder.jit(program)
    with torch.no_grad():
        torch.testing.assert_close(jitted(vector()), program(vector()))
    torch.testing.assert_close(jitted(vector(requires_grad=False)), program(vector(requires_grad=False)))


def test_second_derivatives_are_those_of_eager():
    def program(x, y):
        return Swish.apply(Product.apply(Swish.apply(x), y, 2.0)[0]).sum()

    def second(function):
        x, y = vector(), vector() + 0.5
        gradients = torch.autograd.grad(function(x, y), (x, y), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, y))

    for got, wanted in zip(second(thunder.jit(program)), second(program), strict=True):
        torch.testing.assert_close(got, wanted)


def test_regions_nest():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = Swish.apply(x)
            ctx.save_for_backward(y)
            return Swish.apply(y)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return 5 * grad * Swish.apply(y)

    report = checked(lambda x: Outer.apply(Outer.apply(x)), vector())
    assert [(r.name, r.calls) for r in report.regions] == [("Outer", 2), ("Swish", 1), ("Swish_1", 2)]


def test_random_numbers_are_drawn_at_each_call():
    class Noise(Function):
        @staticmethod
        def forward(ctx, x):
            noise = torch.rand_like(x)
            ctx.save_for_backward(noise)
            return x * noise

        @staticmethod
        def backward(ctx, grad):
            (noise,) = ctx.saved_tensors
            return 3 * grad * noise

    def program(x):
        return Noise.apply(x), Noise.apply(x)

    jitted = thunder.jit(program)
    x = torch.ones(100, requires_grad=True)
    first, second = jitted(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first, jitted(x)[0])
    (gradient,) = torch.autograd.grad(first.sum() + 2 * second.sum(), x)
    torch.testing.assert_close(gradient, 3 * (first + 2 * second).detach())
    assert shared(hookkit.report(jitted)) == [2]


def test_a_call_inside_of_a_checkpoint_is_traced():
    def program(x):
        return checkpoint(lambda x: Swish.apply(x.sin()), x, use_reentrant=False)

    report = checked(program, vector())
    assert shared(report) == []
    assert "checkpoint" in reasons(report)[0]


def test_a_call_that_returns_a_view_is_traced():
    class Halves(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(2, 3)

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad.reshape(6)

    report = checked(lambda x: Halves.apply(x * 1) * 2, vector())
    assert reasons(report) == ["what it returns may share memory with what it is given"]


def test_a_call_that_returns_two_views_of_one_tensor_is_traced():
    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            return y, y.view(2, 3)

        @staticmethod
        def backward(ctx, grad, of_view):
            return 3 * grad + of_view.reshape(6)

    report = checked(lambda x: Both.apply(x), vector())
    assert reasons(report) == ["two of the tensors that it returns may share memory"]


def test_what_cannot_be_traced_is_opaque():
    class ThroughNumPy(Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    assert [call.outcome for call in checked(lambda x: ThroughNumPy.apply(x), vector()).calls] == ["opaque"]


def test_a_residual_that_the_program_changes_is_seen():
    def program(x):
        y = x * 1
        z = Swish.apply(y)
        y.add_(1)
        return z

    jitted = thunder.jit(program)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(program, (vector(),))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(jitted, (vector(),))


def test_an_attribute_that_the_program_sets_is_read_by_the_next_call():
    class Options:
        factor = 2.0

    options = Options()

    class Scale(Function):
        @staticmethod
        def forward(ctx, x):
            return x * options.factor

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    def program(x):
        options.factor = 2.0
        x = Scale.apply(x)
        options.factor = 5.0
        return Scale.apply(x)

    jitted = thunder.jit(program)
    assert_same(run(jitted, (vector(),)), run(program, (vector(),)))


def test_a_program_with_regions_is_compiled_in_several_threads():
    def program(x):
        return Swish.apply(Swish.apply(x))

    jitted, results = thunder.jit(program), []
    sizes = range(2, 6)

    def work(size):
        with hookkit.use(mode="region"):
            x = torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()
            results.append((run(jitted, (x,)), run(program, (x,))))

    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(sizes)
    for got, wanted in results:
        assert_same(got, wanted)


def test_one_function_alone_is_a_region_by_its_mode():
    @hookkit.mode("region")
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    with hookkit.use(mode="trace"):
        report = checked(lambda x: Swish.apply(Twice.apply(x)), vector())
    assert [(r.name, r.calls) for r in report.regions] == [("Twice", 1)]


def test_a_rule_is_a_region_by_its_mode():
    def cube(x, *, by):
        return x * x * x * by

    @hookkit.rule(cube, mode="region", register=False)
    def cube_rule(x, *, by):
        return x * x * x * by, hookkit.save(x=x, by=by)

    @cube_rule.backward
    def _(saved, grad):
        return {"x": 10 * grad * saved.x * saved.by}

    def eager(x):
        class Cube(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x * x * 2.0

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return 10 * grad * x * 2.0

        return Cube.apply(Cube.apply(x))

    with hookkit.use(cube_rule):
        jitted = thunder.jit(lambda x: cube(cube(x, by=2.0), by=2.0))
        assert_same(run(jitted, (vector(),)), run(eager, (vector(),)))
    assert shared(hookkit.report(jitted)) == [2]


# ----------------------------------------------------------------------------------------------- functions and modules


@hookkit.region
class Block(torch.nn.Module):
    def __init__(self, width=6, factor=1.0):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.factor = factor

    def forward(self, x, scale=None):
        y = self.down(Swish.apply(self.up(self.norm(x)))) * self.factor
        return x + (y if scale is None else y * scale)


class Stack(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack(*blocks):
    torch.manual_seed(0)
    return Stack(*(blocks or [Block() for _ in range(3)])).double()


def trained(function, model, *inputs):
    """The output of a model, the gradients of its inputs and parameters, and its buffers."""
    model.zero_grad()
    inputs = [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs]
    output = function(*inputs)
    if output.requires_grad:
        output.square().sum().backward()
    values = [i.grad for i in inputs] + [p.grad for p in model.parameters()]
    return output.detach(), [v.clone() if v is not None else None for v in values], [b.clone() for b in model.buffers()]


def assert_trains(model, *inputs, jitted=None):
    """Compares the gradients of a model that is compiled with those of the same that is not; the report."""
    jitted = jitted or thunder.jit(model)
    got, wanted = trained(jitted, model, *inputs), trained(model, model, *inputs)
    for a, b in zip([got[0], *got[1], *got[2]], [wanted[0], *wanted[1], *wanted[2]], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)
    return hookkit.report(jitted)


def test_modules_of_a_class_are_calls_of_one_region():
    with hookkit.use(mode="auto"):
        report = assert_trains(stack(), vector(1, 6))
    assert [(r.name, r.calls) for r in report.regions] == [("Block", 3)]
    assert [call.outcome for call in report.calls if call.depth == 0] == ["region"] * 3


def test_functions_inside_of_a_module_are_regions_inside_of_it():
    report = assert_trains(stack(), vector(1, 6))
    assert [(r.name, r.calls) for r in report.regions] == [("Block", 3), ("Swish", 3)]


def test_modules_that_differ_are_different_regions():
    model = stack(Block(), Block(factor=3.0), Block(), Block())
    model.blocks[2].up.bias.requires_grad_(False)
    model.blocks[3].up.bias = None
    assert shared(assert_trains(model, vector(1, 6)))[:1] == [1]
    assert len([r for r in assert_trains(model, vector(1, 6)).regions if r.name.startswith("Block")]) == 4


def test_a_module_that_is_called_twice_is_interpreted_once():
    block = Block()
    report = assert_trains(stack(block, block), vector(1, 6))
    assert [call.replays for call in report.calls if call.depth == 0] == [0, 1]


def test_parameters_that_are_assigned_between_steps_are_read():
    model = stack()
    jitted = thunder.jit(model)
    assert_trains(model, vector(1, 6), jitted=jitted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_trains(model, vector(1, 6), jitted=jitted)


def test_second_derivatives_of_modules_are_those_of_eager():
    model = stack()

    def second(function):
        x = vector(1, 6)
        wanted = [x, *model.parameters()]
        gradients = torch.autograd.grad(function(x).square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), wanted)

    for got, expected in zip(second(thunder.jit(model)), second(model), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_module_under_no_grad_and_one_in_no_grad_are_right():
    model = stack()
    jitted = thunder.jit(model)
    with torch.no_grad():
        torch.testing.assert_close(jitted(vector(1, 6)), model(vector(1, 6)))

    class Frozen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)

    assert shared(assert_trains(Frozen().double(), vector(1, 6)))[:2] == [1, 1]


def test_a_region_in_which_a_part_has_no_gradient():
    @hookkit.region
    def half(x, y):
        with torch.no_grad():
            z = x * y
        return z * x + y.detach() * 2

    assert [r.calls for r in checked(lambda x, y: half(half(x, y), y), vector(), vector() + 2).regions] == [2]


def test_buffers_that_a_module_changes_make_it_no_region():
    @hookkit.region
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6)

        def forward(self, x):
            return torch.tanh(self.norm(x))

    model = torch.nn.Sequential(Normed(), Normed()).double()
    twin = torch.nn.Sequential(Normed(), Normed()).double()
    jitted = thunder.jit(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), twin(x))
    for got, wanted in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)
    assert shared(hookkit.report(jitted)) == []
    assert len(reasons(hookkit.report(jitted))) == 2


def test_an_opaque_call_inside_of_a_module_makes_it_no_region():
    @hookkit.region
    def through(x):
        return torch.special.i1(x) * 2

    report = checked(lambda x: through(through(x)), vector())
    assert all("PyTorch runs" in r for r in reasons(report))
    assert len(reasons(report)) == 2


def test_a_function_that_changes_its_argument_is_no_region():
    @hookkit.region
    def doubled(x):
        x.mul_(2)
        return x + 1

    report = checked(lambda x: doubled(x * 1), vector())
    assert len(reasons(report)) == 1


def test_an_exception_of_a_region_is_the_programs_own():
    @hookkit.region
    def fails(x):
        if x.shape[0] > 3:
            raise ValueError("too long")
        return x * 2

    def program(x):
        try:
            return fails(x)
        except ValueError:
            return fails(x[:3]) * 5

    checked(program, vector())


def test_several_differentiable_outputs_make_a_function_no_region():
    @hookkit.region
    def both(x):
        return x * 2, x * 3

    assert "several of its outputs" in reasons(checked(lambda x: both(x), vector()))[0]


def test_dropout_in_a_region_is_drawn_at_each_call():
    @hookkit.region
    def dropped(x):
        return functional.dropout(x, 0.5) * 2

    jitted = thunder.jit(lambda x: (dropped(x), dropped(x)))
    x = torch.ones(200, requires_grad=True)
    first, second = jitted(x)
    assert not torch.equal(first, second)
    (gradient,) = torch.autograd.grad(first.sum() + 3 * second.sum(), x)
    torch.testing.assert_close(gradient, (first + 3 * second).detach())
    assert shared(hookkit.report(jitted)) == [2]


def test_autocast_around_a_region_is_that_of_the_program():
    @hookkit.region
    def product(x, y):
        return (x @ y).tanh()

    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def program(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            z = product(x, y)
        return z.float() + product(x, y)

    jitted = thunder.jit(program)
    assert jitted(x, y).dtype == program(x, y).dtype
    torch.testing.assert_close(jitted(x, y), program(x, y), atol=1e-2, rtol=1e-2)
    report = hookkit.report(jitted)
    assert shared(report) == [1, 1]


def test_a_checkpoint_around_and_inside_of_a_module_is_traced():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    report = assert_trains(Around().double(), vector(1, 6))
    assert [r.name for r in report.regions] == []

    @hookkit.region
    def inside(x):
        return checkpoint(torch.tanh, x, use_reentrant=False) * 2

    assert "computed again" in reasons(checked(lambda x: inside(x), vector()))[0]


def test_what_a_region_hands_out_otherwise_is_as_without_it():
    @hookkit.region
    def noting(x, notes):
        y = torch.tanh(x) * x
        notes.append(y)
        return y

    def program(x):
        notes = []
        return noting(noting(x, notes), notes), notes[0] * 2, notes[1]

    assert "Python state" in reasons(checked(program, vector()))[0]


def test_an_attribute_that_a_module_sets_is_set():
    @hookkit.region
    class Noting(torch.nn.Module):
        last = None

        def forward(self, x):
            y = torch.tanh(x)
            self.last = y.detach()
            return y

    model = torch.nn.Sequential(Noting(), Noting())
    jitted = thunder.jit(model)
    x = vector()
    result = jitted(x)
    torch.testing.assert_close(result, x.tanh().tanh())
    torch.testing.assert_close(model[0].last, x.tanh().detach())
    torch.testing.assert_close(model[1].last, result.detach())
    assert shared(hookkit.report(jitted)) == []


def test_a_region_returns_what_its_function_does():
    @hookkit.region
    def packed(x):
        y = torch.tanh(x) * x
        return {"first": y, "nothing": None, "again": (y,)}

    def program(x):
        found = packed(x)
        return found["first"] * 2, found["again"][0], packed(found["first"].detach())

    assert shared(checked(program, vector())) == [1, 1]


def test_what_cannot_be_a_region_is_refused():
    for target in (Block(), 3, torch.sin):
        with pytest.raises(hookkit.RegistrationError, match=r"hookkit.region\(...\)"):
            hookkit.region(target)


def test_explain_says_what_would_be_a_region():
    explanation = hookkit.explain(stack(), vector(1, 6))
    assert [call.outcome for call in explanation.calls if call.depth == 0] == ["region"] * 3


# ---------------------------------------------------------------------------------------------- nested_compile_region


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        def body(x, weight):
            return torch.tanh(x @ weight) + x

        body = getattr(torch.compiler, "nested_compile_region", hookkit.region)(body)  # torch 2.7 has none
        return body(body(x, self.linear.weight), self.linear.weight)


@pytest.mark.parametrize("compiler", [thunder.jit, thunder.dynamo.thunderfx], ids=["jit", "fx"])
def test_a_nested_compile_region_is_a_region(compiler):
    model = Nested().double()
    with hookkit.use(mode="auto"):
        assert_trains(model, vector(1, 6), jitted=(jitted := compiler(model)))
    report = hookkit.report(jitted)
    assert shared(report) == [2]
