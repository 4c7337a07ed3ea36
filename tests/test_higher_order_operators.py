"""The table of higher-order operators in the docs: every program is run and has the state that the table says."""

import importlib
import pkgutil
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import thunder
import torch
from agreement import assert_agrees, assert_same
from thunder.dynamo import thunderfx

import hookkit
from hookkit.comparison import observe

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from higher_order_operators import CASES, INTERNAL, OTHERS

PROGRAMS = [case for case in CASES if case.exists]


def name(case):
    return f"{case.operator}: {case.point.replace('`', '')}"


def outcome(function, arguments, program):
    """What a program gives, run as it is or compiled; or what it raises."""
    try:
        return observe(function, arguments, module=program), None
    except Exception as error:
        return None, error


def both(case, compiler):
    """What comes out of a case's program compiled and in eager PyTorch, and the compiled program."""
    program, arguments = case.make()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(program, arguments, program)
        torch._dynamo.reset()
        compiled = compiler(program)
        return outcome(compiled, arguments, program), expected, compiled


def assert_right(found, expected, refused):
    """Compares what came out, unless the compiled program is refused."""
    (result, error), (wanted, eager_error) = found, expected
    if eager_error is not None:  # an operator that this PyTorch cannot run, or not differentiate
        assert error is not None
    elif refused:
        assert isinstance(error, hookkit.HookError | torch._dynamo.exc.TorchDynamoException), error
    else:
        assert error is None, error
        assert_same(result, wanted)
    return eager_error is None and not refused


def dynamo_fails(case):
    """Whether this PyTorch's ``torch.compile`` fails, whatever the backend would make of the graph."""
    (_, error), _, _ = both(case, lambda program: torch.compile(program, backend="eager"))
    return error is not None


@pytest.mark.parametrize("case", PROGRAMS, ids=name)
def test_a_program_has_the_state_that_the_table_says_under_thunder_jit(case):
    found, expected, jitted = both(case, thunder.jit)
    if assert_right(found, expected, case.jit == "refused"):
        outcomes = {call.outcome for call in hookkit.report(jitted).calls}
        assert case.jit == ("opaque" if "opaque" in outcomes else "traced"), hookkit.report(jitted)


@pytest.mark.parametrize("case", [case for case in PROGRAMS if case.fx != "on a GPU"], ids=name)
def test_a_program_has_the_state_that_the_table_says_through_thunderfx(case):
    found, expected, compiled = both(case, thunderfx)
    if found[1] is not None and dynamo_fails(case):
        return
    if not assert_right(found, expected, case.fx == "refused"):
        return
    if not compiled._backend.subgraph_infos and case.fx == "PyTorch":  # Dynamo, or hookkit, took none of it
        return
    report = hookkit.report(compiled)
    outcomes = {call.outcome for call in report.calls}
    if any(graph.reasons for graph in report.graphs) and "opaque" not in outcomes:
        assert case.fx == "PyTorch", report
    else:
        assert case.fx == ("opaque" if "opaque" in outcomes else "traced"), report


def test_the_table_has_every_operator_of_this_torch():
    for module in pkgutil.iter_modules(torch._higher_order_ops.__path__):
        importlib.import_module(f"torch._higher_order_ops.{module.name}")
    there = set(torch._ops._higher_order_ops) - {"map"}  # torch 2.7 has it beside what does it, map_impl
    assert there <= {case.operator for case in CASES} | set(INTERNAL) | set(OTHERS)


class Labelled:
    __class_getitem__ = classmethod(types.GenericAlias)


LABELLED = Labelled[int]


@dataclass(frozen=True)
class Frozen:
    number: float
    __class_getitem__ = classmethod(types.GenericAlias)


FROZEN = Frozen[float]


def test_a_class_with_type_arguments_is_called():
    def program(x):
        held, labelled = dict[str, float](), LABELLED()
        held["a"] = 2.0
        return x * held["a"] * FROZEN(3.0).number * len(list[int]((1, 2))), labelled.__orig_class__ is LABELLED

    assert_agrees(program, torch.ones(2, requires_grad=True))


def test_a_block_mask_is_made_inside_of_a_program():
    from torch.nn.attention.flex_attention import create_block_mask

    def program(x):
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        return x * mask.to_dense(), mask.kv_num_blocks

    assert_agrees(program, torch.ones(2, requires_grad=True))
    assert "custom" not in torch.fx.traceback.current_meta
