"""What PyTorch's own tests hold custom Functions to: the table of docs/behaviours.py, every row run by each way."""

import sys
import warnings
from pathlib import Path

import pytest
import thunder
import torch

import hookkit
from hookkit.comparison import structure_of, tensors_of

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from behaviours import BEHAVIOURS


def outcome(behaviour, compiler):
    """What a program returns, and what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return behaviour.run(compiler), None
        except Exception as error:
            return None, error


def agree(found, expected):
    (got, error), (wanted, eager_error) = found, expected
    if error is not None or eager_error is not None:
        return isinstance(error, type(eager_error)) and not isinstance(error, hookkit.HookError)
    pairs = zip(tensors_of(got), tensors_of(wanted), strict=True)
    return structure_of(got) == structure_of(wanted) and all(torch.allclose(g, w, equal_nan=True) for g, w in pairs)


def check(behaviour, compiler, becomes):
    expected = outcome(behaviour, lambda program: program)
    assert behaviour.eager == ("works" if expected[1] is None else f"`{type(expected[1]).__name__}`"), expected[1]
    found = outcome(behaviour, compiler)
    if becomes == "refused":
        assert isinstance(found[1], hookkit.HookError), found
    elif becomes == "same":
        assert agree(found, expected), (found, expected)
    elif compiler is thunder.jit:  # older Dynamos leave more to eager PyTorch
        assert not agree(found, expected)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.words.replace("`", ""))
def test_a_behaviour_under_thunder_jit_is_what_the_table_says(behaviour):
    check(behaviour, thunder.jit, behaviour.jit)


@pytest.mark.long
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.words.replace("`", ""))
def test_a_behaviour_under_thunderfx_is_what_the_table_says(behaviour, request):
    if behaviour.words == "None beside a tensor" and torch.__version__.startswith("2.7."):
        why = "thunder gives the part of the graph that it leaves to Inductor inputs of another fake mode"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    torch._dynamo.reset()
    check(behaviour, thunder.dynamo.thunderfx, behaviour.fx)
