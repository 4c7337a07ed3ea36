"""Callables that a program makes, kept as they are when a call that runs later is given them.

The program is interpreted to its end before anything runs: a function that it made would find, say, the last value of a
loop's variable, and all that was put into a list afterwards.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx, unwrap

from hookkit.engine.interpreter.attempt import is_made
from hookkit.engine.values.captured import Step, held, is_looked_into, with_parts
from hookkit.errors import HookError

__all__ = ["Kept", "as_it_is"]

_MADE_BY_PYTHON = 1 << 9  # the flag of a class that is no part of C code, whose objects are made by `object.__new__`


@attrs.define(eq=False)
class Kept:
    """What an opaque call has copies of, because the program makes it, and may go on to change it.

    Attributes:
        copies: lists, dicts, attributes of objects, cells of variables; and what they hold.
        objects: objects of classes, and their copies.
    """

    copies: list[tuple[Any, Any]] = attrs.field(factory=list)
    objects: list[tuple[Any, Any]] = attrs.field(factory=list)

    def original(self, value: Any) -> Any:
        """The program's own object for a copy of it; other values as they are."""
        return next((original for original, copied in self.objects if copied is value), value)

    def note(self, copied: Any) -> None:
        """Note a copy."""
        self.copies.append((copied, _now(copied)))

    def put_back(self) -> list[Any]:
        """Make them what they were; returns those that were changed."""
        changed = [(copied, before) for copied, before in self.copies if not _is_as_before(copied, before)]
        for copied, before in changed:
            _put_back(copied, before)
        return [copied for copied, _ in changed]

    @contextmanager
    def unchanged(self, description: str) -> Iterator[None]:
        """The time in which a call runs.

        Raises:
            HookError: if it changes something: the program goes on with what it had when it was traced.
        """
        try:
            yield
        except BaseException:
            self.put_back()
            raise
        for copied in self.put_back():
            kind = {types.CellType: "a variable", list: "a list"}.get(type(copied), "a dict, or an attribute,")
            raise HookError(
                f"{description} runs as one opaque operator, and it changes {kind} that the program makes, while the "
                "program goes on with it as it was when it was traced. Return what is found instead, or make the "
                "object outside of the program."
            )


def _now(copied: Any) -> Any:
    if isinstance(copied, types.CellType):
        return copied.cell_contents
    return tuple(copied.items() if isinstance(copied, dict) else copied)


def _is_as_before(copied: Any, before: Any) -> bool:
    now = _now(copied)
    if isinstance(copied, types.CellType):
        return now is before
    if isinstance(copied, dict):
        return len(now) == len(before) and all(a is b and v is w for (a, v), (b, w) in zip(now, before, strict=True))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _put_back(copied: Any, before: Any) -> None:
    if isinstance(copied, types.CellType):
        copied.cell_contents = before
    elif isinstance(copied, dict):
        copied.clear()
        copied.update(before)
    else:
        copied[:] = before


def as_it_is(value: Any, wrapped: Callable[[], Any], kept: Kept) -> Any:
    """A callable that keeps what it closes over when the program's variables, lists or objects change.

    What it closes over outside of the program it finds as it is when it runs.

    Args:
        value: the callable.
        wrapped: gives it as an interpreter value.
        kept: notes the copies.
    """
    return _as_it_is(value, wrapped, _variables(), set(), kept)


def _variables() -> set[int]:
    """The cells of variables of the functions that are being interpreted, by identity."""
    found = set()
    for frame in get_interpreterruntimectx().frame_stack:
        for i, variable in enumerate(frame.localsplus):
            cell = unwrap(variable) if isinstance(variable, WrappedValue) else variable
            if isinstance(cell, types.CellType) and frame.get_localsplus_name(i) in frame.code.co_cellvars:
                found.add(id(cell))
    return found


def _as_it_is(value: Any, wrapped: Callable[[], Any], variables: set[int], open_: set[int], kept: Kept) -> Any:
    if id(value) in open_ or not _may_be_kept(value):
        return value
    is_function = isinstance(value, types.FunctionType | types.MethodType | functools.partial)
    is_object = not (is_function or type(value) in (list, dict, tuple))
    made = not (is_function or type(value) is tuple) and is_made(wrapped().provenance)
    if is_object and not made:
        return value
    open_.add(id(value))
    parts = {}
    for step, held_now in held(value):
        if step.kind == "global":
            continue
        now = _as_it_is(held_now, functools.partial(_wrapped_part, step, wrapped), variables, open_, kept)
        is_variable = step.kind == "cell" and id(value.__closure__[step.key]) in variables
        if now is not held_now or (is_variable and held_now is not value):
            parts[step] = now
    open_.discard(id(value))
    if not (parts or made):
        return value
    copied = with_parts(value, parts)
    if isinstance(copied, types.FunctionType):
        for step in parts:
            if step.kind == "cell":
                kept.note((copied.__closure__ or ())[step.key])
    elif type(copied) in (list, dict):
        kept.note(copied)
    elif is_object:
        kept.note(copied.__dict__)
        kept.objects.append((value, copied))
    return copied


def _may_be_kept(value: Any) -> bool:
    if type(value) in (list, dict, tuple):
        return True
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return True
    return is_looked_into(value) and all(cls.__flags__ & _MADE_BY_PYTHON for cls in type(value).__mro__[:-1])


def _wrapped_part(step: Step, wrapped: Callable[[], Any]) -> Any:
    return step.of_wrapped(wrapped())
