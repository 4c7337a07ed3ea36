"""The sweep over torch's operators in short: a sample of what docs/operations.json holds is still so."""

import json
from pathlib import Path

import pytest
import sweep_operations as sweep

FOUND = json.loads((Path(__file__).parent.parent / "docs" / "operations.json").read_text())["operators"]
OPERATORS = {sweep.name_of(operator): operator for operator in sweep.op_db}
COMMON = [
    "add",
    "mul",
    "matmul",
    "softmax",
    "sum",
    "sort",
    "clamp",
    "sigmoid",
    "linalg.solve",
    "fft.rfft",
    "nonzero",
    "index_put",
]
SAMPLE = dict.fromkeys([*COMMON, *[name for name in sorted(OPERATORS) if FOUND.get(name, {}).get("hookkit")][::20]])


def state(judged):
    return judged if isinstance(judged, str) else judged[0]


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning")  # as the operators themselves say
@pytest.mark.parametrize("name", SAMPLE)
def test_an_operator_is_as_the_reference_says(name):
    found = sweep.judge_operator(OPERATORS[name], sweep.plain)
    assert {f: state(s) for f, s in FOUND[name]["hookkit"].items()} == {f: s for f, (s, _, _) in found.items()}, found


def test_no_operator_of_the_reference_is_silently_wrong_or_fails_without_a_word():
    states = {name: [state(s) for s in columns["hookkit"].values()] for name, columns in FOUND.items()}
    assert [n for n, s in states.items() if "wrong" in s or "error" in s] == ["broadcast_shapes"]


@pytest.mark.parametrize("kind", ["ties", "bounds", "zeros", "int64", "bfloat16", "promotion", "transposed"])
@pytest.mark.parametrize("name", ["add", "clamp", "max.reduction_with_dim", "nn.functional.relu"])
def test_common_operators_are_right_on_other_inputs(name, kind):
    found = sweep.judge_operator(OPERATORS[name], sweep.INPUTS[kind], ["function"])
    assert {s for s, _, _ in found.values()} == {"right"}, found
