"""Buffers that a program writes: thunder keeps them beside the module, and must look there when it traces again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from thunder.core.module import get_thunder_module

from hookkit.engine.dispatch.extensions import Extension
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around_method

__all__ = ["MENDS", "current_buffers", "set_buffer"]


# Whether the outermost module of the program that is traced has buffers.
_has_buffers: ContextVar[bool] = ContextVar("hookkit_has_buffers", default=False)


@contextlib.contextmanager
def current_buffers(program: Any) -> Iterator[None]:
    """Have a module's buffers be those that the compiled program has written, while it is traced.

    thunder traces the module, whose buffers are those of before the first call, and checks at run time those that it
    keeps (``ThunderModule._overrides_buffers``): a buffer that has changed its shape never fits.
    """
    _has_buffers.set(bool(getattr(program, "_buffers", None)))
    scripted = isinstance(program, torch.jit.ScriptModule)  # which is refused
    module = get_thunder_module(program) if isinstance(program, torch.nn.Module) and not scripted else None
    before = []
    for name, value in getattr(module, "_overrides_buffers", {}).items():
        path, _, key = name.rpartition(".")
        buffers = program.get_submodule(path)._buffers
        if key in buffers:
            before.append((buffers, key, buffers[key]))
            buffers[key] = value
    try:
        yield
    finally:
        for buffers, key, value in reversed(before):
            buffers[key] = value


def set_buffer(module: Any, stock: Callable[..., Any], name: str, value: Any) -> None:
    """Keep a buffer under its name; thunder puts a dot before those of the outermost module, and does not find them.

    Args:
        module: the ``ThunderModule``.
        stock: its own ``set_buffer``.
        name: the buffer's dotted name.
        value: the buffer.
    """
    stock(module, name.removeprefix("."), value)


MENDS = [
    Mend(
        "buffers that a program writes",
        "What a program assigns to a buffer of the outermost module is kept under another name, and not read again.",
        program="""
class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls

compiled = thunder.jit(Counts())
print([compiled(torch.ones(())).item() for _ in range(3)])
""",
        stock="[1.0, 1.0, 1.0]",
        eager="[1.0, 2.0, 3.0]",
        patches=(
            Patch(
                "thunder.core.module:ThunderModule.set_buffer",
                around_method(set_buffer),
                "buffers of the outermost module that a program writes are not found",
                takes=("self, name, value",),
                concerns=lambda _: _has_buffers.get(),
            ),
        ),
        extension=Extension(around=current_buffers),
    )
]
