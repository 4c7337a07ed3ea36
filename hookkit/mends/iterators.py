"""Iterators of Python's that call what they are given: ``map``, ``filter``, ``itertools.starmap``.

thunder runs them outside of its interpreter, and with them whatever they call: a custom Function would run with proxies
and lose its backward. Delete an entry when thunder's own table of lookasides has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from thunder.core.interpreter import _interpret_call

from hookkit import compat
from hookkit.engine.dispatch.extensions import Extension
from hookkit.mends.mend import Mend

__all__ = ["MENDS", "iterator_lookaside"]


def iterator_lookaside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to interpret instead of an iterator, if what it calls is Python code."""
    interpreted = _INTERPRETED.get(function) if isinstance(function, type) else None
    if interpreted is None or not args or not _is_python(args[0].value):
        return None
    return lambda *given: _interpret_call(interpreted, *given)


def _is_python(called: Any) -> bool:
    is_builtin = called is None or isinstance(called, type | BuiltinFunctionType)
    return not is_builtin or compat.function_owner(called) is not None


def _map(function: Any, *iterables: Any) -> Any:
    for args in zip(*iterables):  # noqa: B905
        yield function(*args)


def _filter(function: Any, iterable: Any) -> Any:
    for item in iterable:
        if function(item):
            yield item


def _starmap(function: Any, iterable: Any) -> Any:
    for args in iterable:
        yield function(*args)


_INTERPRETED: dict[type[Any], Callable[..., Any]] = {map: _map, filter: _filter, itertools.starmap: _starmap}


MENDS = [
    Mend(
        "iterators that call what they are given",
        "`map`, `filter` and `itertools.starmap` run outside of the interpreter, and what they call with them: a "
        "custom Function loses its backward.",
        program="""
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 20

x = torch.ones(1, requires_grad=True)
thunder.jit(lambda x: sum(map(Double.apply, [x, x])))(x).sum().backward()
print(x.grad.tolist())
""",
        stock="[4.0]",
        eager="[40.0]",
        extension=Extension(after_rules=iterator_lookaside),
    )
]
