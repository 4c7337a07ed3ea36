"""Derivatives of compiled programs beyond the first: create_graph, many cotangents, torch.func, forward mode."""

import gc
import warnings
import weakref

import pytest
import thunder
import torch
from agreement import tensors_of
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hookkit


def vector(n=4, start=-1.0, end=1.0):
    return torch.linspace(start, end, n, dtype=torch.float64).requires_grad_()


class Cube(torch.autograd.Function):
    """Its gradient is wrong on purpose, times 100 / 3."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x * x


class Squared(torch.autograd.Function):
    """A tracer cannot see through NumPy: it runs opaque."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Squared.calls += 1
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 200 * grad * x


class Sine(torch.autograd.Function):
    """Its backward applies another Function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * Cube.apply(x)


class Transformed(torch.autograd.Function):
    """For torch.func and forward mode, its derivative another one in each mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x.cos()

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 70 * tangent * x.cos()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 200 * grad * x


def through_dynamo(program):
    from thunder.dynamo import thunderfx

    torch._dynamo.reset()
    return thunderfx(program)


def assert_derivatives(program, *inputs, jit=thunder.jit, order=2):
    """Compares derivatives of all orders up to one, with respect to all inputs, with eager PyTorch's."""

    def derivatives(function):
        found = function(*inputs)
        result = [found]
        for _ in range(order):
            outputs = [t for t in tensors_of(found) if t.requires_grad]
            weights = [torch.linspace(1, 2, t.numel(), dtype=t.dtype).reshape(t.shape) for t in outputs]
            found = torch.autograd.grad(outputs, inputs, weights, create_graph=True, allow_unused=True)
            result.append(found)
        return result

    torch.manual_seed(0)
    expected = derivatives(program)
    torch.manual_seed(0)
    found = derivatives(jit(program))
    for got, wanted in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert got.requires_grad == wanted.requires_grad
        torch.testing.assert_close(got, wanted)


def without_gradient(x, w):
    with torch.no_grad():
        factor = x.exp()
    return factor * Cube.apply(x) * w, (x * w).detach() * w


def changed_in_place(x, w):
    y = x * 2
    y.add_(x.sin())
    y[0] = w[1]
    return Cube.apply(y) * w


def recomputed(x, w):
    return checkpoint(lambda z: Cube.apply(z) * z.sin(), x, use_reentrant=False) * w


PROGRAMS = {
    "plain": lambda x, w: (x * w).sin(),
    "a Function": lambda x, w: Cube.apply(x * w) + x.sin() * w,
    "a Function in the backward of another": lambda x, w: Sine.apply(x) * w.exp(),
    "two outputs": lambda x, w: (Cube.apply(x) * w, x.sin() * w),
    "operations that hookkit corrects": lambda x, w: (
        x.sigmoid() * w.tanh() * w.softmax(0) * x.clamp(-0.5, 1) * w.max(0)[0]
    ),
    "no_grad and detach": without_gradient,
    "changes in place": changed_in_place,
    "a checkpoint": recomputed,
}


@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_of_three_orders_are_those_of_eager(name, jit):
    assert_derivatives(PROGRAMS[name], vector(), vector(4, 0.5, 2.0), jit=jit, order=3)


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
def test_a_call_that_runs_opaque_has_a_second_derivative():
    assert_derivatives(lambda x: Squared.apply(x.exp()) * x, vector())


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
def test_a_second_derivative_leaves_python_state_as_it_is():
    compiled = thunder.jit(lambda x: Squared.apply(x))
    x = vector()
    y = compiled(x).sum()
    before = Squared.calls
    torch.autograd.grad(y, x, create_graph=True)
    assert Squared.calls == before


def test_a_rules_backward_is_differentiated_like_that_of_a_function():
    @hookkit.rule(torch.sin, register=False)
    def sine(input):
        return torch.sin(input), hookkit.save(input=input)

    @sine.backward
    def _(saved, grad):
        return {"input": 100 * grad * torch.cos(saved.input)}

    x = vector()
    with hookkit.use(sine):
        (first,) = torch.autograd.grad(thunder.jit(lambda x: torch.sin(x))(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 100 * x.cos())
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], -100 * x.sin())


def test_an_input_that_was_computed_from_another_gets_its_own_part():
    x, w = vector(), vector(4, 0.5, 2.0)
    assert_derivatives(lambda x, w: (lambda h: Cube.apply(x) * h.sin())(x.exp()) * w, x, w)

    def run(jit):
        x = vector()
        h = x.exp()
        (first,) = torch.autograd.grad(jit(lambda x, h: Cube.apply(x) * h.sin())(x, h).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    for got, wanted in zip(run(thunder.jit), run(lambda f: f), strict=True):
        torch.testing.assert_close(got, wanted)


def test_two_compiled_programs_in_a_chain_have_second_derivatives():
    f, h = thunder.jit(lambda x: Cube.apply(x)), thunder.jit(lambda y: y.sin() * y)
    assert_derivatives(lambda x: h(f(x)), vector(), jit=lambda _: lambda x: h(f(x)))
    x = vector()
    (first,) = torch.autograd.grad(h(f(x)).sum(), x, create_graph=True)
    y = x**3
    expected = 100 * x**2 * (y.cos() * y + y.sin())
    torch.testing.assert_close(first, expected)


def test_a_penalty_on_the_gradient_of_a_module_reaches_its_parameters():
    def run(jit):
        torch.manual_seed(0)
        layers = torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        critic = torch.nn.Sequential(*layers).double()
        x = vector(12).detach().reshape(4, 3).requires_grad_()
        output = jit(critic)(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        return [*(p.grad for p in critic.parameters()), critic[1].running_mean]

    for got, wanted in zip(run(thunder.jit), run(lambda f: f), strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_random_numbers_of_a_second_derivative_are_those_of_the_first_run():
    x = vector(1000)
    y = thunder.jit(lambda x: torch.nn.functional.dropout(x, 0.5) ** 2 * x)(x)
    torch.rand(10)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    kept = (y / x**3).detach()  # 0 where it was dropped, else 4
    before = torch.get_rng_state()
    torch.testing.assert_close(first, 3 * kept * x**2)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * kept * x)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradgradcheck_of_a_compiled_program_passes():
    assert torch.autograd.gradgradcheck(thunder.jit(lambda x: x.sin() * x.exp()), (vector(3),))


@pytest.mark.parametrize("program", [lambda x: x.exp() * x.sum(), lambda x: Sine.apply(x) * x.sum()])
def test_the_functions_of_autograd_functional_are_right(program):
    functional, x = torch.autograd.functional, vector(3).detach()
    compiled = thunder.jit(program)
    for jacobian in (functional.jacobian, lambda f, x: functional.jacobian(f, x, vectorize=True)):
        torch.testing.assert_close(jacobian(compiled, x), jacobian(program, x))
    for second in (functional.hessian, lambda f, x: functional.hvp(f, x, torch.ones_like(x))):
        expected = second(lambda x: program(x).sum(), x)
        torch.testing.assert_close(second(lambda x: compiled(x).sum(), x), expected)


def test_gradients_for_many_cotangents_at_once_are_those_one_by_one():
    x = vector()
    output = thunder.jit(lambda x: Cube.apply(x) * x.sin())(x)
    many = torch.eye(4, dtype=torch.float64)
    (found,) = torch.autograd.grad(output, x, many, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(output, x, cotangent, retain_graph=True)[0] for cotangent in many]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("jit", [lambda f: f, thunder.jit, through_dynamo])
def test_what_is_once_differentiable_raises_what_it_raises_in_eager(jit):
    x, cotangent = vector(), vector(4, 2.0, 3.0)
    output = jit(lambda x: Once.apply(x * 2))(x)
    (first,) = torch.autograd.grad(output, x, cotangent, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_an_input_that_has_changed_since_is_refused_when_the_second_derivative_is_asked_for():
    x, w = vector(), vector(4, 0.5, 2.0)
    output = thunder.jit(lambda x, w: Cube.apply(x) + w)(x, w)
    with torch.no_grad():
        w.add_(1)
    (first,) = torch.autograd.grad(
        output.sum(), x, create_graph=True
    )  # does not depend on w, but PyTorch's run reads it
    torch.testing.assert_close(first.detach(), 100 * x.detach() ** 2)
    with pytest.raises(hookkit.HookError, match="changed in place since the program ran"):
        first.sum().backward()


def test_a_program_that_changes_what_it_reads_is_refused_when_the_second_derivative_is_asked_for():
    def program(x, state):
        y = Cube.apply(x) * state
        state.add_(1)
        return y

    x = vector()
    output = thunder.jit(program)(x, torch.ones(4, dtype=torch.float64))
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(hookkit.HookError, match="changed in place by the program itself"):
        first.sum().backward()


@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
def test_a_program_without_calls_of_rules_that_changes_what_it_reads_is_refused_likewise(jit):
    x = vector()
    output = jit(lambda h, x: h.mul_(x).cos())(x * 2, x)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(hookkit.HookError, match="changed in place by the program itself"):
        first.sum().backward()


def test_random_numbers_that_are_not_torchs_are_refused_when_the_second_derivative_is_asked_for():
    import random

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * random.random()

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    x = vector()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookkit.OpaqueFallbackWarning)
        output = thunder.jit(lambda x: Noise.apply(x) * x)(x)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(hookkit.HookError, match=r"Noise.*draws random numbers that are not torch's"):
        first.sum().backward()


def test_inputs_are_let_go_when_the_graph_is_freed():
    held = vector()
    middle = held.sin()
    seen = weakref.ref(middle)
    output = thunder.jit(lambda y: Cube.apply(y) + 1)(middle)
    del middle
    output.sum().backward()
    gc.collect()
    assert seen() is None


def test_nothing_is_computed_again_for_a_first_derivative():
    from hookkit.engine.joint import run_again

    def fail(*_):
        raise AssertionError("the program was run again")

    original, run_again.Kept.gradients = run_again.Kept.gradients, fail
    try:
        x = vector()
        thunder.jit(lambda x: Cube.apply(x) * x)(x).sum().backward()
    finally:
        run_again.Kept.gradients = original
    torch.testing.assert_close(x.grad, (100 * x**3 + x**3).detach())


# ------------------------------------------------------------------------------------------- transforms from outside

TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda x: f(x.sin() * x).sum()),
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, x * 2])),
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x * 2])),
}


@pytest.mark.filterwarnings("ignore::hookkit.TransformWarning")
@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_around_a_compiled_program_is_right(name, jit):
    def program(x):
        return x.cos() * x if name == "hessian" else Transformed.apply(x) * x

    transform, x = TRANSFORMS[name], vector(3).detach()
    compiled = jit(program)
    torch.testing.assert_close(transform(compiled)(x), transform(program)(x))
    torch.testing.assert_close(compiled(x), program(x))


@pytest.mark.filterwarnings("ignore::hookkit.TransformWarning")
@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
def test_functional_call_of_a_compiled_module_is_right(jit):
    module = torch.nn.Linear(4, 2).double()
    parameters = {name: p.detach() * 2 for name, p in module.named_parameters()}

    def gradients(module):
        call, x = torch.func.functional_call, vector().detach()
        return torch.func.grad(lambda p: call(module, p, (x,)).sin().sum())(parameters)

    torch.testing.assert_close(gradients(jit(module)), gradients(module))
    given = (parameters, (vector().detach(),))
    expected = torch.func.functional_call(module, *given)
    torch.testing.assert_close(torch.func.functional_call(jit(module), *given), expected)


@pytest.mark.filterwarnings("ignore::hookkit.TransformWarning")
@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
def test_forward_mode_uses_a_functions_jvp(jit):
    x = vector().detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        output = forward_ad.unpack_dual(jit(lambda x: Transformed.apply(x) * 2)(dual))
    torch.testing.assert_close(output.primal, x.sin() * 2)
    torch.testing.assert_close(output.tangent, 140 * x.cos())


@pytest.mark.filterwarnings("ignore::hookkit.TransformWarning")
@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
def test_forward_mode_through_a_function_without_jvp_raises_as_in_eager(jit):
    x = vector().detach()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        jit(lambda x: Cube.apply(x) * 2)(forward_ad.make_dual(x, torch.ones_like(x)))


def test_what_a_transform_costs_is_said_once():
    from hookkit.engine.joint import transforms

    transforms._warned.clear()
    compiled = thunder.jit(lambda x: x.sin().sum())
    with pytest.warns(hookkit.TransformWarning, match="eager PyTorch's speed"):
        torch.func.grad(compiled)(vector().detach())
    torch.func.grad(compiled)(vector().detach())  # a warning would be an error


@pytest.mark.filterwarnings("ignore::hookkit.TransformWarning")
@pytest.mark.parametrize("jit", [thunder.jit, through_dynamo])
def test_the_report_says_that_a_transform_had_pytorch_run_the_program(jit):
    compiled, other = jit(lambda x: Transformed.apply(x).sum()), jit(lambda x: x.sum())
    torch.func.grad(compiled)(vector().detach())
    report = hookkit.report(compiled)
    assert (report.steps, report.eager_runs) == ((), {"a transform of torch.func": 1})
    compiled(vector())
    other(vector())
    with forward_ad.dual_level():
        compiled(forward_ad.make_dual(vector().detach(), vector().detach()))
    report = hookkit.report(compiled)
    assert len(report.steps) == 1
    assert report.to_dict()["eager_runs"] == {"a transform of torch.func": 1, "forward-mode AD": 1}
    assert "run by eager PyTorch 1 time: forward-mode AD was active around the program" in str(report)
    assert not hookkit.report(other).eager_runs


# ------------------------------------------------------------------------------- rules that keep what they compute


def gate(x):
    return x * torch.sigmoid(x)


def gate_rule(mode, sigmoid=torch.sigmoid):
    """A rule that keeps a tensor which its forward provider computes: the second derivative leads through that."""

    @hookkit.rule(gate, mode=mode, register=False)
    def rule(x):
        s = sigmoid(x)
        return x * s, hookkit.save(x=x, s=s)

    @rule.backward
    def _(saved, grad):
        return {"x": grad * (saved.s + saved.x * saved.s * (1 - saved.s))}

    return rule


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_the_second_and_third_derivatives_lead_through_what_a_forward_provider_computes(mode):
    def derivatives(function):
        x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        found = [function(x).sin()]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
        return found

    with hookkit.use(gate_rule(mode)):
        compiled = derivatives(thunder.jit(lambda x: gate(x)))
    for got, wanted in zip(compiled, derivatives(gate), strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_second_derivative_of_what_a_provider_computes_in_numpy_is_refused():
    rule = gate_rule("opaque", lambda x: torch.from_numpy(1 / (1 + (-x.detach()).exp().numpy())))
    rule.meta(lambda x: torch.empty_like(x))
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with hookkit.use(rule):
        (gradient,) = torch.autograd.grad(thunder.jit(lambda x: gate(x))(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(gate(x).sum(), x)[0])
    with pytest.raises(hookkit.HookError, match=r"second derivative of gate\(\).*calls Tensor.numpy\(\)"):
        gradient.sum().backward()


def test_a_backward_between_two_of_dynamos_graphs_is_not_compiled_itself():
    def program(x):
        energy = (Cube.apply(x) * WEIGHTS).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -slope

    def run(jit):
        x = vector()
        energy, force = jit(program)(x)
        (energy.square() + (force - 1).square().sum()).backward()
        return energy, force, x.grad

    WEIGHTS = torch.linspace(1, 2, 4, dtype=torch.float64)
    for got, wanted in zip(run(through_dynamo), run(lambda f: f), strict=True):
        torch.testing.assert_close(got, wanted)
