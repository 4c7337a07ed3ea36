"""Derivatives through the parts of a graph that thunderfx leaves to Inductor: eager PyTorch's, to every order."""

import gc
import weakref

import pytest
import torch
from agreement import tensors_of
from thunder.dynamo import thunderfx

import hookkit


def vector(n=4, start=-1.0, end=1.0):
    return torch.linspace(start, end, n, dtype=torch.float64).requires_grad_()


def compiled(program):
    torch._dynamo.reset()
    return thunderfx(program)


def parts(function):
    return [part.compiler for graph in hookkit.report(function).graphs for part in graph.parts]


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


def derivatives(function, inputs, order):
    found = function(*inputs)
    result = [found]
    for _ in range(order):
        outputs = [t for t in tensors_of(found) if t.requires_grad]
        weights = [torch.linspace(1, 2, t.numel(), dtype=t.dtype).reshape(t.shape) for t in outputs]
        found = torch.autograd.grad(outputs, inputs, weights, create_graph=True, allow_unused=True)
        result.append(found)
    return result


def assert_derivatives(program, *inputs, order=3):
    """Compares derivatives of all orders up to one, with respect to all inputs, with eager PyTorch's."""
    function = compiled(program)
    found = derivatives(function, inputs, order)
    assert "Inductor" in parts(function)
    for got, wanted in zip(found, derivatives(program, inputs, order), strict=True):
        got, wanted = ([v] if isinstance(v, torch.Tensor) else v for v in (got, wanted))
        for one, other in zip(got, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.requires_grad == other.requires_grad
                torch.testing.assert_close(one, other)


def shifted(x):
    return torch.outer(x, x) + torch.diag(torch.arange(2.0, 2.0 + len(x), dtype=x.dtype))


def without_gradient(x, w):
    with torch.no_grad():
        factor = torch.sinc(x.exp())
    return torch.special.i0(x) * factor * w


PROGRAMS = {
    "a part alone": lambda x, w: torch.sinc(x * w),
    "a part between others": lambda x, w: torch.sinc(x.exp()).cos() * w,
    "a part that keeps what it computes": lambda x, w: torch.linalg.slogdet(shifted(x) + torch.diag(w))[1],
    "two parts": lambda x, w: torch.special.i0(torch.sinc(x).exp()) * torch.sinc(w * x),
    "a Function around it": lambda x, w: torch.sinc(Cube.apply(x)) + Cube.apply(torch.sinc(w)),
    "several outputs": lambda x, w: (torch.sinc(x), torch.special.i0(w) * x, torch.sinc(x * w)),
    "a view of what it computes": lambda x, w: torch.sinc(x * w).unfold(0, 2, 1) * x[:3, None],
    "a view of what it computes, and that": lambda x, w: (lambda s: (s, s.unfold(0, 2, 1)))(torch.sinc(x * w)),
    "a view of an input": lambda x, w: torch.sinc(x) * w.unfold(0, 2, 1)[:, :1].sum(),
    "a constant": lambda x, w: torch.sinc(x * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)) * w,
    "no_grad": without_gradient,
    "detach": lambda x, w: torch.sinc(x.detach()) * torch.sinc(w) * x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_of_three_orders_are_those_of_eager(name):
    assert_derivatives(PROGRAMS[name], vector(), vector(4, 0.5, 2.0))


def test_an_input_that_leads_nowhere_has_no_gradient():
    assert_derivatives(lambda x, w: torch.sinc(x) * w.detach(), vector(), vector(4, 0.5, 2.0))


def test_a_penalty_on_the_gradient_reaches_the_parameters():
    def run(jit):
        torch.manual_seed(0)
        critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.RReLU(0.2, 0.2), torch.nn.Linear(8, 1)).double()

        def program(x):
            return torch.sinc(critic(x))

        x = vector(12).detach().reshape(4, 3).requires_grad_()
        output = jit(program)(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        return [p.grad for p in critic.parameters()]

    for got, wanted in zip(run(compiled), run(lambda f: f), strict=True):
        torch.testing.assert_close(got, wanted)


def test_backward_with_a_graph_adds_gradients_that_have_one():
    def run(jit):
        x, w = vector(), vector(4, 0.5, 2.0)
        jit(lambda x, w: (torch.sinc(x * w) * x).sum())(x, w).backward(create_graph=True)
        first, other = x.grad, w.grad
        return first, other, *torch.autograd.grad((first * other).sum(), (x, w))

    with pytest.warns(UserWarning, match="create_graph"):
        found = run(compiled)
        expected = run(lambda f: f)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_later_graph_leads_to_what_was_computed_before():
    def run(jit):
        x = vector()
        h = x.exp()
        (first,) = torch.autograd.grad(jit(lambda x, h: torch.sinc(x * h))(x, h).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    for got, wanted in zip(run(compiled), run(lambda f: f), strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradients_for_many_cotangents_at_once_are_those_one_by_one():
    x = vector()
    output = compiled(lambda x: torch.sinc(x) * x.sin())(x)
    many = torch.eye(4, dtype=torch.float64)
    (found,) = torch.autograd.grad(output, x, many, is_grads_batched=True, retain_graph=True)
    eager = torch.sinc(x) * x.sin()
    expected = [torch.autograd.grad(eager, x, cotangent, retain_graph=True)[0] for cotangent in many]
    torch.testing.assert_close(found, torch.stack(expected))


def test_gradgradcheck_and_the_functions_of_autograd_functional_are_right():
    x, functional = vector(3, 0.2, 1.1), torch.autograd.functional

    def program(x):
        return torch.sinc(x) * x.exp()

    function = compiled(program)
    assert torch.autograd.gradgradcheck(function, (x,))
    expected = functional.hessian(lambda x: program(x).sum(), x)
    torch.testing.assert_close(functional.hessian(lambda x: function(x).sum(), x), expected)
    expected = functional.jacobian(program, x)
    torch.testing.assert_close(functional.jacobian(function, x, vectorize=True), expected)


def test_random_numbers_are_refused_when_the_second_derivative_is_asked_for():
    def program(x):
        return torch.nn.functional.feature_alpha_dropout(torch.sinc(x)[None, :, None], 0.5, True)[0, :, 0] * x

    x = vector()
    before = torch.get_rng_state()
    output = compiled(program)(x)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(hookkit.HookError, match="draws random numbers, which Inductor does in its own way"):
        first.sum().backward()


def test_an_input_that_has_changed_since_is_refused_when_the_second_derivative_is_asked_for():
    x, w = vector(), vector(4, 0.5, 2.0)
    output = compiled(lambda x, w: torch.sinc(x) * torch.special.i0(w.detach()))(x, w)
    with torch.no_grad():
        w.add_(1)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (eager,) = torch.autograd.grad((torch.sinc(x) * torch.special.i0(w.detach() - 1)).sum(), x)
    torch.testing.assert_close(first.detach(), eager)
    with pytest.raises(hookkit.HookError, match="changed in place since the program ran"):
        first.sum().backward()


def test_an_input_that_the_program_changes_is_refused_when_the_second_derivative_is_asked_for():
    x, state = vector(), torch.ones(4, dtype=torch.float64)
    output = compiled(lambda x, state: torch.sinc(x) * state.copy_(torch.special.i0(state)))(x, state)
    torch.testing.assert_close(state, torch.special.i0(torch.ones(4, dtype=torch.float64)))
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), torch.autograd.grad((torch.sinc(x) * state).sum(), x)[0])
    with pytest.raises(hookkit.HookError, match="changed in place"):
        first.sum().backward()


def test_a_first_derivative_runs_what_inductor_compiled_and_lets_inputs_go():
    from hookkit.engine.joint import run_again

    def fail(*_):
        raise AssertionError("the part was run again")

    original, run_again.Kept.gradients = run_again.Kept.gradients, fail
    try:
        x = vector()
        middle = x.exp()
        seen = weakref.ref(middle)
        output = compiled(lambda x: torch.sinc(x))(middle)
        del middle
        output.sum().backward()
    finally:
        run_again.Kept.gradients = original
    gc.collect()
    assert seen() is None
    torch.testing.assert_close(x.grad, torch.autograd.grad(torch.sinc(x.exp()).sum(), x)[0])
