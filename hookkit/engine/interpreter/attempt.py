"""Running a provider in thunder's interpreter, so that either all or nothing of it stays.

An :class:`Attempt` is a scope of the computation trace. Whatever happens inside, when it is left the trace, the
interpreter and the compile data are as they were; what was recorded is in its hands.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    unwrap,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.prims import OpTags

from hookkit.engine.trace import gradflow
from hookkit.errors import HookError

__all__ = ["Aside", "Attempt", "Raised", "add_note", "is_made", "raise_in_program", "when_undone"]


class Raised(Exception):
    """Something that ran in the interpreter raised; the exception is in ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Attempt:
    """A scope in which operations are recorded aside, with grad mode off and autocast as it is or off."""

    def __init__(self, *, grad_mode: bool, autocast: bool = True) -> None:
        self._grad_mode = grad_mode
        self._autocast = autocast
        self.bound_symbols: list[Any] = []
        self.enters_autocast = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Attempt:
        self._token = _innermost.set(self)
        self._jit = get_jit_ctx()
        self._runtime = get_interpreterruntimectx()
        self._data = get_compile_data()
        trace = self._trace = self._jit.computation_trace
        self._scopes = len(trace.scopes)
        self._source = (trace._current_source_filename, trace._current_source_positions)
        self._exceptions = list(self._runtime.exception_stack)
        self._frames = len(self._runtime.frame_stack)
        self._modifications = {k: len(v) for k, v in self._jit._additional_outputs.items()}
        executor = self._jit.ad_hoc_executor
        self._executor_state = (dict(executor._opmap), dict(executor._implmap), dict(executor._lookasides))
        self._outer_grad_mode = self._data.is_grad_enabled
        self._outer_autocast = self._data.autocast_stack.stack
        self._data.is_grad_enabled = self._grad_mode
        self._data.autocast_stack.stack = deque(self._outer_autocast if self._autocast else ())
        trace.push_scope(self.bound_symbols)
        return self

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Interpret a call of wrapped values.

        Raises:
            Raised: if the interpreted program, or thunder while it interprets it, raises.
        """
        try:
            result = _interpret_call(function, *args, **kwargs)
        except Exception as error:
            raise Raised(error) from error
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            raised = self._runtime.curexc
            self._runtime.curexc = None
            raise Raised(raised)
        return result

    def written(self) -> list[tuple[Any, Any]]:
        """The dicts of objects that were there before in which the code that ran set an attribute, and its value.

        thunder does not set them; it notes them for the program's epilogue (``_general_jit_object_setattr_lookaside``).
        """
        notes = self._jit._additional_outputs.items()
        return [(d, unwrap(note[-1])) for d, entries in notes for note in entries[self._modifications.get(d, 0) :]]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        trace = self._trace
        _innermost.reset(self._token)
        gradflow.forget(trace, self.bound_symbols)
        del trace.scopes[self._scopes :]
        trace._current_source_filename, trace._current_source_positions = self._source
        self._data.is_grad_enabled = self._outer_grad_mode
        self._data.autocast_stack.stack = self._outer_autocast
        self.enters_autocast = any("autocast" in b.sym.name for b in self.bound_symbols if _is_context_marker(b))
        self.bound_symbols = [b for b in self.bound_symbols if not _is_context_marker(b)]
        if error is not None:
            self._roll_back()
        elif (outer := _innermost.get()) is not None:
            outer._undo += self._undo

    def _roll_back(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._runtime.curexc = None
        self._runtime.exception_stack[:] = self._exceptions
        del self._runtime.frame_stack[self._frames :]
        for modified, entries in list(self._jit._additional_outputs.items()):
            del entries[self._modifications.get(modified, 0) :]
            if not entries:
                del self._jit._additional_outputs[modified]
        executor = self._jit.ad_hoc_executor
        for table, before in zip(
            (executor._opmap, executor._implmap, executor._lookasides), self._executor_state, strict=True
        ):
            # other threads read the tables meanwhile
            for key in table.keys() - before.keys():
                del table[key]
            table.update(before)


_innermost: ContextVar[Attempt | None] = ContextVar("hookkit_innermost_attempt", default=None)


def when_undone(undo: Callable[[], None]) -> None:
    """What is called if the attempt that is running, or one around it, comes to nothing."""
    attempt = _innermost.get()
    if attempt is not None:
        attempt._undo.append(undo)


class Aside:
    """A scope in which operations are recorded aside; when it is left they stand where they would have stood.

    Attributes:
        bound_symbols: what was recorded; what is taken out of it is not put there.
    """

    def __enter__(self) -> Aside:
        self._data = get_compile_data()
        trace = self._trace = get_jit_ctx().computation_trace
        self._outer, self._scopes = trace.peek_scope(), len(trace.scopes)
        self._modes = self._modes_now()
        self.bound_symbols: list[Any] = []
        trace.push_scope(self.bound_symbols)
        return self

    def __exit__(self, *_: object) -> None:
        gradflow.forget(self._trace, self.bound_symbols)
        del self._trace.scopes[self._scopes :]
        assert self._outer is not None
        self._outer.extend(self.bound_symbols)

    def operations(self) -> list[Any]:
        """What was recorded, without the marks of contexts that were entered and left."""
        return [b for b in self.bound_symbols if not _is_context_marker(b)]

    def obstacle(self) -> str | None:
        """Why the operations cannot stand for what was interpreted, or None."""
        return None if self._modes_now() == self._modes else "it switches grad mode or autocast for what comes after it"

    def _modes_now(self) -> tuple[Any, ...]:
        return bool(self._data.is_grad_enabled), tuple(self._data.autocast_stack.stack)


def _is_context_marker(bsym: Any) -> bool:
    """Entering and leaving no_grad or autocast is recorded as a symbol that only top-level traces can hold."""
    return bool(bsym.sym.tags) and OpTags.CTX_MANAGER_ENTER_EXIT_OP in bsym.sym.tags


def raise_in_program(error: BaseException) -> Any:
    """Raise an exception at the place of the call in the interpreted program."""
    return do_raise(error)


def add_note(error: BaseException, note: str) -> None:
    """PEP 678's ``add_note``, on Python 3.10 too; not twice, and not to hookkit's own refusals, which say it."""
    if isinstance(error, HookError):
        return
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def is_made(provenance: Any) -> bool:
    """Whether a value was made while the program is traced, judged by how the program came by it."""
    instruction = getattr(provenance.inst, "opname", None) or getattr(provenance.inst, "value", provenance.inst)
    return instruction not in _READING or any(is_made(p) for p in provenance.inputs)


_READING = ("INPUT_ARGS", "INPUT_KWARGS", "INPUT_FN", "LOAD_ATTR", "BINARY_SUBSCR", "CONSTANT")
