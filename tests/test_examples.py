"""examples/: the demo runs, says what fired, and fails where the two runs differ."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the examples extra is not installed")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def digits(monkeypatch):
    """The demo as a module; its rule is unregistered afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    import digits

    yield digits
    digits.fused_cross_entropy.unregister()
    del sys.modules["digits"]


def section(output: str, title: str) -> str:
    """What the demo printed under the title that begins so."""
    return re.split(r"\n-+\n", output[output.index(title) :], maxsplit=2)[1]


def test_the_demo_agrees_with_eager_and_says_which_rules_fired(digits, capsys):
    assert digits.main(["--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "the two runs agree" in section(printed, "Result")
    fired = section(printed, "Which rules fired where")
    trace = section(printed, "The trace of one step")
    for name in ("Quantise", "LeanNorm", "Spike"):
        assert re.search(rf"^{name} +autograd_function .*digits\.py:\d+ +traced", fired, re.MULTILINE)
        assert f"{name}(" in trace
    assert re.search(r"^smoothed_cross_entropy +fused_cross_entropy .*digits\.py:\d+ +traced", fired, re.MULTILINE)
    assert "fused_cross_entropy(" in trace


def test_the_demo_fails_where_a_backward_is_wrong_under_thunder_only(digits, monkeypatch, capsys):
    backward, jit = digits.Spike.backward, digits.thunder.jit

    def jit_with_a_wrong_backward(model):  # the eager run is over when the demo comes here
        monkeypatch.setattr(digits.Spike, "backward", staticmethod(lambda ctx, grad: backward(ctx, 100 * grad)))
        return jit(model)

    monkeypatch.setattr(digits.thunder, "jit", jit_with_a_wrong_backward)
    assert digits.main(["--steps", "2"]) == 1
    result = section(capsys.readouterr().out, "Result")
    assert "inner.weight differs" in result
    assert "agree" not in result


def test_compare_finds_nothing_between_equal_runs(digits):
    run = digits.Run([2.0, 1.0], {"weight": torch.ones(3)})
    assert digits.compare(run, run) == []


@pytest.mark.parametrize("value", [1 + 1e-6, float("nan")])
def test_compare_names_the_parameter_that_differs(digits, value):
    eager = digits.Run([2.0, 1.0], {"weight": torch.ones(3, dtype=torch.float64), "bias": torch.zeros(2)})
    compiled = digits.Run([2.0, 1.0], {**eager.parameters, "weight": torch.tensor([1, 1, value], dtype=torch.float64)})
    (difference,) = digits.compare(eager, compiled)
    assert difference.startswith("weight differs by")


def test_compare_finds_a_differing_loss(digits):
    parameters = {"weight": torch.ones(3)}
    (difference,) = digits.compare(digits.Run([2.0, 1.0], parameters), digits.Run([2.0, 1.1], parameters))
    assert difference == "loss differs by 0.1"


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Runs an example as a program, and returns what it prints; a warning of hookkit's is an error here."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code, capsys.readouterr()
        return capsys.readouterr().out

    return run


@pytest.mark.long
def test_the_transformer_agrees_with_eager_and_interprets_one_layer_of_each_shape(run_example):
    printed = run_example("char_transformer.py", "--steps", "2")
    assert "under thunder, and the gradients agree" in printed
    assert "9 quantised layers, 5 of them interpreted; all traced" in printed


@pytest.mark.long
def test_the_spiking_network_agrees_with_eager_and_interprets_a_neuron_once(run_example):
    printed = run_example("spiking.py", "--steps", "2")
    assert "20 spikes in one program, 2 of them interpreted" in printed


COOKBOOK = {
    "attention_by_name": r"^attention +attention_rule .* traced",
    "fused_cross_entropy": r"^cross_entropy +fused_cross_entropy .* traced",
    "matrix_exponential": r"^expm +expm_rule .* opaque",
    "rfft": r"^\w+ +rfft .* opaque",
    "ste_quantiser": r"^quantise +quantise_rule .* traced",
    "triton_kernel": r"^swish_and_keep_gradient +lean_rule .* opaque",
}


def test_every_recipe_of_the_cookbook_is_tested():
    assert {path.stem for path in (EXAMPLES / "cookbook").glob("*.py")} == set(COOKBOOK)


@pytest.mark.parametrize("name", sorted(COOKBOOK))
def test_a_recipe_of_the_cookbook_agrees_with_eager_by_its_own_rule(name, run_example):
    assert re.search(COOKBOOK[name], run_example(f"cookbook/{name}.py"), re.MULTILINE)
