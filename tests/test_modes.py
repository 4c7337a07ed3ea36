"""Modes: declared by the rule, for one Function, for what is traced in a block, or for the process."""

import warnings

import numpy as np
import pytest
import thunder
import torch
from agreement import assert_same, run

import hookkit

UNTRACEABLE = hookkit.UntraceableError


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookkit.OpaqueFallbackWarning)
        warnings.simplefilter("ignore", hookkit.MetaWarning)
        yield


def through_numpy(base=torch.autograd.Function):
    """A new Function that cannot be traced; its gradient is wrong on purpose."""

    class Sine(base):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(np.sin(x.detach().numpy()))

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 100 * grad * x.cos()

    return Sine


def doubling(base=torch.autograd.Function):
    """A new Function that can be traced; its gradient is wrong on purpose."""

    class Double(base):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    return Double


def vector():
    return torch.randn(4, requires_grad=True)


def assert_agrees(jitted, eager):
    inputs = (vector(),)
    assert_same(run(jitted, inputs), run(eager, inputs))


def outcomes(jitted):
    return [call.outcome for call in hookkit.report(jitted).calls]


def test_a_function_of_mode_trace_is_refused_where_it_cannot_be_traced():
    sine = hookkit.mode("trace")(through_numpy())
    with pytest.raises(
        UNTRACEABLE, match=r"(?s)Sine.* cannot be traced: .*Its mode is \"trace\" by hookkit.mode on .*Sine"
    ):
        thunder.jit(sine.apply)(vector())
    assert_agrees(thunder.jit(doubling().apply), doubling().apply)


def test_a_function_of_mode_trace_that_can_be_traced_is():
    double = hookkit.mode("trace")(doubling())
    jitted = thunder.jit(lambda x: double.apply(x))
    assert_agrees(jitted, double.apply)
    assert outcomes(jitted) == ["traced"]


def test_a_function_of_mode_opaque_is_not_traced():
    double = hookkit.mode("opaque")(doubling())
    jitted = thunder.jit(lambda x: double.apply(x))
    assert_agrees(jitted, double.apply)
    assert outcomes(jitted) == ["opaque"]


def test_subclasses_have_the_mode_until_they_have_one_of_their_own():
    parent = hookkit.mode("trace")(through_numpy())
    child = through_numpy(parent)
    with pytest.raises(UNTRACEABLE):
        thunder.jit(child.apply)(vector())
    hookkit.mode("auto")(child)
    assert_agrees(thunder.jit(child.apply), child.apply)


def test_a_mode_declared_later_is_in_force_in_programs_compiled_before():
    sine = through_numpy()
    jitted = thunder.jit(lambda x: sine.apply(x))
    assert_agrees(jitted, sine.apply)
    hookkit.mode("trace")(sine)
    with pytest.raises(UNTRACEABLE):
        jitted(vector())
    hookkit.mode("opaque")(sine)
    assert_agrees(jitted, sine.apply)


def test_in_a_block_of_mode_trace_nothing_falls_back():
    sine, double = through_numpy(), doubling()
    jitted = thunder.jit(lambda x: sine.apply(x))
    with hookkit.use(mode="trace"):
        with pytest.raises(UNTRACEABLE, match=r"hookkit.use\(mode=...\)"):
            jitted(vector())
        assert_agrees(thunder.jit(double.apply), double.apply)
    assert_agrees(jitted, sine.apply)


def test_in_a_block_of_mode_opaque_nothing_is_traced():
    double = doubling()
    jitted = thunder.jit(lambda x: double.apply(x))
    assert_agrees(jitted, double.apply)
    with hookkit.use(mode="opaque"):
        assert_agrees(jitted, double.apply)
        assert outcomes(jitted) == ["opaque"]
        with hookkit.use(mode="auto"):
            assert_agrees(thunder.jit(double.apply), double.apply)


def test_what_is_declared_for_a_function_wins_over_the_block():
    sine = hookkit.mode("auto")(through_numpy())
    with hookkit.use(mode="trace"):
        assert_agrees(thunder.jit(sine.apply), sine.apply)


def test_what_a_rule_says_wins_over_everything():
    double = hookkit.mode("trace")(doubling())
    with hookkit.use(hookkit.rule(double, mode="opaque", register=False), mode="trace"):
        jitted = thunder.jit(lambda x: double.apply(x))
        assert_agrees(jitted, double.apply)
    assert outcomes(jitted) == ["opaque"]


def test_the_environment_variable_is_the_mode_of_the_process(monkeypatch):
    sine = through_numpy()
    jitted = thunder.jit(lambda x: sine.apply(x))
    assert_agrees(jitted, sine.apply)
    monkeypatch.setenv("HOOKKIT_MODE", "trace")
    with pytest.raises(UNTRACEABLE, match="the environment variable HOOKKIT_MODE"):
        jitted(vector())
    with hookkit.use(mode="auto"):
        assert_agrees(jitted, sine.apply)


def test_a_residual_that_is_changed_later_is_refused_in_mode_trace():
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    kept = type(
        "Kept",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(lambda ctx, grad: 100 * grad + ctx.saved_tensors[0]),
        },
    )
    hookkit.mode("trace")(kept)

    def program(x):
        y = x * 1
        z = kept.apply(y)
        y.add_(1)
        return z

    with pytest.raises(UNTRACEABLE, match=r"(?s)Kept cannot be traced: .*in place.*hookkit.mode on Kept"):
        thunder.jit(program)(vector())


def test_programs_do_not_learn_from_one_another():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, library):
            return x * 2 if library == "torch" else torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad, None

    for library, outcome in (("numpy", "opaque"), ("torch", "traced")):
        jitted = thunder.jit(lambda x, library=library: Scaled.apply(x, library))
        assert_agrees(jitted, lambda x, library=library: Scaled.apply(x, library))
        assert outcomes(jitted) == [outcome]
    both = thunder.jit(lambda x: Scaled.apply(x, "numpy") + Scaled.apply(x, "torch"))
    both(vector())
    assert outcomes(both) == ["opaque", "traced"]


@pytest.mark.parametrize("declare", [hookkit.mode, lambda mode: hookkit.use(mode=mode).__enter__()])
def test_what_is_no_mode_is_refused(declare):
    with pytest.raises(hookkit.RegistrationError, match="mode='traced'; expected"):
        declare("traced")


def test_an_environment_variable_that_is_no_mode_is_refused(monkeypatch):
    monkeypatch.setenv("HOOKKIT_MODE", "traced")
    with pytest.raises(hookkit.RegistrationError, match="HOOKKIT_MODE='traced'; expected"):
        thunder.jit(doubling().apply)(vector())


def test_a_mode_is_for_functions_only():
    with pytest.raises(hookkit.RegistrationError, match=r"subclasses of torch.autograd.Function, got .*hookkit.rule"):
        hookkit.mode("trace")(torch.sin)
