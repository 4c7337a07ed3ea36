"""Generators into which an exception is thrown, and that are closed: thunder ends them without running them further.

``contextlib.contextmanager`` throws what a ``with`` statement raises into its generator: a program may handle it there,
and what was switched has to be switched back.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Generator
from typing import Any

from thunder.core import jit_ext
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    InterpreterError,
    PseudoInst,
    _run_frame,
    do_raise,
    interpreter_ctx,
    unwrap,
    wrap_const,
)

from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "make_generator", "raised_in_generator"]


class _Throwing:
    """What thunder interprets instructions with; instead of the first one an exception is raised."""

    def __init__(self, compilectx: Any, error: BaseException) -> None:
        self._compilectx = compilectx
        self._error: BaseException | None = error

    def interpret(self, inst: Any, **state: Any) -> Any:
        error, self._error = self._error, None
        return self._compilectx.interpret(inst, **state) if error is None else do_raise(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compilectx, name)


def make_generator(stock: Callable[..., Any], frame: Any, compilectx: Any, runtimectx: Any) -> Any:
    """The generator that stands for a suspended frame of the interpreted program.

    Args:
        stock: thunder's, whose generator ends when something is thrown into it.
        frame: the frame.
        compilectx: what is known of the program.
        runtimectx: the state of the interpreter.
    """
    tracing = jit_ext._jit_ctx.get(None)

    def resumed(send_value: Any, thrown: BaseException | None) -> tuple[Any, Any]:
        """Run the frame as far as its next ``yield``, or to its end."""
        outer, raised = runtimectx.curexc, None
        try:
            with interpreter_ctx(compilectx, runtimectx):
                if thrown is None:
                    result, status = _run_frame(frame, compilectx, runtimectx, send_value=send_value)
                else:
                    frame.inst_ptr = _suspended_at(frame)[0]  # by which the handler is looked up
                    result, status = _run_frame(frame, _Throwing(compilectx, thrown), runtimectx)
                if status is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                    raised = runtimectx.curexc
        except Exception as error:
            raise InterpreterError(f"Encountered exception {type(error).__name__}: {error}") from error
        finally:
            runtimectx.curexc = outer
        if raised is not None:
            raise raised
        return result, status

    def generator() -> Generator[Any, Any, Any]:
        send_value: Any = None
        thrown: BaseException | None = None
        while True:
            result, status = resumed(send_value, thrown)
            if status is INTERPRETER_SIGNALS.RETURN_VALUE:
                return unwrap(result)
            item = unwrap(result)
            while True:
                try:
                    send_value, thrown = (yield item), None
                    break
                except BaseException as error:
                    if jit_ext._jit_ctx.get(None) is not tracing:  # it is collected after its program was traced
                        raise
                    thrown = error
                if not _suspended_at(frame)[1]:
                    break
                try:
                    item = _thrown_into(unwrap(frame.interpreter_stack.getitem_wrapped(-1)), thrown)
                except StopIteration as end:
                    send_value, thrown = None, None
                    _replace_delegate(frame.interpreter_stack, _ended(end.value))
                    break
                except BaseException as error:
                    thrown = error
                    break

    return wrap_const(generator())


def raised_in_generator(stock: Callable[[Any], Any], error: Any) -> Any:
    """What leaves a generator, from Python 3.12 on, instead of an exception that it raises.

    Args:
        stock: thunder's; of ``GeneratorExit``, with which a generator is closed, it asserts that there is none.
        error: the wrapped exception.
    """
    return stock(error) if isinstance(unwrap(error), Exception) else error


def _suspended_at(frame: Any) -> tuple[int, bool]:
    """At which instruction a suspended frame is, and whether that is a ``yield from``, its delegate on the stack."""
    instructions = list(dis.get_instructions(frame.code))
    at = next(i for i, inst in enumerate(instructions) if inst.offset == frame.lasti * 2)
    if sys.version_info < (3, 11):
        return frame.lasti, instructions[at].opname == "YIELD_FROM"
    after = instructions[at + 1]
    if after.opname != "RESUME" or (after.arg or 0) & 3 != 2:
        return frame.lasti, False
    return instructions[at - 1].offset // 2, True  # the SEND; around the YIELD_VALUE is what thunder does not know


def _thrown_into(delegate: Any, error: BaseException) -> Any:
    """What an iterator yields when an exception is thrown into it; it may raise, StopIteration where it ends."""
    if isinstance(error, GeneratorExit):
        if hasattr(delegate, "close"):
            delegate.close()
        raise error
    if not hasattr(delegate, "throw"):
        raise error
    return delegate.throw(error)


def _ended(value: Any) -> Generator[Any, Any, Any]:
    """A generator that has come to its end, with what it returns."""
    return value
    yield


def _replace_delegate(stack: Any, delegate: Any) -> None:
    with stack.set_cur_instruction(PseudoInst.SEND):
        stack.pop()
        stack.append(delegate)


MENDS = [
    Mend(
        "generators that are thrown an exception",
        "A generator into which an exception is thrown ends at once, and what it returns is None: "
        "`contextlib.contextmanager` undoes nothing where the body of `with` raises.",
        program="""
import contextlib

seen = []

@contextlib.contextmanager
def noting():
    try:
        yield
    finally:
        seen.append("left")

@thunder.jit
def f(x):
    with contextlib.suppress(ValueError), noting():
        raise ValueError
    return x

f(torch.ones(1))
print(seen)
""",
        stock="[]",
        eager="['left']",
        patches=(
            Patch(
                "thunder.core.interpreter:make_generator",
                around(make_generator),
                "what a with statement raises does not reach the generator of contextlib.contextmanager",
                takes=("frame, compilectx, runtimectx",),
            ),
            Patch(
                "thunder.core.interpreter:_stopiteration_error_intrinsic",
                around(raised_in_generator),
                "from Python 3.12 on a program fails that closes a generator which handles it",
                takes=("exc",),
            ),
        ),
    )
]
