"""examples/: the demo runs, says what fired, and fails where the two runs differ."""

import re
import subprocess
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


def test_the_demo_agrees_with_eager_and_says_which_rules_fired():
    command = [sys.executable, EXAMPLES / "digits.py", "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the two runs agree" in section(done.stdout, "Result")
    fired = section(done.stdout, "Which rules fired where")
    trace = section(done.stdout, "The trace of one step")
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
    assert digits.main(["--steps", "3"]) == 1
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


def run_example(name: str, *arguments: str) -> str:
    """What an example prints; it has to end well."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "opaque operator" not in done.stderr  # hookkit warned
    return done.stdout


def test_the_transformer_agrees_with_eager_and_interprets_one_layer_of_each_shape():
    printed = run_example("char_transformer.py", "--steps", "2")
    assert "under thunder, and the gradients agree" in printed
    assert "9 quantised layers, 5 of them interpreted; all traced" in printed


def test_the_spiking_network_agrees_with_eager_and_interprets_a_neuron_once():
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
def test_a_recipe_of_the_cookbook_agrees_with_eager_by_its_own_rule(name):
    assert re.search(COOKBOOK[name], run_example(f"cookbook/{name}.py"), re.MULTILINE)
