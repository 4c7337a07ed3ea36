"""The table of the contract of torch.autograd.Function in the docs: every row is run and has the state it says."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import thunder
import torch
from agreement import assert_same, run

import hookkit

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from contract import CASES


def outcome(function, arguments):
    """What comes out of a program, or what it raises."""
    try:
        return run(function, arguments), None
    except Exception as error:
        return None, error


_RULES = ("autograd_function", "transformed")


def states_of(jitted):
    return {call.outcome for call in hookkit.report(jitted).calls if call.rule in _RULES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.point.replace("`", ""))
def test_a_point_of_the_contract_has_the_state_that_the_docs_say(case):
    program, arguments = case.make()
    check = arguments[-1] if callable(arguments[-1]) else None
    arguments = tuple(a for a in arguments if not callable(a))
    jitted = thunder.jit(copy.deepcopy(program))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, eager_error = outcome(program, arguments)
        if check is not None:
            torch.testing.assert_close(check(jitted, arguments[0]), check(program, arguments[0]))
            assert case.state == "traced"
            return
        found, error = outcome(jitted, arguments)
    if error is not None:
        if isinstance(error, hookkit.HookError):
            assert case.state == "refused", error
        else:
            assert case.state == "as eager" and type(error) is type(eager_error), error
        return
    assert eager_error is None, eager_error
    assert_same(found, expected)
    assert torch.is_grad_enabled()
    states = states_of(jitted)
    assert case.state == ("opaque" if "opaque" in states else "traced"), hookkit.report(jitted)
