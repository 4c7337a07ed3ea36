"""Gradients of what a forward provider uses besides its arguments: parameters, globals, closures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import thunder
import torch
from torch import nn

import hookkit
import hookkit.testing

GLOBAL = nn.Parameter(torch.full((3,), 7.0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 5.0))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 3.0))
        self.inner = Inner()
        self.layers = nn.ModuleList([Inner()])
        self.register_buffer("shift", torch.ones(3))

    def mix(self, x: Any) -> Any:
        return x * self.weight * self.inner.scale + self.layers[0].scale + self.shift

    def forward(self, x: Any) -> Any:
        return self.mix(2 * x)


def forward(self: Any, x: Any) -> Any:
    return (
        x * self.weight * self.inner.scale + self.layers[0].scale + self.shift,
        hookkit.save(x=x, weight=self.weight, scale=self.inner.scale),
    )


def gradients(saved: Any, grad: Any) -> dict[str, Any]:
    """Wrong on purpose, times 100."""
    return {
        "x": 100 * grad * saved.weight * saved.scale,
        "self.weight": 100 * grad * saved.x * saved.scale,
        "self.inner.scale": 100 * grad * saved.x * saved.weight,
        "self.layers.0.scale": 100 * grad,
    }


@pytest.fixture(params=["auto", "opaque"])
def rule(request: Any) -> Iterator[Any]:
    made = hookkit.rule(Mixer.mix, register=False, mode=request.param)(forward)
    with hookkit.use(made):
        yield made


def run(module: Any, x: Any) -> list[Any]:
    """The gradients of the parameters by name, and of x."""
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_(x.requires_grad)
    thunder.jit(module)(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def eager(module: Any, x: Any) -> list[Any]:
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_(x.requires_grad)
    module(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("needs", [True, False])
def test_parameters_get_the_gradients_that_are_given_by_name(rule: Any, needs: bool) -> None:
    rule.backward(gradients)
    module, x = Mixer(), torch.rand(3, requires_grad=needs)
    expected = [None if g is None else 100 * g for g in eager(module, x)]
    torch.testing.assert_close(run(module, x), expected)


def test_one_that_is_missing_is_refused_by_name(rule: Any) -> None:
    rule.backward(lambda saved, grad: {k: v for k, v in gradients(saved, grad).items() if k != "self.inner.scale"})
    with pytest.raises(hookkit.GradientError, match=r"uses self\.inner\.scale, which requires grad.*would be lost"):
        run(Mixer(), torch.rand(3, requires_grad=True))


def test_none_says_that_there_is_no_gradient(rule: Any) -> None:
    rule.backward(lambda saved, grad: {**gradients(saved, grad), "self.weight": None})
    found = run(Mixer(), torch.rand(3, requires_grad=True))
    assert found[1] is None or not found[1].any()


def test_a_frozen_parameter_needs_no_gradient_and_may_have_one(rule: Any) -> None:
    module = Mixer()
    module.weight.requires_grad_(False)
    rule.backward(gradients)
    x = torch.rand(3, requires_grad=True)
    expected = [None if g is None else 100 * g for g in eager(module, x)]
    torch.testing.assert_close(run(module, x), expected)


def test_saved_needs_knows_them(rule: Any) -> None:
    @rule.backward
    def _(saved: Any, grad: Any) -> Any:
        found = gradients(saved, grad)
        if not saved.needs["self.weight"] or saved.needs.get("self.inner.scale"):
            found["x"] = 0 * found["x"]
        return found

    module = Mixer()
    module.inner.scale.requires_grad_(False)
    assert run(module, torch.rand(3, requires_grad=True))[0].all()


def test_a_misspelt_name_is_refused(rule: Any) -> None:
    rule.backward(lambda saved, grad: {**gradients(saved, grad), "self.wieght": grad})
    with pytest.raises(hookkit.GradientError, match=r"'self\.wieght'.*expected names among .*'self\.weight'"):
        run(Mixer(), torch.rand(3, requires_grad=True))


def times_global(x: Any) -> Any:
    return x * GLOBAL


def test_a_global_tensor_gets_its_gradient_by_its_name() -> None:
    rule = hookkit.rule(times_global, register=False)(lambda x: (x * GLOBAL, hookkit.save(x=x, g=GLOBAL)))
    rule.backward(lambda saved, grad: {"x": grad * saved.g, "GLOBAL": 100 * grad * saved.x})
    x = torch.rand(3, requires_grad=True)
    GLOBAL.grad = None
    with hookkit.use(rule):
        thunder.jit(lambda x: times_global(x))(x).sum().backward()
    torch.testing.assert_close(GLOBAL.grad, 100 * x.detach())


def test_a_tensor_that_a_provider_closes_over_is_refused() -> None:
    """thunder cannot check, when the program runs again, that the closure still holds the same tensor."""
    weight = nn.Parameter(torch.ones(3))

    def operation(x: Any) -> Any:
        return x * weight

    rule = hookkit.rule(operation, register=False)(lambda x: (x * weight, hookkit.save(x=x)))
    rule.backward(lambda saved, grad: {"x": grad, "weight": 100 * grad * saved.x})
    with hookkit.use(rule), pytest.raises(hookkit.HookError, match=r"its gradient would be lost.*as an argument"):
        thunder.jit(lambda x: operation(x))(torch.rand(3, requires_grad=True))


@pytest.mark.parametrize("mode", ["auto", "opaque"])
def test_a_global_without_a_gradient_is_refused(mode: Any) -> None:
    rule = hookkit.rule(times_global, register=False, mode=mode)(lambda x: (x * GLOBAL, hookkit.save()))
    rule.backward(lambda saved, grad: {"x": grad})
    with hookkit.use(rule), pytest.raises(hookkit.HookError, match="would be lost"):
        thunder.jit(lambda x: times_global(x))(torch.rand(3, requires_grad=True)).sum().backward()


def test_without_a_gradient_around_nothing_is_asked_for() -> None:
    rule = hookkit.rule(Mixer.mix, register=False)(forward)
    rule.backward(lambda saved, grad: {"x": grad})
    with hookkit.use(rule), torch.no_grad():
        thunder.jit(Mixer())(torch.rand(3))


def test_check_rule_compares_them() -> None:
    rule = hookkit.rule(Mixer.mix, register=False)(forward)
    rule.backward(lambda saved, grad: {k: v / 100 for k, v in gradients(saved, grad).items()})
    module = Mixer().double()
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    result = hookkit.testing.check_rule(rule, module, x)
    assert result, str(result)


def test_check_rule_names_the_parameter_whose_gradient_is_wrong() -> None:
    rule = hookkit.rule(Mixer.mix, register=False)(forward)
    rule.backward(lambda s, g: {**{k: v / 100 for k, v in gradients(s, g).items()}, "self.weight": g * 0})
    check = hookkit.testing.run_check("output and gradients", rule, Mixer(), torch.rand(3, requires_grad=True))
    assert not check.passed and "gradient of self.weight" in check.detail
