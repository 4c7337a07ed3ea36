"""What providers return and take, refused in words that lead to the provider's line."""

from __future__ import annotations

from typing import Any

import pytest
import thunder
import torch

import hookkit


def pair(x: Any) -> Any:
    return 2 * x, 3 * x


def double(x: Any) -> Any:
    return 2 * x


LINE = rf"{__file__}:\d+"


def run(target: Any, forward: Any, backward: Any, mode: Any = "auto") -> Any:
    rule = hookkit.rule(target, register=False, mode=mode)(forward)
    if backward is not None:
        rule.backward(backward)
    with hookkit.use(rule):
        x = torch.ones(3, requires_grad=True)
        out = thunder.jit(lambda x: target(x))(x)
        sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    return x.grad


@pytest.mark.parametrize("mode", ["auto", "opaque"])
@pytest.mark.parametrize(
    ("target", "forward", "backward", "said"),
    [
        (pair, lambda x: (2 * x, 3 * x, hookkit.save(x=x)), lambda s, g, h: {"x": g}, "wrong place"),
        (pair, lambda x: [2 * x, hookkit.save(x=x)], lambda s, g, h: {"x": g}, "wrong place"),
        (pair, lambda x: hookkit.save(x=x), lambda s, g, h: {"x": g}, "without an output"),
        (double, lambda x: (2 * x, hookkit.save(x=x)), None, "no backward provider that would read it"),
        (double, lambda x: (2 * x, (x,)), lambda s, g: {"x": g}, "returned a tuple beside its output"),
        (double, lambda x: None, lambda s, g: {"x": g}, "return statement missing"),
    ],
)
def test_save_in_the_wrong_place_is_refused_at_the_rules_line(
    target: Any, forward: Any, backward: Any, said: str, mode: Any
) -> None:
    with pytest.raises(hookkit.HookError, match=rf"forward provider of the rule .* \({LINE}\).*{said}"):
        run(target, forward, backward, mode)


@pytest.mark.parametrize("mode", ["auto", "opaque"])
@pytest.mark.parametrize(
    ("target", "backward", "said"),
    [
        (double, lambda s, g: None, "return statement missing"),
        (double, lambda s, g, h: {"x": g}, r"takes \(s, g, h\).*declare it as \(saved, grad\)"),
        (pair, lambda s, g: {"x": g}, r"takes \(s, g\).*declare it as \(saved, grad0, grad1\)"),
        (double, lambda s, g: {"x": g.to(torch.int64)}, "dtype torch.int64"),
        (double, lambda s, g: {"x": g[:2]}, "shape"),
        (double, lambda s, g: {"y": g}, "'y', which is no argument"),
        (double, lambda s, g: {"x": 3.0}, "expected a tensor or None"),
    ],
)
def test_a_wrong_backward_is_refused_at_its_line(target: Any, backward: Any, said: str, mode: Any) -> None:
    with pytest.raises(hookkit.GradientError, match=rf"backward provider of the rule .* \({LINE}\).*{said}"):
        run(target, lambda x: (target(x), hookkit.save()), backward, mode)


def test_residuals_that_are_unpacked_say_how_they_are_read() -> None:
    with pytest.raises(hookkit.HookError, match=r"read by name.*kept is x"):
        _ = [*hookkit.save(x=1)]


@pytest.mark.parametrize("forward", [lambda: 1, lambda x, y: 1, lambda x, *, flag: 1])
def test_too_many_or_too_few_parameters_are_refused_where_the_rule_is_declared(forward: Any) -> None:
    with pytest.raises(hookkit.RegistrationError, match="cannot take the arguments"):
        hookkit.rule(double, register=False)(forward)


@pytest.mark.parametrize(("target", "forward"), [(torch.exp, lambda: 1), (torch.exp, lambda a, b, c: 1)])
def test_the_same_for_functions_of_torch_that_are_written_in_c(target: Any, forward: Any) -> None:
    with pytest.raises(hookkit.RegistrationError, match="cannot take the arguments"):
        hookkit.rule(target, register=False)(forward)


@pytest.mark.parametrize("backward", [lambda: 1, lambda saved: 1, lambda saved, grad, *, scale: 1])
def test_a_backward_that_nothing_could_call_is_refused_where_it_is_declared(backward: Any) -> None:
    rule = hookkit.rule(double, register=False)(lambda x: 2 * x)
    with pytest.raises(hookkit.RegistrationError, match="backward provider of the rule"):
        rule.backward(backward)


def test_a_meta_function_that_is_wrong_is_named_with_its_line() -> None:
    rule = hookkit.rule(double, register=False, mode="opaque")
    rule.meta(lambda x: x.new_empty(7))
    with hookkit.use(rule), pytest.raises(hookkit.MetaError, match=rf"correct the meta function of .* \({LINE}\)"):
        thunder.jit(lambda x: double(x))(torch.ones(3))
