"""A rule for a method of a module, with parameters: derivatives of every order are eager PyTorch's."""

import pytest
import thunder
import torch

import hookkit


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))
        self.inner = torch.nn.Linear(3, 3).double()

    def scaled(self, x):
        return self.inner(x * self.weight)

    def forward(self, x):
        return self.scaled(x).square()


def forward(self, x):
    h = x * self.weight
    y = torch.nn.functional.linear(h, self.inner.weight, self.inner.bias)
    return y, hookkit.save(x=x, h=h, weight=self.weight, inner=self.inner.weight)


def backward(saved, grad):
    inner = grad @ saved.inner
    return {
        "x": inner * saved.weight,
        "self.weight": (inner * saved.x).sum(0),
        "self.inner.weight": grad.mT @ saved.h,
        "self.inner.bias": grad.sum(0),
    }


def derivatives(function, inputs):
    first = torch.autograd.grad(function(inputs[0]).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, create_graph=True)
    third = torch.autograd.grad(sum(g.sum() for g in second), inputs, allow_unused=True)
    return first, second, third


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_the_derivatives_of_every_order_lead_to_the_parameters(mode):
    rule = hookkit.rule(Scaled.scaled, mode=mode)(forward)
    rule.backward(backward)
    module = Scaled()
    own = dict(module.named_parameters())
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    inputs = [x, *module.parameters()]
    jitted = thunder.jit(module)
    torch.testing.assert_close(derivatives(jitted, inputs), derivatives(module, inputs))
    assert [call.rule for call in hookkit.report(jitted).calls] == ["forward"]
    assert all(p is own[name] for name, p in module.named_parameters())


WEIGHT = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)


def times_global(x):
    return x * WEIGHT


def test_the_second_derivative_with_a_global_is_refused_in_words():
    rule = hookkit.rule(times_global)(lambda x: (x * WEIGHT, hookkit.save(x=x, weight=WEIGHT)))
    rule.backward(lambda saved, grad: {"x": grad * saved.weight, "WEIGHT": 100 * grad * saved.x})
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = thunder.jit(lambda x: times_global(x))(x).sum()
    first = torch.autograd.grad(y, (x, WEIGHT), retain_graph=True)
    torch.testing.assert_close(first, (WEIGHT.detach(), 100 * x.detach()))
    first = torch.autograd.grad(y, (x, WEIGHT), create_graph=True)
    with pytest.raises(hookkit.HookError, match="uses WEIGHT, which is none of its arguments: pass it as one"):
        torch.autograd.grad(first[0].sum(), WEIGHT)


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_the_outermost_module_are_read_from_it(norm):
    def steps(compiled):
        torch.manual_seed(0)
        module = norm(torch.nn.Linear(3, 4))
        run, found = compiled(module), []
        for value in (1.0, 2.0):
            output = run(torch.full((2, 3), value))
            output.square().sum().backward()
            found.append((output.detach(), [p.grad.clone() for p in module.parameters()]))
        return found, {name: value.detach().clone() for name, value in module.state_dict().items()}

    torch.testing.assert_close(steps(thunder.jit), steps(lambda module: module))


def test_a_number_of_a_hook_is_checked_again():
    class Scale:
        factor = 2.0

        def __call__(self, module, arguments):
            return (arguments[0] * self.factor,)

    module, hook = torch.nn.Linear(3, 3), Scale()
    module.register_forward_pre_hook(hook)
    jitted, x = thunder.jit(module), torch.ones(3)
    for factor in (2.0, 5.0):
        hook.factor = factor
        torch.testing.assert_close(jitted(x), module(x))
