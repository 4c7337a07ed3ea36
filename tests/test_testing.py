"""hookkit.testing: its checks hold for what is right, and each fails on its own."""

import os
import re
from pathlib import Path

import pytest
import torch
from thunder.dynamo import thunderfx
from torch.autograd.function import once_differentiable

import hookkit
import hookkit.testing


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x**3 * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return 3 * g * x * x * y + h, g * x**3 + h


class WrongCube(Cube):
    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return 300 * g * x * x * y + h, g * x**3 + h


@pytest.fixture
def only(monkeypatch):
    """Leaves some of the checks; they are independent of each other, and a compilation each, or more."""

    def leave(*names):
        monkeypatch.setattr(hookkit.testing, "CHECKS", {name: hookkit.testing.CHECKS[name] for name in names})

    return leave


def inputs():
    return tuple(torch.rand(3, dtype=torch.float64).add(0.5).requires_grad_() for _ in range(2))


def test_a_right_function_passes_every_check():
    result = hookkit.testing.check_rule(Cube, *inputs())
    assert result, str(result)
    assert {c.name for c in result.checks if c.passed} >= {"output and gradients", "finite differences", "opaque"}


class Constant(Cube):
    """Eager PyTorch takes a part of its gradient for a constant."""

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return 3 * g * (x * x).detach() * y + h, g * x**3 + h


class Once(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, g, h):
        return Cube.backward(ctx, g, h)


@pytest.mark.parametrize(
    ("function", "passed", "said"),
    [
        (Cube, True, ""),
        (WrongCube, True, ""),  # its second derivative is that of its gradient
        (Constant, False, "Jacobian mismatch"),
        (Once, None, "there is none: trying to differentiate twice"),
    ],
)
def test_the_second_derivative_is_that_of_the_gradient(function, passed, said):
    check = hookkit.testing.run_check("second derivative", function, *inputs())
    assert check.passed is passed
    assert check.detail.startswith(said)


def test_a_wrong_gradient_fails_the_finite_differences_alone():
    result = hookkit.testing.check_rule(WrongCube, *inputs())
    assert [c.name for c in result.checks if c.passed is False] == ["finite differences"]
    assert "finite differences" in str(result)


def test_outputs_that_are_not_differentiable_have_no_finite_differences(only):
    only("output and gradients", "finite differences", "second derivative", "each output alone")

    class Positive(Cube):
        @staticmethod
        def forward(ctx, x, y):
            positive = x > 0
            ctx.save_for_backward(x, y)
            ctx.mark_non_differentiable(positive)
            return x**3 * y, positive

        @staticmethod
        def backward(ctx, g, _):
            x, y = ctx.saved_tensors
            return 3 * g * x * x * y, g * x**3

    result = hookkit.testing.check_rule(Positive, *inputs())
    assert result, str(result)
    assert "finite differences" in {c.name for c in result.checks if c.passed}


def softplus(x):
    return torch.log1p(torch.exp(x))


def test_a_rule_whose_gradient_is_not_the_callables_fails(only):
    only("output and gradients")

    @hookkit.rule(softplus)
    def wrong(x):
        return torch.log1p(torch.exp(x)), hookkit.save(x=x)

    @wrong.backward
    def _(saved, grad):
        return {"x": 100 * grad * torch.sigmoid(saved.x)}

    result = hookkit.testing.check_rule(wrong, torch.randn(3, requires_grad=True))
    assert not result
    assert "gradient of x" in str(result)


def test_a_rule_that_agrees_with_the_callable_passes():
    @hookkit.rule(softplus)
    def right(x):
        return torch.log1p(torch.exp(x)), hookkit.save(x=x)

    @right.backward
    def _(saved, grad):
        return {"x": grad * torch.sigmoid(saved.x)}

    result = hookkit.testing.check_rule(right, torch.randn(3, requires_grad=True))
    assert result, str(result)


def test_a_meta_function_that_disagrees_fails_its_check(only):
    only("inputs that require grad", "meta function")

    @hookkit.rule(softplus, mode="opaque")
    def shaped(x):
        return torch.log1p(torch.exp(x)), hookkit.save(x=x)

    @shaped.meta
    def _(x):
        return x.new_empty(7)

    @shaped.backward
    def _(saved, grad):
        return {"x": grad * torch.sigmoid(saved.x)}

    result = hookkit.testing.check_rule(shaped, torch.randn(3, requires_grad=True))
    assert "meta function" in [c.name for c in result.checks if c.passed is False]


def test_assert_same_says_where_programs_differ():
    with pytest.raises(AssertionError, match="output"):
        hookkit.testing.assert_same(torch.sin, torch.randn(3), reference=torch.cos)


def test_what_cannot_be_called_is_refused():
    predicate = hookkit.rule(hookkit.where(lambda call: False), mode="opaque", register=False)
    with pytest.raises(hookkit.HookError, match="check_rule takes"):
        hookkit.testing.check_rule(predicate, torch.ones(3))


def test_arguments_that_need_no_gradient_do_not_pass_for_a_test_of_the_backward(only):
    only("inputs that require grad", "output and gradients", "finite differences")
    result = hookkit.testing.check_rule(WrongCube, *(t.detach() for t in inputs()))
    assert [c.name for c in result.checks if c.passed is False] == ["inputs that require grad"]


def test_what_has_no_gradient_needs_no_input_that_requires_grad(only):
    only("inputs that require grad", "output and gradients", "no_grad")
    rule = hookkit.rule(torch.sign, mode="opaque", register=False)
    assert hookkit.testing.check_rule(hookkit.rule(torch.isnan, mode="opaque", register=False), torch.randn(3))
    assert not hookkit.testing.check_rule(rule, torch.randn(3))


RULE_TESTS = """
import hookkit
import pytest
import torch


def double(x):
    return x * 2


@hookkit.rule(double, register=False)
def right(x):
    return x * 2, hookkit.save()


@hookkit.rule(double, register=False)
def wrong(x):
    return x * 2, hookkit.save()


right.backward(lambda saved, gradient: {"x": gradient * 2})
wrong.backward(lambda saved, gradient: {"x": gradient * 3})
x = torch.ones(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.check_rule(right, x)
def test_right(): ...


@pytest.mark.check_rule(wrong, x=x)
def test_wrong(): ...


def test_of_another_kind():
    assert double(1) == 2
"""


def test_the_marker_makes_a_test_for_each_check(pytester, only):
    only("output and gradients", "meta function", "finite differences", "a call that cannot be bound")
    pytester.makeconftest('pytest_plugins = ["hookkit.pytest_plugin"]')
    pytester.makepyfile(RULE_TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "-rs")
    result.stdout.fnmatch_lines_random(
        [
            "*::test_right[[]output and gradients] PASSED*",
            "*::test_right[[]meta function] SKIPPED*",
            "SKIPPED*: there is none",
            "*::test_wrong[[]finite differences] FAILED*",
            "finite differences: Jacobian mismatch*",
            "*::test_wrong[[]a call that cannot be bound] PASSED*",
            "*::test_of_another_kind PASSED*",
        ]
    )
    result.assert_outcomes(passed=5, skipped=2, failed=2)


def test_pytest_loads_the_plugin_by_itself_also_where_a_conftest_names_it(pytester, monkeypatch):
    root = Path(hookkit.__file__).parent.parent
    declared = re.search(r"^\[project.entry-points.pytest11\]\n(.+)", (root / "pyproject.toml").read_text(), re.M)
    metadata = pytester.mkdir("installed") / "hookkit_under_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hookkit-under-test\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\n" + declared[1].replace('"', "") + "\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(metadata.parent), str(root)]))
    pytester.makepyfile(
        test_other="import sys\ndef test_other():\n    assert 'torch' not in sys.modules",
        test_rules=RULE_TESTS,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "other or differences", "test_other.py")
    result.assert_outcomes(passed=1)
    pytester.makeconftest('pytest_plugins = ["hookkit.pytest_plugin"]')
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "differences")
    result.assert_outcomes(passed=1, failed=1, deselected=2 * len(hookkit.testing.CHECKS))


def test_a_modules_parameters_are_compared_under_any_compiler():
    module = torch.nn.Linear(3, 2)
    hookkit.testing.assert_same(module, torch.randn(4, 3), jit=thunderfx)

    def doubled(function):
        return lambda x: function(x) + (function.bias - function.bias.detach())

    with pytest.raises(AssertionError, match=r"gradient of module\.bias"):
        hookkit.testing.assert_same(module, torch.randn(4, 3), jit=doubled)


def scaled(x, scale):
    return scale * torch.tanh(x)


def scaled_rule(gradient, forward=None, **options):
    """A rule for `scaled` with a gradient that may be wrong."""
    made = hookkit.rule(scaled, register=False, name="scaled_rule", **options)(
        forward or (lambda x, scale: (scale * torch.tanh(x), hookkit.save(x=x, scale=scale)))
    )
    made.backward(gradient)
    return made


def right_gradient(saved, grad):
    return {"x": grad * saved.scale * (1 - torch.tanh(saved.x) ** 2)}


def check_scaled(rule):
    return hookkit.testing.check_rule(rule, torch.rand(3, dtype=torch.float64, requires_grad=True), 2.0)


class TestThatARuleTakesTheCall:
    @pytest.fixture(autouse=True)
    def checks(self, only):
        only("the rule takes the call", "output and gradients")

    def test_one_that_does_passes(self):
        result = check_scaled(scaled_rule(right_gradient))
        assert result and str(result).startswith("check of scaled_rule: ok"), str(result)

    def test_one_that_declines_fails_with_its_reason(self):
        rule = scaled_rule(right_gradient)
        rule.when(lambda x, scale: hookkit.decline("x is no matrix"))
        result = check_scaled(rule)
        assert not result
        assert "FAILED: the rule takes the call: the rule declined scaled() for these arguments: x is no matrix" in str(
            result
        )

    def test_one_that_comes_second_fails_with_the_one_that_comes_first(self):
        first = hookkit.rule(scaled, name="first", priority=5)(lambda x, scale: scale * torch.tanh(x))
        second = hookkit.rule(scaled, name="second")(lambda x, scale: scale * torch.tanh(x))
        try:
            result = hookkit.testing.check_rule(second, torch.rand(3, requires_grad=True), 2.0)
        finally:
            first.unregister()
            second.unregister()
        assert not result
        assert "the rule first, declared at" in result.diagnosis and "priority 5" in result.diagnosis


class TestNumbersThatAreBakedIn:
    @pytest.fixture(autouse=True)
    def checks(self, only):
        only("the rule takes the call", "output and gradients", "other values", "other numbers", "finite differences")

    @pytest.mark.parametrize("scale", [2.0, 2])
    def test_a_number_that_the_forward_ignores_is_found(self, scale):
        rule = hookkit.rule(scaled, register=False)(lambda x, scale: 2.0 * torch.tanh(x))
        result = hookkit.testing.check_rule(rule, torch.rand(3, requires_grad=True), scale)
        assert [c.name for c in result.checks if c.passed is False] == ["other numbers"]
        assert "for scale=" in result.diagnosis

    def test_a_number_that_the_backward_ignores_is_found(self):
        result = check_scaled(scaled_rule(lambda saved, grad: {"x": 2.0 * grad * (1 - torch.tanh(saved.x) ** 2)}))
        assert [c.name for c in result.checks if c.passed is False] == ["other numbers"]
        assert "gradient of x" in result.diagnosis

    def test_a_number_in_a_list_is_varied(self):
        def weighted(x, weights):
            return x * weights[0] + weights[1]

        rule = hookkit.rule(weighted, register=False)(lambda x, weights: x * weights[0] + 3.0)
        result = hookkit.testing.check_rule(rule, torch.rand(3, requires_grad=True), [2.0, 3.0])
        assert "for weights[1]=" in result.diagnosis


class TestTheDiagnosis:
    @pytest.fixture(autouse=True)
    def checks(self, only):
        only("the rule takes the call", "output and gradients", "other numbers", "finite differences")

    @pytest.mark.parametrize(
        ("gradient", "said"),
        [
            (lambda s, g: {"x": 3 * right_gradient(s, g)["x"]}, "gradient of 'x' is wrong, 3 times the right one"),
            (lambda s, g: {"x": s.scale * (1 - torch.tanh(s.x) ** 2)}, "does not scale with the output gradient"),
            (lambda s, g: {}, "returns no entry for 'x'"),
            (lambda s, g: None, "is its return statement missing?"),
            (lambda s, g: {"x": g * s.x}, "finite differences"),
        ],
    )
    def test_it_says_what_is_wrong_with_the_backward(self, gradient, said):
        result = check_scaled(scaled_rule(gradient))
        assert not result and said in result.diagnosis, str(result)

    def test_it_names_the_argument_in_a_list(self):
        def total(xs):
            return xs[0] * 2 + xs[1] * 3

        @hookkit.rule(total, register=False)
        def rule(xs):
            return xs[0] * 2 + xs[1] * 3, hookkit.save()

        @rule.backward
        def _(saved, grad):
            return {"xs": [2 * grad, 300 * grad]}

        xs = [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        result = hookkit.testing.check_rule(rule, xs)
        assert not result
        assert "gradient of 'xs[1]' is wrong, 100 times the right one" in result.diagnosis
