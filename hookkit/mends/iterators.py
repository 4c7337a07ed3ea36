"""Iterators of Python's that call what they are given (``map``, ``itertools.accumulate``), are unpacked, or go on.

thunder runs them outside of its interpreter, and with them whatever they call: a custom Function would run with proxies
and lose its backward. Delete an entry when thunder's own table of lookasides has it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    PseudoInst,
    _interpret_call,
    get_interpreterruntimectx,
    unwrap,
)

from hookkit import compat
from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter.attempt import is_made, raise_in_program
from hookkit.engine.interpreter.reasons import is_users, user_source
from hookkit.errors import HookError
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "is_python", "iterator_lookaside", "unpack_into_call"]


def iterator_lookaside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to interpret instead of an iterator, if what it calls is Python code."""
    if function is itertools.accumulate:
        return lambda *given, **named: _interpret_call(_accumulate, *given, **named)
    interpreted = _INTERPRETED.get(function) if isinstance(function, type) else None
    if interpreted is None or not args or not is_python(args[0].value):
        return None
    return lambda *given: _interpret_call(interpreted, *given)


def is_python(called: Any) -> bool:
    """Whether what calls this has to be interpreted: it is code in Python, or may be what a rule is for."""
    is_builtin = called is None or isinstance(called, type)
    if isinstance(called, BuiltinFunctionType):  # one of torch's, for which there may be a rule, belongs to no module
        is_builtin = called.__self__ is not None
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


def _accumulate(iterable: Any, func: Any = operator.add, *, initial: Any = None) -> Any:
    items = iter(iterable)
    if initial is None:
        try:
            total = next(items)
        except StopIteration:
            return
    else:
        total = initial
    yield total
    for item in items:
        total = func(total, item)
        yield total


_INTERPRETED: dict[type[Any], Callable[..., Any]] = {map: _map, filter: _filter, itertools.starmap: _starmap}


def _items(iterable: Any) -> Any:
    return (*iterable,)


def unpack_into_call(stock: Callable[..., Any], inst: Any, /, stack: Any, **state: Any) -> Any:
    """A call with positional arguments from an iterable, which thunder takes for a sequence.

    Args:
        stock: thunder's handler of the instruction ``CALL_FUNCTION_EX``.
        inst: the instruction; its argument is whether keyword arguments are on top of the stack.
        stack: the interpreter's stack.
        **state: the rest of the interpreter's state.
    """
    named = [stack.pop_wrapped()] if inst.arg & 1 else []
    items = stack.pop_wrapped()
    if not isinstance(unwrap(items), tuple | list):
        items = _interpret_call(_items, items)
        if items is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return items
    for value in (items, *named):
        stack.append(value)
    return stock(inst, stack=stack, **state)


def refuse_to_advance(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What refuses ``next`` of an iterator from outside: it would go on when the program is traced, and never after."""
    if function is not next or not args or not _is_from_outside(args[0].provenance):
        return None
    iterator = args[0].value
    how = getattr(type(iterator), "__next__", None)
    if not isinstance(iterator, Iterator) or isinstance(how, FunctionType) or not _is_in_users_code():
        return None
    error = HookError(
        f"the program advances an iterator from outside, {iterator!r}, at {user_source()}; a compiled program would do "
        "that once, when it is traced, and use the same item in every run. Call next outside of the compiled program, "
        "and hand over the item as an argument"
    )
    error.is_final = True  # trying the call out would advance it, too
    return partial(lambda error, /, *_: raise_in_program(error), error)


def _is_from_outside(provenance: Any) -> bool:
    """Whether a value is reached from inputs or globals; to thunder, generators of the program's own are constants."""
    root = provenance
    while root.inputs:
        root = root.inputs[0]
    return not is_made(provenance) and root.inst is not PseudoInst.CONSTANT


def _is_in_users_code() -> bool:
    """Whether a line of the user's calls ``next``, or goes through a loop."""
    frames = get_interpreterruntimectx().frame_stack
    files = (f.code.co_filename for f in reversed(frames) if f.code.co_name != "_next_impl")  # thunder's, in a loop
    return is_users(next(files, ""))


MENDS = [
    Mend(
        "iterators from outside",
        "A program that advances an iterator from outside does so once, when it is traced, and has the same item in "
        "every run.",
        program="""
import itertools

steps = itertools.count(1)
f = thunder.jit(lambda x: x * next(steps))
f(torch.ones(1))
print(f(torch.ones(1)).tolist())
""",
        stock="[1.0]",
        eager="[2.0]",
        refused="HookError: the program advances an iterator from outside",
        extension=Extension(before_rules=refuse_to_advance),
    ),
    Mend(
        "iterators unpacked into a call",
        "A generator whose items are the arguments of a call, as in `torch.nn.utils.parametrize`, is an error.",
        program="""
print(thunder.jit(lambda x: torch.add(*(y for y in (x, x))))(torch.ones(1)).tolist())
""",
        stock="TypeError: object of type 'generator' has no len()",
        eager="[2.0]",
        patches=(
            Patch(
                "thunder.core.interpreter:_default_opcode_handler_map[CALL_FUNCTION_EX]",
                around(unpack_into_call),
                "a generator that is unpacked into a call is taken for a sequence",
                takes=("inst, stack, **kwargs",),
            ),
        ),
    ),
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
    ),
]
