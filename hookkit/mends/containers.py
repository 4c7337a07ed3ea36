"""Lists, tuples, named tuples and dicts of tensors, in the hands of Python's own functions and of what is returned.

thunder replaces tensors by proxies as a program takes them out of a container. Python's functions take them out
themselves (``sum``, ``sorted``, ``itertools.chain``), and would compute with the tensors of one run.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    MappingItemsWrapper,
    MappingValuesWrapper,
    _interpret_call,
    unwrap,
)
from thunder.core.jit_ext import should_register_for_prologue
from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.trace.composite import make_symbol
from hookkit.engine.values.wrapping import as_torch_names, is_container, leaves, unwrap_arguments, wrap_result
from hookkit.errors import HookError
from hookkit.mends.data_dependence import refusal
from hookkit.mends.iterators import is_python
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "built", "reader", "subscript"]

# What reads the items of what it is given, and changes nothing.
_READERS = frozenset(
    {
        *(sum, sorted, min, max, map, filter, functools.reduce, operator.add, operator.concat),
        *(tuple.__add__, list.__add__, list.__mul__, list.__rmul__, tuple.__mul__, tuple.__rmul__),
        *(v for v in vars(itertools).values() if isinstance(v, type | BuiltinFunctionType)),
        *(itertools.chain.from_iterable, operator.itemgetter.__call__, operator.attrgetter.__call__),
    }
)
_GETTERS = (operator.itemgetter, operator.attrgetter)
_VIEWS: tuple[type[Any], ...] = (type({}.values()), type({}.items()), MappingValuesWrapper, MappingItemsWrapper)


def reader(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What stands for a function of Python's that reads items of containers, if there are tensors among them."""
    if not args or not _reads(function) or not any(map(_holds_tensors, args)):
        return None
    if any(callable(a.value) and not isinstance(a.value, _GETTERS) and is_python(a.value) for a in args):
        return None  # what it calls is interpreted
    return partial(_read, function)


def _reads(function: Any) -> bool:
    try:
        return function in _READERS
    except TypeError:  # it cannot be hashed
        return False


def _holds_tensors(wrapped: Any) -> bool:
    value = wrapped.value
    if isinstance(value, _VIEWS):
        value = list(value)
    return is_container(value) and any(isinstance(v, torch.Tensor | TensorProxy) for v in leaves(value))


def _read(function: Any, *args: Any, **kwargs: Any) -> Any:
    listed = [_interpret_call(_items, a) if isinstance(a.value, _VIEWS) else a for a in args]
    if INTERPRETER_SIGNALS.EXCEPTION_RAISED in listed:
        return INTERPRETER_SIGNALS.EXCEPTION_RAISED
    given, named = unwrap_arguments(tuple(listed), kwargs)
    try:
        result = function(*given, **named)
    except Exception as error:
        return raise_in_program(error)
    return wrap_result(result, *listed)


def _items(iterable: Any) -> Any:
    return [*iterable]


def subscript(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What stands for ``list.__getitem__`` and ``tuple.__getitem__`` with an index that a tensor holds: a refusal."""
    if function is not list.__getitem__ and function is not tuple.__getitem__:
        return None
    index = unwrap(args[1])
    if isinstance(index, TensorProxy) or (isinstance(index, NumberProxy) and index.value is None):
        return lambda *_: raise_in_program(refusal(index, "an index"))
    return None


def built(stock: Callable[..., Any], wrapped: Any) -> Any:
    """What a program returns, as it stands in the trace of what runs after it.

    Args:
        stock: ``thunder.core.jit_ext.build_value_from_wrapped``, which makes a container as if its class took one
            iterable.
        wrapped: the wrapped value.
    """
    value = unwrap(wrapped)
    is_input = hasattr(wrapped, "anyproxy") or should_register_for_prologue(wrapped.provenance)
    if is_input or not isinstance(value, tuple | list | dict) or not _holds_special(value):
        return stock(wrapped)
    return _made(value, wrapped.item_wrappers, partial(built, stock))


def _is_special(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) not in (tuple, torch.Size)


def _holds_special(value: Any) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return _is_special(value) or any(map(_holds_special, held))


def _made(value: Any, wrappers: Any, build: Callable[[Any], Any]) -> Any:
    """A container as the trace makes it; some of its items have wrappers."""

    def item(key: Any, held: Any) -> Any:
        wrapper = wrappers.get(key) if isinstance(wrappers, dict) else wrappers[key] if wrappers else None
        if wrapper is not None:
            return build(wrapper)
        return _made(held, None, build) if isinstance(held, tuple | list | dict) else as_torch_names(held)

    if isinstance(value, dict):
        return type(value)((key, item(key, held)) for key, held in value.items())
    items = [item(i, held) for i, held in enumerate(value)]
    return _make(type(value), items) if _is_special(value) else type(value)(items)


def _make(kind: type[Any], items: list[Any]) -> Any:
    if not hasattr(kind, "_make") and not hasattr(kind, "n_fields"):
        raise HookError(
            f"the program returns a tuple of the class {kind.__qualname__}, which a compiled program cannot make. "
            "Return a plain or a named tuple, and make the object of it outside of the compiled program."
        )
    symbol = make_symbol(
        None,
        f"make_{kind.__name__}",
        lambda *_: AnyProxy(None),
        lambda *found: tuple.__new__(kind, found) if hasattr(kind, "_make") else kind(found),
        kind="hookkit.make.",
        is_prim=True,
    )
    return symbol(*items)


MENDS = [
    Mend(
        "items read by Python's functions",
        "Python's `sum`, `sorted` or `itertools.chain` of a list or tuple of tensors that a program is given is an "
        "error.",
        program="""
print(thunder.jit(lambda pair: sum(pair))((torch.ones(1), torch.ones(1))).tolist())
""",
        stock="NotImplementedError",
        eager="[2.0]",
        extension=Extension(after_rules=reader),
    ),
    Mend(
        "an index that a tensor holds",
        "A list indexed by a tensor of one integer is refused as if that were no integer.",
        program="""
print(thunder.jit(lambda x, i: x * [2.0, 3.0][i])(torch.ones(1), torch.tensor(1)).tolist())
""",
        stock="TypeError: <class 'list'> indices must be integers",
        eager="[3.0]",
        refused="DataDependencyError",
        extension=Extension(before_rules=subscript),
    ),
    Mend(
        "named tuples that are returned",
        "A program that returns a named tuple of its own cannot be compiled.",
        program="""
from collections import namedtuple
Pair = namedtuple("Pair", "a b")
print(thunder.jit(lambda x: Pair(x, x * 2))(torch.ones(1)).b.tolist())
""",
        stock="TypeError",
        eager="[2.0]",
        patches=(
            Patch(
                "thunder.core.jit_ext:build_value_from_wrapped",
                around(built),
                "a named tuple of the program's own cannot be returned",
                takes=("wrapped_v",),
            ),
        ),
    ),
]
