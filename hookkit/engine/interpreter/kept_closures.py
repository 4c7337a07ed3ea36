"""Callables that a program makes, kept as they are when a call that runs later is given them.

The program is interpreted to its end before anything runs: a function that it made would find, say, the last value of a
loop's variable, and all that was put into a list afterwards.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx, unwrap

from hookkit.engine.interpreter.attempt import is_made
from hookkit.engine.values.captured import Step, held, with_parts

__all__ = ["as_it_is"]


def as_it_is(value: Any, wrapped: Callable[[], Any]) -> Any:
    """A callable that keeps what it closes over when the program's variables, or its lists, change.

    What it closes over outside of the program it finds as it is when it runs.

    Args:
        value: the callable.
        wrapped: gives it as an interpreter value.
    """
    return _as_it_is(value, wrapped, _variables(), set())


def _variables() -> set[int]:
    """The cells of variables of the functions that are being interpreted, by identity."""
    found = set()
    for frame in get_interpreterruntimectx().frame_stack:
        for i, variable in enumerate(frame.localsplus):
            cell = unwrap(variable) if isinstance(variable, WrappedValue) else variable
            if isinstance(cell, types.CellType) and frame.get_localsplus_name(i) in frame.code.co_cellvars:
                found.add(id(cell))
    return found


def _as_it_is(value: Any, wrapped: Callable[[], Any], variables: set[int], open_: set[int]) -> Any:
    is_container = type(value) in (list, dict, tuple)
    if id(value) in open_ or not (
        is_container or isinstance(value, types.FunctionType | types.MethodType | functools.partial)
    ):
        return value
    open_.add(id(value))
    parts = {}
    for step, held_now in held(value):
        if step.kind == "global" or step == Step("attribute", "__self__"):
            continue
        now = _as_it_is(held_now, functools.partial(_wrapped_part, step, wrapped), variables, open_)
        is_variable = step.kind == "cell" and id(value.__closure__[step.key]) in variables
        if now is not held_now or (is_variable and held_now is not value):
            parts[step] = now
    open_.discard(id(value))
    if parts:
        return with_parts(value, parts)
    return value.copy() if type(value) in (list, dict) and is_made(wrapped().provenance) else value


def _wrapped_part(step: Step, wrapped: Callable[[], Any]) -> Any:
    return step.of_wrapped(wrapped())
