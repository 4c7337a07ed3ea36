"""The loggers: what rules did with each call, what fell back, what is compiled again and why."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import thunder
import torch

import hookkit

FACTOR = 2


class Thirds(torch.autograd.Function):
    """Leaves PyTorch for NumPy, so that it cannot be traced."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.divide(x.detach().numpy(), 3))

    @staticmethod
    def backward(ctx, grad):
        return grad / 3


def swish(x):
    return x * torch.sigmoid(x)


@pytest.fixture
def swish_rule():
    rule = hookkit.rule(swish, name="for_vectors")(lambda x: x * torch.sigmoid(x))
    rule.when(lambda x: x.ndim == 1 or hookkit.decline("no vector"))
    return rule


def program(x):
    return swish(x) * FACTOR


PLACE = f"swish() at {__file__}:{program.__code__.co_firstlineno + 1}"


def messages(caplog, logger):
    return [r.getMessage() for r in caplog.records if r.name == f"hookkit.{logger}"]


def test_each_call_that_a_rule_takes_is_logged_and_why_others_declined(caplog, swish_rule):
    jitted = thunder.jit(program)
    with caplog.at_level(logging.INFO, "hookkit"):
        jitted(torch.ones(3))
        jitted(torch.ones(3, 3))
    assert [m for m in messages(caplog, "rules") if "swish" in m] == [f"{PLACE} is taken by for_vectors, traced"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "hookkit"):
        jitted(torch.ones(2, 2))
    assert f"{PLACE} is declined by for_vectors: no vector" in messages(caplog, "rules")
    assert f"{PLACE} is left to thunder" in messages(caplog, "rules")


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
def test_each_fallback_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, "hookkit"):
        for _ in range(2):  # a warning comes once
            thunder.jit(lambda x: Thirds.apply(x))(torch.ones(3))
    first, second = messages(caplog, "fallbacks")
    assert "Thirds() at" in first and "(rule autograd_function)" in first
    assert "cannot be traced and runs as one opaque operator: calls Tensor.numpy() at" in first and second == first
    assert any("is taken by autograd_function, opaque: calls Tensor.numpy()" in m for m in messages(caplog, "rules"))


class TestACompilationThatIsNotTheFirstSaysWhatDiffers:
    @pytest.fixture
    def again(self, caplog):
        """Calls a program, changes something, calls it again: what is logged."""

        def again(function, first, change, second):
            jitted = thunder.jit(function)
            with caplog.at_level(logging.INFO, "hookkit"):
                jitted(*first)
                assert not messages(caplog, "recompiles")
                change()
                jitted(*second)
                (message,) = messages(caplog, "recompiles")
                jitted(*second)
            assert messages(caplog, "recompiles") == [message]
            return message

        return again

    def test_a_shape(self, again):
        message = again(program, [torch.ones(3)], lambda: None, [torch.ones(4)])
        assert message.startswith(
            f"{__name__}.program ({__file__}:{program.__code__.co_firstlineno}) is compiled again"
        )
        assert "not as in compilation 0: x: expected tensor with (3,)" in message and "got (4,)" in message

    def test_a_global(self, again, monkeypatch):
        x = torch.ones(3)
        message = again(program, [x], lambda: monkeypatch.setitem(globals(), "FACTOR", 5), [x])
        assert "not as in compilation 0: FACTOR is 5 and was 2" in message

    def test_an_attribute_of_a_module(self, again):
        module, x = torch.nn.Sequential(torch.nn.Dropout(0.0)), torch.ones(3)
        assert "self.0.training is False and was True" in again(module, [x], module[0].eval, [x])

    def test_the_rules_in_force(self, again, swish_rule):
        x = torch.ones(3)
        assert "1 rule is in force no longer" in again(program, [x], swish_rule.unregister, [x])

    def test_grad_mode(self, again):
        x = torch.ones(3)
        with torch.enable_grad():
            message = again(program, [x], lambda: torch.set_grad_enabled(False), [x])
        assert "is_grad_enabled is False and was True" in message

    def test_the_number_of_arguments(self, again):
        def scaled(x, factor=1.0):
            return x * factor

        message = again(scaled, [torch.ones(3)], lambda: None, [torch.ones(3), 2.0])
        assert "it is called with 2 and not 1 positional arguments" in message


def run(setting):
    code = (
        "import hookkit, thunder, torch\n"
        "@hookkit.rule(torch.sinc)\ndef mine(input):\n    return input * 2\n"
        "jitted = thunder.jit(lambda x: torch.sinc(x))\njitted(torch.ones(2)); jitted(torch.ones(3))\n"
    )
    environment = {**os.environ, "HOOKKIT_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if line.startswith("[hookkit") or "HOOKKIT" in line]


def test_the_environment_variable_has_loggers_print():
    out, lines = run("rules, recompiles, nonsense, help")
    assert "fallbacks" in out
    assert any(line.endswith("'nonsense' is none of rules, fallbacks, recompiles, all, help") for line in lines)
    assert sum(line.startswith("[hookkit.rules] sinc() at <string>:5 is taken by mine, traced") for line in lines) == 2
    assert sum(line.startswith("[hookkit.recompiles]") for line in lines) == 1
