"""hookkit.rule: how rules are declared, and what is refused at the declaration."""

import math
import re
import sys

import pytest
import thunder
import torch
from agreement import assert_agrees

import hookkit


class Scale(torch.autograd.Function):
    """Twice the input, with a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def scale(x, factor=2.0):
    return x * factor


class ScaleByFactor(torch.autograd.Function):
    """What the rules for ``scale`` in these tests do."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * 100, None


@pytest.fixture
def x():
    return torch.randn(3, requires_grad=True)


def declare_scale(**options):
    @hookkit.rule(scale, **options)
    def scaled(x, factor=2.0):
        return x * factor, hookkit.save(factor=factor)

    @scaled.backward
    def _(saved, grad):
        return {"x": grad * saved.factor * 100}

    return scaled


@pytest.mark.parametrize("mode", ["auto", "trace", "opaque"])
def test_forward_and_backward_provider_stand_for_the_target(mode, x):
    declare_scale(mode=mode)
    assert_agrees(lambda x: scale(x, 3.0), x, eager=lambda x: ScaleByFactor.apply(x, 3.0))


def test_a_rule_without_a_backward_provider_leaves_the_gradient_to_thunder(x):
    @hookkit.rule(scale)
    def scaled(x, factor=2.0):
        return x * factor * 100

    assert_agrees(lambda x: scale(x), x, eager=lambda x: x * 200)


def test_the_decorated_name_is_the_rule_and_still_callable():
    scaled = declare_scale()
    assert isinstance(scaled, hookkit.Rule)
    output, saved = scaled(torch.ones(2), factor=5.0)
    assert output.tolist() == [5, 5]
    assert saved.factor == 5.0


def test_a_rule_is_named_after_its_provider_or_else_its_target():
    assert declare_scale().name == "scaled"

    @hookkit.rule(torch.cos)
    def _(x):
        return x

    assert hookkit.rules()[-1].name == "cos"
    assert hookkit.rule(torch.tan)(lambda x: x).name == "tan"
    assert hookkit.rule(torch.sin, name="sine")(lambda x: x).name == "sine"
    assert hookkit.rule("there.is.no:such.function", mode="opaque").name == "function"


def test_a_rule_prints_its_target_and_where_it_was_declared():
    scaled = declare_scale(priority=3)
    line = declare_scale.__code__.co_firstlineno + 1
    assert str(scaled) == (f"scaled: {__name__}.scale (mode auto, priority 3, declared at {__file__}:{line})")


class TestAnOpaqueRuleAsAStatement:
    def test_the_callee_runs_itself_under_pytorchs_autograd(self, x):
        rule = hookkit.rule(Scale, mode="opaque")
        assert rule in hookkit.rules()
        assert rule.forward is None
        assert rule.opaque_callee
        jitted = assert_agrees(lambda x: Scale.apply(x), x)
        (call,) = hookkit.report(jitted).calls
        assert (call.rule, call.outcome) == ("Scale", "opaque")

    def test_it_says_where_it_stands(self):
        rule = hookkit.rule(Scale, mode="opaque")
        assert rule.declared_at.file == __file__
        assert rule.declared_at.line == sys._getframe().f_lineno - 2

    def test_it_takes_a_meta_function_and_a_condition(self, x):
        asked = []
        rule = hookkit.rule(Scale, mode="opaque")

        @rule.meta
        def _(x):
            asked.append(tuple(x.shape))
            return torch.empty_like(x)

        @rule.when
        def _(x):
            return x.ndim == 1

        jitted = assert_agrees(lambda x: Scale.apply(x) + Scale.apply(x[None])[0], x)
        assert set(asked) == {(3,)}
        assert [c.rule for c in hookkit.report(jitted).calls] == ["Scale", "autograd_function"]

    def test_it_decorates_its_forward_provider(self, x):
        @hookkit.rule(Scale, mode="opaque")
        def seven(x):
            return x * 7, hookkit.save()

        @seven.backward
        def _(saved, grad):
            return {"x": grad * 700}

        assert seven.name == "seven"
        assert not seven.opaque_callee

        class Seven(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 7

            @staticmethod
            def backward(ctx, grad):
                return grad * 700

        assert_agrees(lambda x: Scale.apply(x), x, eager=lambda x: Seven.apply(x))

    def test_calling_it_with_anything_but_a_provider_is_refused(self):
        rule = hookkit.rule(Scale, mode="opaque")
        with pytest.raises(hookkit.RegistrationError, match="has no forward provider to call: its target runs itself"):
            rule(torch.ones(2))

    def test_a_forward_provider_after_the_meta_function_is_refused(self):
        rule = hookkit.rule(Scale, mode="opaque")
        rule.meta(lambda x: x)
        with pytest.raises(hookkit.RegistrationError, match="Decorate one before anything else"):
            rule(lambda x: x)

    def test_a_backward_provider_without_a_forward_provider_is_refused(self):
        rule = hookkit.rule(Scale, mode="opaque")
        with pytest.raises(hookkit.RegistrationError, match="a backward provider needs a forward provider"):
            rule.backward(lambda saved, grad: None)

    def test_a_forward_provider_that_does_not_fit_leaves_the_rule_as_it_was(self):
        rule = hookkit.rule(Scale, mode="opaque")
        with pytest.raises(hookkit.RegistrationError, match="cannot take the arguments of its target"):
            rule(lambda: None)
        assert rule.forward is None


class TestSignatures:
    """A provider takes the target's arguments; otherwise both signatures are shown, side by side."""

    @pytest.mark.parametrize(
        ("target", "provider", "why"),
        [
            (scale, lambda x: x, "it has no place for the positional argument 'factor'"),
            (scale, lambda y, factor=1: y, "argument 0 is called 'y', in the target 'x'"),
            (scale, lambda x, /, factor=1: x, "the argument 'x' cannot be given by name"),
            (scale, lambda x, factor, more: x, "the target never gives 'more'"),
            (scale, lambda x, factor, *, more: x, "the target never gives 'more'"),
            (scale, lambda x, factor: x, "it has no default for 'factor'; the target's is 2.0"),
            (scale, lambda x, factor=3.0: x, "its default is 3.0 for 'factor'; the target's is 2.0"),
            (lambda x, *, flag=1: x, lambda x, *, flag=True: x, "its default is True for 'flag'; the target's is 1"),
            (Scale, lambda: None, "it has no place for the positional argument 'x'"),
            (lambda *args: None, lambda x: x, "it has no place for *args"),
            (lambda x, **options: None, lambda x: x, "it has no place for **options"),
            (lambda x, *, beta: None, lambda x: x, "it has no place for the keyword argument 'beta'"),
            (torch.ops.aten.sin.default, lambda: None, None),
        ],
    )
    def test_a_provider_that_cannot_take_the_targets_arguments_is_refused(self, target, provider, why):
        if why is None:  # one overload of several: only its own signature would count
            hookkit.rule(target)(provider)
            return
        with pytest.raises(hookkit.RegistrationError) as caught:
            hookkit.rule(target)(provider)
        message = str(caught.value)
        assert f"cannot take the arguments of its target: {why}" in message
        assert re.search(r"\n  target    .*\(.*\)\n  provider  .*\(.*\), declared at .*test_rule.py:\d+$", message)

    @pytest.mark.parametrize(
        ("target", "provider"),
        [
            (scale, lambda *args, **kwargs: None),
            (scale, lambda x, *rest, **kwargs: None),
            (scale, lambda x, factor=2.0, extra=None: None),
            (Scale, lambda x: x),
            (math.sqrt, lambda number: number),
            (lambda x, like=torch.Tensor: x, lambda x, like=None: x),
            (torch.sin, lambda anything: anything),
            (lambda *args, **kwargs: None, lambda x: x),
        ],
    )
    def test_a_provider_that_can_is_accepted(self, target, provider):
        assert hookkit.rule(target)(provider) in hookkit.rules()

    def test_the_call_before_the_arguments_does_not_count(self):
        @hookkit.rule(scale, pass_call=True)
        def _(call, x, factor=2.0):
            return x

    @pytest.mark.parametrize("kind", ["meta", "when"])
    def test_meta_functions_and_conditions_are_compared_too(self, kind):
        with pytest.raises(hookkit.RegistrationError, match="no place for the positional argument 'factor'"):
            getattr(declare_scale(), kind)(lambda x: x)

    def test_a_backward_provider_takes_residuals_and_gradients(self):
        @hookkit.rule(scale)
        def scaled(x, factor=2.0):
            return x, hookkit.save()

        with pytest.raises(hookkit.RegistrationError, match=r"say \(saved, grad\)"):
            scaled.backward(lambda grad: grad)


@pytest.mark.parametrize("kind", ["backward", "meta", "when"])
def test_a_second_provider_of_a_kind_is_refused_with_both_places(kind):
    scaled = declare_scale()

    def provider(x, factor=2.0):
        return x

    if kind != "backward":
        getattr(scaled, kind)(provider)
    with pytest.raises(hookkit.RegistrationError, match=f"has a {kind} provider already") as caught:
        getattr(scaled, kind)(provider)
    assert str(caught.value).count(f"declared at {__file__}:") == 2


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: hookkit.rule(scale, mode="inline")(scale).backward(lambda saved, grad: grad), 'mode="inline"'),
        (lambda: hookkit.rule(scale, mode="fast"), "expected one of auto, trace, opaque, region, inline"),
        (lambda: hookkit.rule(scale, track="all"), 'expected "tree" or "positional"'),
        (lambda: hookkit.rule(scale, priority="high"), "priority='high'; expected an int"),
        (lambda: hookkit.rule([]), "the list of targets is empty"),
        (lambda: hookkit.rule(scale)(3), "decorates a function, got 3"),
        (lambda: hookkit.rule(scale)(declare_scale()), "decorates a function, got <hookkit.Rule"),
        (lambda: hookkit.rule(scale)(None), 'needs a forward provider; only mode="opaque"'),
        (lambda: declare_scale().when(3), "takes a function, got 3"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, message):
    with pytest.raises(hookkit.RegistrationError, match=re.escape(message)):
        declare()


def test_a_condition_that_raises_is_named_with_the_call(x):
    scaled = declare_scale()

    @scaled.when
    def _(x, factor=2.0):
        return x.colour

    with pytest.raises(hookkit.HookError, match=r"condition .* of the rule scaled, declared at .* raised") as caught:
        thunder.jit(lambda x: scale(x))(x)
    assert f"when it was asked about scale() at {__file__}:" in str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "opaque"])
def test_a_call_that_cannot_be_bound_is_a_type_error_whatever_the_rule_has(x, mode):
    @hookkit.rule(scale, mode=mode)
    def scaled(x, factor=2.0):
        return x * factor

    scaled.meta(lambda x, factor=2.0: torch.empty_like(x))
    for declare in (lambda: None, lambda: scaled.when(lambda x, factor=2.0: True)):
        declare()
        for program in (lambda x: scale(x, 1.0, 2.0), lambda x: scale(x, no_such=1), lambda x: scale()):
            with pytest.raises(TypeError, match="scale"):
                thunder.jit(program)(x)


def test_a_provider_declared_after_the_first_compilation_is_seen_by_the_next_call(x):
    @hookkit.rule(scale)
    def scaled(x, factor=2.0):
        return x * factor

    jitted = thunder.jit(lambda x: scale(x))
    assert torch.equal(torch.autograd.grad(jitted(x).sum(), x)[0], torch.full((3,), 2.0))
    scaled.backward(lambda saved, grad: {"x": grad * 200})
    assert torch.equal(torch.autograd.grad(jitted(x).sum(), x)[0], torch.full((3,), 200.0))


def test_a_rule_for_a_function_that_ran_opaque_before_is_traced(x):
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 100

    jitted = thunder.jit(lambda x: Recorded.apply(x))
    with pytest.warns(hookkit.MetaWarning), pytest.warns(hookkit.OpaqueFallbackWarning):
        jitted(x)
    assert [c.outcome for c in hookkit.report(jitted).calls] == ["opaque"]
    hookkit.rule(Recorded)(lambda x: x * 2)
    jitted(x)
    assert [c.outcome for c in hookkit.report(jitted).calls] == ["traced"]


def test_a_provider_for_a_function_that_changes_python_state_is_opaque(x):
    calls = []

    @hookkit.rule(Scale)
    def scaled(x):
        calls.append(1)
        return x * len(calls)

    with pytest.warns(hookkit.OpaqueFallbackWarning, match="it changes Python state"):
        jitted = thunder.jit(lambda x: Scale.apply(Scale.apply(x)))
        jitted(x)
    calls.clear()
    assert torch.equal(jitted(x), x * 1 * 2)


def test_the_gradient_of_an_opaque_call_that_nothing_used_is_zero_where_thunder_goes_on_computing(x):
    squared = hookkit.rule(scale, mode="opaque")(lambda x, factor=2.0: (x.square(), hookkit.save(x=x)))
    squared.backward(lambda saved, grad: {"x": 200 * saved.x * grad})
    jitted = thunder.jit(lambda x: (scale(x.sin()), scale(x), x * 3))
    _, second, third = jitted(x)
    assert torch.equal(torch.autograd.grad(third.sum(), x, retain_graph=True)[0], torch.full((3,), 3.0))
    torch.testing.assert_close(torch.autograd.grad(second.sum(), x)[0], 200 * x)
