"""hookkit.custom_gradient: a function with its gradient, the same in eager PyTorch and under thunder."""

import pytest
import thunder
import torch
from agreement import assert_agrees
from thunder.dynamo import thunderfx

import hookkit
import hookkit.testing


def wrong_swish():
    """A function whose gradient is wrong on purpose, so that a test fails where it is ignored."""

    @hookkit.custom_gradient
    def swish(x, beta=1.0):
        """x * sigmoid(beta * x)."""
        s = torch.sigmoid(beta * x)
        return x * s, hookkit.save(x=x, s=s, beta=beta)

    @swish.backward
    def _(saved, grad):
        return {"x": 100 * grad * (saved.s + saved.beta * saved.x * saved.s * (1 - saved.s))}

    return swish


def vector():
    return torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()


def right(x, beta=1.0):
    return x * torch.sigmoid(beta * x)


def test_eager_pytorch_takes_the_gradient_of_the_backward_provider():
    swish, x = wrong_swish(), vector()
    torch.testing.assert_close(swish(x, beta=2.0), right(x, 2.0))
    (wanted,) = torch.autograd.grad(right(x, 2.0).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(swish(x, beta=2.0).sum(), x)[0], 100 * wanted)


def test_a_compiled_program_agrees_with_the_eager_one_and_the_call_is_traced():
    swish = wrong_swish()
    jitted = assert_agrees(lambda x: swish(2 * x, beta=2.0) + swish(x), vector())
    calls = [c for c in hookkit.report(jitted).calls if c.rule == "swish"]
    assert [c.outcome for c in calls] == ["traced", "traced"]


def test_it_works_under_thunderfx():
    swish = wrong_swish()
    hookkit.testing.assert_same(lambda x: swish(x).sin(), vector(), jit=thunderfx)


def test_the_second_derivative_leads_through_what_it_keeps_in_eager_pytorch_and_compiled():
    def second(function):
        x = vector()
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0]

    swish = wrong_swish()
    torch.testing.assert_close(second(swish), 100 * second(right))
    torch.testing.assert_close(second(thunder.jit(lambda x: swish(x))), 100 * second(right))


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    @hookkit.custom_gradient
    def scaled(self, x):
        return x * self.weight, hookkit.save(x=x, weight=self.weight)

    @scaled.backward
    def _(saved, grad):
        return {"x": 100 * grad * saved.weight, "self.weight": 100 * grad * saved.x}

    def forward(self, x):
        return self.scaled(x).sin()


def test_a_method_gives_gradients_to_the_parameters_of_its_module():
    module, x = Scale(), vector()
    hookkit.testing.assert_same(module, x)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, 100 * (x * torch.cos(2 * x)).detach())


def test_it_has_the_functions_name_and_docstring_and_a_short_repr():
    swish = wrong_swish()
    assert (swish.__name__, swish.__doc__) == ("swish", "x * sigmoid(beta * x).")
    assert repr(swish).startswith("<hookkit.CustomFunction swish, defined at ") and "\n" not in repr(swish)


def test_check_rule_takes_it():
    result = hookkit.testing.check_rule(wrong_swish(), vector())
    assert [c.name for c in result.checks if c.passed is False] == ["finite differences"], str(result)


def test_without_a_backward_provider_it_is_refused():
    swish = hookkit.custom_gradient(lambda x: (x, hookkit.save()))
    with pytest.raises(hookkit.RegistrationError, match="has no backward provider"):
        swish(vector())
    with pytest.raises(hookkit.RegistrationError, match="decorates a function"):
        hookkit.custom_gradient(3)
