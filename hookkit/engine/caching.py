"""What a compiled program depends on beyond the guards of thunder's prologue.

thunder guards tensors and numbers that a program reads. It does not guard the length of a list, a dtype, or which
function or class a name stands for. For programs with calls that hookkit took over this is looked at here: the
arguments that are no tensors, and what the Functions' code and the program's own names stand for.
"""

from __future__ import annotations

import enum
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from thunder.core.compile_data import _compile_data

from hookkit.engine.effects import State
from hookkit.engine.values import children, is_container

__all__ = ["ARGUMENTS", "STATE", "note_call", "recall", "remember", "tracing"]

# Under these names thunder's record of what a program depends on (``cache_info``) holds them.
ARGUMENTS = "hookkit_arguments"
STATE = "hookkit_state"

_CALLABLES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    staticmethod,
    classmethod,
    functools.partial,
)
_WATCHED = (*_CALLABLES, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum)
_VALUES = (int, float, complex, torch.Tensor)


@attrs.define(eq=False)
class Program:
    """A program while it is traced, and what its hooked calls depend on."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    functions: dict[int, Any] = attrs.field(factory=dict)
    unguarded: dict[int, Any] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Watch:
    """What names, attributes and items stood for when a program was traced.

    Numbers and tensors are among them only where the program does not come to them by itself, as to the functions of an
    operator; elsewhere thunder guards those that the program reads.

    Attributes:
        arguments: the program's arguments in words.
        held: what stood for what.
        new_in: the thread whose call it was made for, until that call has run.
    """

    arguments: str
    held: list[tuple[Any, Any, Any]]
    new_in: int | None = attrs.field(factory=threading.get_ident)

    def changed(self) -> bool:
        """Whether any of them stands for something else."""
        return any(not _is_still(_get(holder, key), value) for holder, key, value in self.held)


_program: ContextVar[Program | None] = ContextVar("hookkit_traced_program", default=None)
_watches: weakref.WeakKeyDictionary[Any, dict[str, Watch]] = weakref.WeakKeyDictionary()
_serials = itertools.count(1)
_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextmanager
def tracing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """The time in which a program is traced."""
    token = _program.set(Program(function, args, kwargs))
    try:
        yield
    finally:
        _program.reset(token)


def note_call(function: Any, *, guarded: bool = True) -> None:
    """A call of a Function was taken over in the program that is traced.

    Args:
        function: the Function, or a function that runs in its place, or a dict in which such are looked up.
        guarded: whether thunder guards the numbers and tensors that it reads.
    """
    program = _program.get()
    if program is not None:
        (program.functions if guarded else program.unguarded)[id(function)] = function


def remember(info: dict[str, Any]) -> None:
    """Put into thunder's record what the program that was traced depends on, if a call was taken over."""
    program = _program.get()
    if program is None or not program.functions:
        return
    key = f"{STATE}:{next(_serials)}"
    watch = Watch(describe(program.args, program.kwargs), [*_held(program)])
    _watches.setdefault(_compile_data.get()[1], {})[key] = watch
    info[ARGUMENTS], info[STATE] = watch.arguments, key


def recall(info: dict[str, Any], constants: Iterable[Any], args: Any, kwargs: Any) -> None:
    """Put into thunder's record how things are now, for the prologue of a compiled program to compare.

    Args:
        info: the record.
        constants: the constants of the prologue's code.
        args: what the program is called with.
        kwargs: the same, by keyword.
    """
    key = next((c for c in constants if isinstance(c, str) and c.startswith(f"{STATE}:")), None)
    watch = _watches.get(_compile_data.get()[1], {}).get(key or "")
    if watch is None:
        return
    if watch.new_in == threading.get_ident():  # it was made for the call that is running
        watch.new_in = None
        info[ARGUMENTS], info[STATE] = watch.arguments, key
        return
    info[ARGUMENTS] = describe(args, kwargs)
    info[STATE] = "changed" if watch.changed() else key


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments of a program, but for tensors and for numbers that are arguments themselves."""
    return ";".join(
        "number" if type(value) in (int, float, complex) else f"{name}={_describe(value)}"
        for name, value in [*enumerate(args), *kwargs.items()]
    )


def _describe(value: Any, depth: int = 4) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, str | bytes | bool | int | float | complex | type(None) | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, _CALLABLES):
        return _describe_callable(value, depth)
    if not depth:
        return type(value).__qualname__
    if isinstance(value, dict):
        return "{" + ",".join(f"{k!r}:{_describe(v, depth - 1)}" for k, v in value.items()) + "}"
    if is_container(value):
        return f"{type(value).__qualname__}({','.join(_describe(c, depth - 1) for c in children(value))})"
    if isinstance(value, torch.nn.Module | enum.Enum) or not hasattr(value, "__dict__"):
        return _token(value)
    return f"{type(value).__qualname__}{_describe(vars(value), depth - 1)}"


def _describe_callable(value: Any, depth: int) -> str:
    """A callable by its code and what it closes over, so that a new function of the same source is not another one."""
    if isinstance(value, functools.partial):
        parts: list[Any] = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, _token(value.__self__)]
    elif isinstance(value, types.FunctionType):
        parts = [_token(value.__code__), value.__defaults__]
        parts += [c.cell_contents for c in value.__closure__ or () if _is_set(c)]
    else:
        return _token(value)
    return f"{type(value).__name__}({','.join(_describe(p, depth - 1) for p in parts) if depth else ''})"


def _token(value: Any) -> str:
    """A name for an object that no other object has, or will have."""
    try:
        return f"#{_tokens.setdefault(value, next(_serials))}"
    except TypeError:  # unhashable, or without weak references
        return type(value).__qualname__


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _held(program: Program) -> Iterator[tuple[Any, Any, Any]]:
    """Where the Functions' code and the program's own names lead, by holder and key."""
    yield from _of(State.reachable_from(program.functions.values()), _WATCHED)
    yield from _of(State.reachable_from(program.unguarded.values()), (*_WATCHED, *_VALUES))
    modules = program.function.modules() if isinstance(program.function, torch.nn.Module) else ()
    code = [getattr(type(m), "forward", None) for m in modules] or [program.function]
    yield from _of(State.reachable_from(code, depth=1), _CALLABLES)


def _of(state: State, kinds: tuple[type[Any], ...]) -> Iterator[tuple[Any, Any, Any]]:
    for container, copy in state.containers.values():
        items = copy.items() if isinstance(copy, dict) else enumerate(copy) if isinstance(copy, list) else ()
        yield from ((container, k, v) for k, v in items if isinstance(v, kinds))
    yield from ((c, None, v) for c, v in state.cells.values() if isinstance(v, kinds))
    yield from ((holder, name, v) for holder, name, v in state.names.values() if isinstance(v, kinds))
    yield from ((vars(c), name, v) for c, name, v in state.attributes.values() if isinstance(v, kinds))


def _get(holder: Any, key: Any) -> Any:
    try:
        return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    except (LookupError, ValueError):
        return _get


def _is_still(now: Any, before: Any) -> bool:
    plain = str | bytes | int | float | complex
    return now is before or (type(now) is type(before) and isinstance(now, plain) and now == before)
