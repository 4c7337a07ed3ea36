"""Globals that a program writes: each run writes them, as in eager PyTorch, or the program is refused in words."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import thunder
import torch

import hookkit

total: Any = 0
_restored: Any = None


def _adds(x):
    global total
    total = total + x * 2
    return total * 3


def _counts(x):
    global total
    total = total + 1
    return x * total


def _of_module(x):
    module = sys.modules[__name__]
    module.total = (x * 2, 5)
    return module.total[0] + total[0]


def _by_globals(x):
    globals()["total"] = None
    return x + 1


def _makes(x):
    global made
    made = x * 2
    return x + 1


class TimesHundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        global total
        total = total + 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("program", [_adds, _counts, _of_module, _by_globals, _makes, TimesHundred.apply])
def test_each_run_writes_globals_as_eager_pytorch_does(program):
    def runs(function):
        found = []
        for start in (0, 0, 4):
            globals()["total"] = start
            globals().pop("made", None)
            for _ in range(2):
                x = torch.ones(2, requires_grad=True)
                function(x).sum().backward()
                of_total = total.detach().clone() if isinstance(total, torch.Tensor) else total
                found.append((of_total, globals().get("made"), x.grad))
            if isinstance(total, torch.Tensor):
                assert total.requires_grad
        return found

    if program is _adds:

        def detached(function):
            def run(x):
                global total
                total = total.detach() if isinstance(total, torch.Tensor) else total
                return function(x)

            return run

        compared = detached(thunder.jit(program)), detached(program)
    else:
        compared = thunder.jit(program), program
    torch.testing.assert_close(runs(compared[0]), runs(compared[1]))


class Interpreter:
    """As libraries that interpret kernels: it adds to the globals of a kernel, and patches them while that runs."""

    prepared: ClassVar[dict[Any, Any]] = {}

    def run(self, kernel, x):
        names = kernel.__globals__
        if kernel not in self.prepared:
            names.setdefault("added", Interpreter())
            self.prepared[kernel] = kernel
        before, names["doubled"] = names["doubled"], lambda x: torch.from_numpy(x.detach().numpy() * 2)
        try:
            return self.prepared[kernel](x)
        finally:
            names["doubled"] = before


def doubled(x):
    raise RuntimeError("an operation of a kernel outside of it")


def interpreted_kernel(x):
    assert isinstance(added, Interpreter)  # noqa: F821
    return doubled(x)


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.errors.MetaWarning")
def test_what_an_opaque_call_does_to_globals_is_not_the_programs():
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Interpreter().run(interpreted_kernel, x)

        @staticmethod
        def backward(ctx, grad):
            return grad * 100

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            global kept
            kept = (Interpreter(), x.detach().clone())
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 100 * kept[1]

    stock, x = doubled, torch.full((2,), 3.0, requires_grad=True)
    try:
        jitted = thunder.jit(lambda x: Kernel.apply(x) + Keeps.apply(x * 1.5))
        for factor in (1, 2):
            argument = (x.detach() * factor).requires_grad_()
            output = jitted(argument)
            output.sum().backward()
            torch.testing.assert_close((output.detach(), argument.grad), (argument * 5, 100 + 150 * 1.5 * argument))
            assert doubled is stock
            torch.testing.assert_close(kept[1], argument.detach() * 1.5)
    finally:
        globals().pop("added", None)
        globals().pop("kept", None)
        Interpreter.prepared.clear()


def test_what_a_program_puts_back_needs_no_writing():
    global _restored
    _restored = [1]

    def program(x):
        global _restored
        before = _restored
        _restored = [x]
        try:
            return _restored[0] * 3
        finally:
            _restored = before

    kept = _restored
    assert thunder.jit(program)(torch.ones(())).item() == 3
    assert _restored is kept


def _lists(x):
    global total
    total = [x]
    return x + 1


def _deletes(x):
    global total
    del total
    return x + 1


def _deletes_of_module(x):
    del sys.modules[__name__].total
    return x + 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_lists, "an object of the class list to the global 'total'"),
        (_deletes, "deletes the global 'total'"),
        (_deletes_of_module, "deletes the global 'total'"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_line(program, said):
    global total
    total = 7
    line = program.__code__.co_firstlineno + 2 - (program is _deletes_of_module)
    with pytest.raises(hookkit.HookError, match=rf"{said}.*test_written_globals.py:{line}, .*thunderfx"):
        thunder.jit(program)(torch.ones(()))
    assert total == 7
