"""In-place operations of a program around custom Functions: values, gradients, and what becomes of the inputs."""

import functools

import pytest
import thunder
import torch
from agreement import assert_same, run
from torch.autograd import Function

import hookkit


class Traced(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x


class Opaque(Traced):
    pass


class OpaqueWithoutResiduals(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad


def chain_on_an_input(apply, x, w):
    x.add_(1).sin_().mul_(5)
    return apply(x * w), x


def chain_on_an_input_that_comes_to_require_grad(apply, x, w):
    x.add_(1).mul_(w)
    return apply(x) * 2


def input_that_a_gradient_reads(apply, x, w):
    x.mul_(w).sin_()
    return apply(x)


def view_of_an_input(apply, x, w):
    v = x.view(2)
    v.add_(1).mul_(3)
    return apply(x * w)


def temporary_under_two_names(apply, x, w):
    h = w * 1
    y = h.add_(x)
    y.sin_()
    h.mul_(2)
    return apply(h) + y


def result_of_the_call(apply, x, w):
    return apply(w * 1).mul_(2).cos_() * x


def argument_of_the_call_afterwards(apply, x, w):
    h = w * 1
    y = apply(h)
    h.mul_(h * 2).sin_()
    return h + y


def input_of_the_call_afterwards(apply, x, w):
    x.mul_(w)
    y = apply(x)
    x.add_(1)
    return y * x


PROGRAMS = [
    chain_on_an_input,
    chain_on_an_input_that_comes_to_require_grad,
    input_that_a_gradient_reads,
    view_of_an_input,
    temporary_under_two_names,
    result_of_the_call,
    argument_of_the_call_afterwards,
    input_of_the_call_afterwards,
]


@pytest.fixture(autouse=True)
def opaque_functions():
    rule = hookkit.rule([Opaque, OpaqueWithoutResiduals], mode="opaque", register=False)
    with hookkit.use(rule):
        yield


def outcome(program, inputs):
    """Output and gradients, with the inputs as they are afterwards; or what is raised."""

    def observed(x, w):
        x = x.clone()
        return program(x, w), x.detach()

    try:
        return run(observed, inputs)
    except RuntimeError as error:
        return type(error), str(error)[:100]


@pytest.mark.parametrize("function", [Traced, Opaque, OpaqueWithoutResiduals], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_in_place_operations_are_as_in_eager(program, function):
    inputs = torch.tensor([0.5, 0.7]), torch.tensor([2.0, 3.0], requires_grad=True)
    program = functools.partial(program, function.apply)
    expected = outcome(program, inputs)
    found = outcome(thunder.jit(lambda x, w: program(x, w)), inputs)
    if isinstance(expected[0], type):
        assert "modified by an inplace operation" in expected[1]
        assert found == expected
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.copy_(x)], ids=["mul_", "copy_"])
def test_a_leaf_that_requires_grad_is_not_changed(change):
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        thunder.jit(change)(torch.ones(2, requires_grad=True))


def test_a_leaf_is_changed_with_grad_mode_off():
    def program(x):
        with torch.no_grad():
            x.mul_(2)
        return None

    x = torch.ones(2, requires_grad=True)
    thunder.jit(program)(x)
    torch.testing.assert_close(x.detach(), torch.full((2,), 2.0))


def test_a_leaf_that_is_changed_with_grad_mode_off_is_not_used_without_its_gradient():
    def program(x):
        with torch.no_grad():
            x.mul_(2)
        return Traced.apply(x)

    with pytest.raises(hookkit.HookError, match="mul_ changes a tensor that requires grad in place with grad mode off"):
        thunder.jit(program)(torch.ones(2, requires_grad=True))


def test_an_input_that_is_changed_and_handed_on_under_another_name_keeps_its_gradient():
    def program(x, y):
        x += y
        return torch.tanh(x.to(x.dtype)), x.view(2, 2)

    def outcome(function):
        leaf, other = torch.linspace(-1, 1, 4, requires_grad=True), torch.linspace(0, 1, 4, requires_grad=True)
        first, second = function(leaf * 2, other)
        (first.sin().sum() + second.cos().sum()).backward()
        return first, second, leaf.grad, other.grad

    torch.testing.assert_close(outcome(thunder.jit(program)), outcome(program))


@pytest.mark.parametrize("used", ["input", "view"])
def test_an_input_with_a_view_is_not_changed_without_its_gradient(used):
    def program(x, y):
        view = x.view(2, 2)
        x += y
        return torch.tanh(x if used == "input" else view)

    leaf = torch.linspace(-1, 1, 4, requires_grad=True)
    with pytest.raises(hookkit.HookError, match="requires grad and of which there is a view"):
        thunder.jit(program)(leaf * 2, torch.ones(4))
