"""What a compiled program depends on beyond the guards of thunder's prologue: what closures and globals hold, and more.

Here is the guard of a closure's value. thunder guards tensors and numbers that a program reads. It does not guard the
length of a list, the keys of a dict, a dtype, or which function or class a name stands for. For programs with calls
that hookkit took over this is looked at here: the arguments that are no tensors, what the Functions' code and the
program's own names stand for, in closures and globals, and what the containers hold that traced calls can reach.
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from thunder.core.compile_data import _compile_data

from hookkit.engine.interpreter import call_log
from hookkit.engine.interpreter.side_effects import State
from hookkit.engine.values.wrapping import children, is_container
from hookkit.patch import Patch, around

__all__ = [
    "ARGUMENTS",
    "PATCHES",
    "SETTINGS",
    "STATE",
    "drop",
    "mark",
    "note_call",
    "note_read",
    "note_traced",
    "read_two",
    "recall",
    "remember",
    "settings",
    "traced_arguments",
    "traced_program",
    "tracing",
]

# Under these names thunder's record of what a program depends on (``cache_info``) holds them.
ARGUMENTS = "hookkit_arguments"
STATE = "hookkit_state"
SETTINGS = "hookkit_settings"

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
_BLIND = (len, isinstance, issubclass, type, id, callable, hasattr)  # what they see of a container is looked at anyway
_PLAIN = str | bytes | int | float | complex
_VALUES = (int, float, complex, torch.Tensor)


@attrs.define(eq=False)
class Program:
    """A program while it is traced, and what its hooked calls depend on."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    functions: dict[int, Any] = attrs.field(factory=dict)
    unguarded: dict[int, Any] = attrs.field(factory=dict)
    traced: list[State] = attrs.field(factory=list)
    read: dict[int, Any] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Watch:
    """What names, attributes and items stood for when a program was traced.

    Numbers and tensors are among them only where the program does not come to them by itself, as to the functions of an
    operator; elsewhere thunder guards those that the program reads.

    Attributes:
        arguments: the program's arguments in words.
        held: what stood for what.
        shapes: what containers held, by :func:`_shape`.
        new_in: the thread whose call it was made for, until that call has run.
    """

    arguments: str
    held: list[tuple[Any, Any, Any]]
    shapes: list[tuple[Any, Any]]
    new_in: int | None = attrs.field(factory=threading.get_ident)

    def changed(self) -> bool:
        """Whether any of them stands for something else, or holds something else."""
        return any(not _is_still(_get(holder, key), value) for holder, key, value in self.held) or any(
            not _are_still(_shape(container), shape) for container, shape in self.shapes
        )


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


def traced_program() -> Any:
    """The function or module that is traced."""
    program = _program.get()
    return program.function if program is not None else None


def traced_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the program that is traced."""
    program = _program.get()
    return (program.args, program.kwargs) if program is not None else ((), {})


def note_call(function: Any, *, guarded: bool = True) -> None:
    """A call of a Function was taken over in the program that is traced.

    Args:
        function: the Function, or a function that runs in its place, or a dict in which such are looked up.
        guarded: whether thunder guards the numbers and tensors that it reads.
    """
    program = _program.get()
    if program is not None:
        (program.functions if guarded else program.unguarded)[id(function)] = function


def note_traced(state: State) -> None:
    """A call was traced in the program that is traced; its code can reach this state."""
    program = _program.get()
    if program is not None:
        program.traced.append(state)


def note_read(callee: Any, args: Iterable[Any]) -> None:
    """A function in C, of which thunder sees the result only, is given these arguments."""
    program = _program.get()
    if program is not None and call_log.inside_a_call() and callee not in _BLIND:
        program.read.update((id(a), a) for a in args if is_container(a) or type(getattr(a, "__dict__", None)) is dict)


def mark() -> tuple[int, int]:
    """How much has been noted of what traced calls can reach and read."""
    program = _program.get()
    return (len(program.traced), len(program.read)) if program is not None else (0, 0)


def drop(since: tuple[int, int]) -> None:
    """Forget what was noted since a mark, of a call that is opaque after all."""
    program = _program.get()
    if program is not None:
        del program.traced[since[0] :]
        for key in list(program.read)[since[1] :]:
            del program.read[key]


def read_two(stock: Callable[..., Any], inst: Any, /, stack: Any, **kwargs: Any) -> Any:
    """An instruction that looks into the two values on top of the stack: ``a == b``, ``{**a}``.

    Args:
        stock: thunder's handler of it.
        inst: the instruction.
        stack: the interpreter's stack.
        **kwargs: what else thunder hands to a handler.
    """
    note_read(stock, (stack[-1], stack[-2]))
    return stock(inst, stack=stack, **kwargs)


def remember(info: dict[str, Any]) -> None:
    """Put into thunder's record what the program that was traced depends on, if a call was taken over."""
    program = _program.get()
    if program is None or not program.functions:
        return
    key = f"{STATE}:{next(_serials)}"
    watch = Watch(describe(program.args, program.kwargs), [*_held(program)], [*_shapes(program)])
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


_SETTINGS = (
    torch._C._get_float32_matmul_precision,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
)


def settings() -> str:
    """What a program can ask of torch's settings and thunder takes for a constant."""
    return str([get() for get in _SETTINGS])


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments of a program, but for tensors and for numbers that are arguments themselves."""
    return ";".join(
        "number" if type(value) in (int, float, complex) else f"{name}={_describe(value)}"
        for name, value in [*enumerate(args), *kwargs.items()]
    )


def _describe(value: Any, depth: int = 4) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor" if type(value) is torch.Tensor else type(value).__qualname__
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
    yield from _of(State.reachable_from(program.read.values()), (*_WATCHED, int, float, complex))
    modules = program.function.modules() if isinstance(program.function, torch.nn.Module) else ()
    code = [getattr(type(m), "forward", None) for m in modules] or [program.function]
    yield from _of(State.reachable_from(code, depth=1), _CALLABLES)


def _shapes(program: Program) -> Iterator[tuple[Any, Any]]:
    """The containers that traced calls can reach, but for those that the program is given, and their shapes."""
    given = State.reachable_from([[*program.args], program.kwargs]).containers
    found: dict[int, Any] = {}
    for state in program.traced:
        found.update({i: container for i, (container, _) in state.containers.items() if i not in given})
        found.update(state.classes)
        found.update({id(v): v for *_, v in _of(state, (_array(),))})
    yield from ((container, _shape(container)) for container in found.values())


def _shape(container: Any) -> list[Any]:
    """What thunder does not guard of what a container holds: how much, under which keys; of some of them everything."""
    if isinstance(container, list):
        return [len(container)]
    if isinstance(container, dict):
        return list(container)
    if isinstance(container, type):
        return [name for name in vars(container) if not name.startswith("__")]
    if isinstance(container, _array()):
        return [container.dtype, *container.shape, container.tobytes()]
    return [v if isinstance(v, _PLAIN) else type(v) for v in container]


def _array() -> type[Any]:
    """NumPy's array, if the process has it."""
    numpy = sys.modules.get("numpy")
    return numpy.ndarray if numpy is not None else type(None)


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
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)


def _are_still(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(_is_still, now, before))


def _takes_over_calls(_: Any) -> bool:
    program = _program.get()
    return program is not None and bool(program.functions)


PATCHES = [
    Patch(
        f"thunder.core.interpreter:_default_opcode_handler_map[{instruction}]",
        around(read_two),
        "a program is not compiled again when a container that it compares has changed",
        takes=("inst, stack, **kwargs",),
        concerns=_takes_over_calls,
    )
    for instruction in ("COMPARE_OP", "DICT_UPDATE")
]
