"""Globals that a program writes: thunder writes them once, while it traces, and a tensor's stand-in where a tensor is.

Here they are as they were when the program has been traced, and every run writes them at its end.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import NoneType
from typing import Any

import attrs
import torch
from thunder.core import jit_ext
from thunder.core.interpreter import unwrap
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.trace import tracectx

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter.attempt import raise_in_program, when_undone
from hookkit.engine.interpreter.reasons import is_users, user_source
from hookkit.engine.trace.composite import make_symbol, symbol_name
from hookkit.errors import HookError
from hookkit.mends.mend import Mend

__all__ = ["MENDS", "set_item", "write_after"]

_MISSING = object()
_CONSTANTS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_IMPORTED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


@attrs.define(eq=False)
class _Written:
    """A global that the program writes.

    Attributes:
        names: the globals of its module.
        name: its name.
        before: what it was before the program.
        value: what it is now.
        where: the line that wrote it, in words.
    """

    names: dict[str, Any]
    name: str
    before: Any
    value: Any
    where: str

    def refusal(self) -> HookError:
        """The error for what cannot be written at the end of each run."""
        what = "deletes" if self.value is _MISSING else f"assigns an object of the class {_class(self.value)} to"
        return HookError(
            f"the program {what} the global {self.name!r} of the module {self.names.get('__name__')!r}{self.where}, "
            "which a compiled program cannot. Assign tensors, numbers or strings, or do it outside of the compiled "
            "program; or compile the program by thunder.dynamo.thunderfx, which leaves this to Python."
        )


_written: ContextVar[dict[tuple[int, str], _Written] | None] = ContextVar("hookkit_written_globals", default=None)


def set_item(stock: Callable[..., Any], names: Any, name: Any, value: Any) -> Any:
    """``dict.__setitem__``: noted, if the dict has the globals of one of the user's modules.

    Args:
        stock: ``_general_jit_dict_setitem`` in thunder/core/jit_ext.py.
        names: the wrapped dict.
        name: the wrapped key.
        value: the wrapped value.
    """
    if _is_users_module(unwrap(names)):
        _note(unwrap(names), unwrap(name), unwrap(value))
    return stock(names, name, value)


def delete_item(names: dict[str, Any], name: str) -> HookError | None:
    """Why a key may not be deleted from a dict."""
    if not _is_users_module(names) or name not in names:
        return None
    return _Written(names, name, names[name], _MISSING, _where()).refusal()


def write_after(epilogue: Any) -> None:
    """Write what the program has written to globals at the end of each run.

    Args:
        epilogue: the trace of what runs after the program.

    Raises:
        HookError: if something is written that cannot be.
    """
    for written in (_written.get() or {}).values():
        # one that is as it was is guarded; what was undone, in a call that runs opaque, is not the program's
        is_changed = written.value is not written.before or isinstance(written.value, _CONSTANTS)
        if is_changed and written.names.get(written.name, _MISSING) is written.value:
            _record(epilogue, written)


def _record(epilogue: Any, written: _Written) -> None:
    if not _is_writable(written.value):
        raise written.refusal()
    given = () if _is_constant(written.value) else (written.value,)
    write = partial(written.names.__setitem__, written.name, *(() if given else (written.value,)))
    name = symbol_name(epilogue, f"write_{written.name}")
    symbol = make_symbol(None, name, lambda *_: None, write, kind="hookkit.write.", is_prim=True, keep=True)
    with tracectx(epilogue):
        epilogue.bound_symbols.append(symbol.bind(*given, output=None))


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else isinstance(value, _CONSTANTS)


def _is_writable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_writable, value))
    return isinstance(value, (*_CONSTANTS, TensorProxy, NumberProxy))


def _is_users_module(names: Any) -> bool:
    """Whether a dict has the globals of a module that is not of torch, thunder, hookkit or Python."""
    if type(names) is not dict or "__name__" not in names or not ("__builtins__" in names or "__spec__" in names):
        return False
    return is_users(names.get("__file__") or "")


def _note(names: dict[str, Any], name: Any, value: Any) -> None:
    all_written = _written.get()
    before = names.get(name, _MISSING)
    is_import = before is _MISSING and isinstance(value, _IMPORTED)
    if all_written is None or not isinstance(name, str) or name.startswith("__") or is_import:
        return
    earlier = all_written.get((id(names), name))
    written = _Written(names, name, earlier.before if earlier else before, value, _where())
    all_written[id(names), name] = written
    when_undone(partial(_forget, all_written, written, earlier, before))


def _forget(all_written: dict[tuple[int, str], _Written], written: _Written, earlier: Any, before: Any) -> None:
    """What was written in a call that runs opaque is not the program's: the call writes it, at each run.

    A name that a library has added to a module stays, as what an import adds does: it may count on that.
    """
    key = id(written.names), written.name
    if earlier is None:
        all_written.pop(key, None)
    else:
        all_written[key] = earlier
    if written.names.get(written.name, _MISSING) is not written.value:
        return
    if before is not _MISSING:
        written.names[written.name] = before
    elif _holds_proxy(written.value):
        del written.names[written.name]


def _holds_proxy(value: Any) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return isinstance(value, Proxy) or any(map(_holds_proxy, held))


def _where() -> str:
    source = user_source()
    return f" at {source}" if source else ""


def _class(value: Any) -> str:
    if type(value) is tuple:
        return f"tuple with one of {_class(next(v for v in value if not _is_writable(v)))}"
    return "Tensor" if isinstance(value, Proxy) else type(value).__name__


@contextmanager
def _put_back(program: Any) -> Iterator[None]:
    token = _written.set({})
    try:
        yield
    finally:
        for written in (_written.get() or {}).values():
            if written.names.get(written.name, _MISSING) is not written.value:
                continue
            if written.before is _MISSING:
                del written.names[written.name]
            else:
                written.names[written.name] = written.before
        _written.reset(token)


def _deletions(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    if function not in (dict.__delitem__, delattr):
        return None
    holder = unwrap(args[0])
    error = delete_item(vars(holder) if isinstance(holder, types.ModuleType) else holder, unwrap(args[1]))
    return None if error is None else partial(lambda error, *_: raise_in_program(error), error)


MENDS = [
    Mend(
        "globals that a program writes",
        "A global that a program writes is written once, while the program is traced, not at each run.",
        program="""
total = 0

def program(x):
    global total
    total = x * 2
    return x + 1

compiled = thunder.jit(program)
try:
    compiled(torch.ones(()))
    compiled(torch.ones(()) * 2)
    print(total)
except RuntimeError as error:
    print(str(error)[:8])
""",
        stock="Expected",
        eager="tensor(4.)",
        extension=Extension(
            answers={dict.__setitem__: partial(set_item, jit_ext._general_jit_dict_setitem)},
            before_rules=_deletions,
            around=_put_back,
        ),
    ),
]
