"""Exceptions of thunder's without a text: a note says where the program was, and which line of thunder's ended it."""

from __future__ import annotations

import pytest
import thunder
import torch

_names: dict = {}
exec(compile("def fails(x):\n    assert x is None\n    return x\n", thunder.__file__, "exec"), _names)
_fails = _names["fails"]


def _calls(x):
    y = x + 1
    return _fails(y)


class _Buffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x):
        self._buffers["seen"] = [x]
        return x


def test_an_assertion_of_thunder_names_the_line_of_the_program():
    with pytest.raises(AssertionError) as raised:
        thunder.jit(_calls)(torch.ones(2))
    (note,) = raised.value.__notes__
    assert "AssertionError, without a text, in fails() at " in note
    assert f"The program was at {__file__}:{_calls.__code__.co_firstlineno + 2}." in note
    assert "thunder.dynamo.thunderfx" in note


def test_an_assertion_after_the_program_names_the_line_that_calls_it():
    with pytest.raises(AssertionError) as raised:
        thunder.jit(_Buffers())(torch.ones(2))
    (note,) = raised.value.__notes__
    assert f"The program is called at {__file__}:" in note
    assert "process_recorded_modifications() at" in note


def test_the_programs_own_exceptions_are_as_they_are():
    def program(x):
        assert x.ndim == 7
        return x

    with pytest.raises(AssertionError) as raised:
        thunder.jit(program)(torch.ones(2))
    assert not hasattr(raised.value, "__notes__")


_calls_so_far = {"n": 0}


class _Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        _calls_so_far["n"] += 1
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.errors.MetaWarning")
def test_a_program_that_reads_what_an_opaque_call_has_changed_is_told_its_line():
    def program(x):
        return _Counts.apply(x) + _calls_so_far["n"]

    with pytest.raises(RuntimeError, match="out of sync") as raised:
        thunder.jit(program)(torch.ones(2, requires_grad=True))
    (note,) = raised.value.__notes__
    assert f"The program was at {__file__}:{program.__code__.co_firstlineno + 1}." in note
