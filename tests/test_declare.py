"""Declarations: ones that are not finished, and ones that are run again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import thunder
import torch

import hookkit

MODULE = """
import hookkit
import torch


def operation(x):
    return 2 * x


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def register():
    @hookkit.rule("hookkit_declared:operation", name="published")
    def published(x):
        return 200 * x


@hookkit.rule(Function)
def by_class(x):
    return 200 * x


register()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "hookkit_declared.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = hookkit.rules()
    yield importlib.import_module("hookkit_declared")
    sys.modules.pop("hookkit_declared")
    for rule in hookkit.rules():
        if rule not in before:
            rule.unregister()


def names() -> list[str]:
    return [rule.name for rule in hookkit.rules() if rule.name in ("published", "by_class")]


def factor(function: Any) -> float:
    return thunder.jit(lambda x: function(x))(torch.ones(1)).item()


class TestRunAgain:
    def test_a_function_that_registers_may_be_called_twice(self, module: Any) -> None:
        module.register()
        assert names().count("published") == 1
        assert factor(module.operation) == 200

    def test_a_module_may_be_reloaded(self, module: Any) -> None:
        again = importlib.reload(module)
        assert sorted(names()) == ["by_class", "published"]
        assert factor(again.operation) == 200
        assert factor(again.Function.apply) == 200

    def test_a_module_that_was_edited_may_be_reloaded(self, module: Any) -> None:
        Path(module.__file__).write_text("# a line more\n" + MODULE.replace("200 * x", "300 * x"))
        again = importlib.reload(module)
        assert sorted(names()) == ["by_class", "published"]
        assert factor(again.operation) == 300

    def test_a_cell_may_be_run_again_with_other_text(self) -> None:
        namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch, "hookkit": hookkit}
        exec(compile("def f(x):\n    return 2 * x", "<ipython-input-1>", "exec"), namespace)
        cell = "@hookkit.rule(f)\ndef f_rule(x):\n    return {} * x"
        try:
            exec(compile(cell.format(30), "<ipython-input-2>", "exec"), namespace)
            exec(compile(cell.format(40), "<ipython-input-3>", "exec"), namespace)
            assert factor(namespace["f"]) == 40
            with pytest.raises(hookkit.ConflictError):
                exec(compile(cell.replace("f_rule", "other"), "<ipython-input-4>", "exec"), namespace)
        finally:
            namespace["f_rule"].unregister()

    def test_another_rule_for_the_target_is_a_conflict(self, module: Any) -> None:
        with pytest.raises(hookkit.ConflictError):

            @hookkit.rule(module.operation)
            def other(x: Any) -> Any:
                return x

    def test_the_rule_that_was_replaced_says_so(self) -> None:
        def operation(x: Any) -> Any:
            return x

        def declare() -> Any:
            return hookkit.rule(operation, mode="opaque")

        first, second = declare(), declare()
        with pytest.raises(hookkit.RegistrationError, match="declared again before"):
            first.unregister()
        second.unregister()


class TestUnfinished:
    def test_use_without_parentheses_is_refused_at_once(self) -> None:
        with pytest.raises(hookkit.RegistrationError, match=rf"{__file__}:\d+ decorates .*forgotten without a target"):

            @hookkit.rule
            def forgotten(x: Any) -> Any:
                return x

    def test_a_rule_that_is_dropped_without_a_forward_provider_warns(self) -> None:
        with pytest.warns(hookkit.RegistrationWarning, match="registers nothing") as caught:
            hookkit.rule(torch.sinc)
        assert caught[0].filename == __file__

    def test_one_that_is_kept_warns_when_a_program_is_traced(self) -> None:
        kept = hookkit.rule(torch.sinc)
        with pytest.warns(hookkit.RegistrationWarning, match="has no forward provider yet"):
            thunder.jit(lambda x: x * 2)(torch.ones(1))
        assert "without a forward provider" in repr(kept)

    @pytest.mark.parametrize("part", ["backward", "when", "meta", "unregister"])
    def test_a_part_of_one_is_refused_at_once(self, part: str) -> None:
        unfinished = hookkit.rule(torch.sinc)
        with pytest.raises(hookkit.RegistrationError, match="has no forward provider yet"):
            getattr(unfinished, part)
        with pytest.warns(hookkit.RegistrationWarning):
            del unfinished


def test_a_rule_is_like_the_function_that_it_decorates() -> None:
    def operation(x: Any) -> Any:
        return x

    @hookkit.rule(operation, register=False)
    def with_a_name(x: torch.Tensor) -> torch.Tensor:
        """What it is."""
        return 3 * x

    import inspect

    assert (with_a_name.__name__, with_a_name.__doc__) == ("with_a_name", "What it is.")
    assert str(inspect.signature(with_a_name)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"
    assert with_a_name.__wrapped__ is with_a_name.forward
    assert with_a_name(torch.ones(1)) == 3
    assert "\n" not in repr(with_a_name) and repr(with_a_name).startswith("<hookkit.Rule with_a_name: ")


class TestSelection:
    def test_by_name_pattern_and_target(self) -> None:
        assert [r.name for r in hookkit.rules("sigmoid")] == ["sigmoid"]
        assert {"clamp", "clamp_to_tensors"} <= {r.name for r in hookkit.rules("clamp*")}
        assert "sigmoid" in [r.name for r in hookkit.rules(torch.Tensor.sigmoid)]
        assert hookkit.rules("no_such_rule") == []

    @pytest.mark.parametrize("without", ["sigmoid", ["sigmoid"], ["sigm*"], [torch.sigmoid], torch.sigmoid])
    def test_rules_are_left_out_so(self, without: Any) -> None:
        with hookkit.use(without=without):
            assert hookkit.rules("sigmoid") == []
        assert hookkit.rules("sigmoid")

    def test_a_name_that_means_none_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(hookkit.RegistrationError, match="nearest: sigmoid"), hookkit.use(without=["sigmoit"]):
            pass


def test_the_public_names_are_what_dir_lists() -> None:
    assert dir(hookkit) == sorted(hookkit.__all__)
