"""What is being done while a program compiles, shown after a few seconds where somebody watches.

On a terminal it is one line of standard error, which is taken away when the program is compiled; in a notebook an
output of the cell. Elsewhere, and where the environment variable ``HOOKKIT_PROGRESS`` is 0, there is nothing.

A thread looks at the stack of the one that compiles: what thunder is doing stands there, and compiling takes no longer.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["INTERVAL", "PATIENCE", "stage_of", "watch"]

PATIENCE = 3.0  # seconds until something is shown
INTERVAL = 0.5
VARIABLE = "HOOKKIT_PROGRESS"

# Functions in which a program is compiled from beginning to end, and those of its stages, by their names on the stack.
_WHOLE = ("get_computation_and_inputs", "acquire")
_STAGES = {
    "trace_program": "tracing",
    "grad_transform_on_trace": "differentiating",
    "split_into_forward_and_backward": "splitting into forward and backward",
    "transform_for_execution": "handing operations to executors",
    "del_last_used": "freeing what is not used again",
}
_OF = ("thunder", "hookkit")

_watched: set[int] = set()  # threads


class _Display(Protocol):
    """Where progress is shown."""

    def show(self, line: str) -> None:
        """Show a line in the place of the one before."""

    def close(self, line: str) -> None:
        """End, with a last line where there is room for one."""


class _Terminal:
    """A line of standard error."""

    def show(self, line: str) -> None:
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()

    def close(self, line: str) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class _Notebook:
    """An output of the cell that is running."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, line: str) -> None:
        shown = {"text/plain": line}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self, line: str) -> None:
        self.show(line)


def watch(count: Callable[[], int]) -> None:
    """Show what this thread does until the program is compiled that it has begun to compile.

    Args:
        count: gives the number of calls that were traced so far.
    """
    display, thread = _display(), threading.get_ident()
    if display is None or thread in _watched:
        return
    _watched.add(thread)
    context = contextvars.copy_context()  # a notebook's kernel knows by it to which cell an output belongs
    threading.Thread(
        target=context.run, args=(_show, display, thread, count), name="hookkit progress", daemon=True
    ).start()


def stage_of(thread: int) -> str | None:
    """What a thread does of compiling a program; None if it does not compile one."""
    stage, frame = "writing the program", sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if any(package in code.co_filename for package in _OF):
            if code.co_name in _WHOLE:
                return stage
            stage = _STAGES.get(code.co_name, stage)
        frame = frame.f_back
    return None


def _show(display: _Display, thread: int, count: Callable[[], int]) -> None:
    start, pause, line = time.monotonic(), PATIENCE, ""
    try:
        while True:
            time.sleep(pause)
            stage = stage_of(thread)
            if stage is None:
                break
            calls, seconds, pause = count(), time.monotonic() - start, INTERVAL
            line = f"hookkit: compiling for {seconds:.0f} s: {stage}, {_calls(calls)} so far"
            display.show(line)
        if line:
            display.close(f"hookkit: compiled in {time.monotonic() - start:.0f} s, {_calls(count())}")
    finally:
        _watched.discard(thread)


def _calls(number: int) -> str:
    return f"{number} call{'' if number == 1 else 's'}"


def _display() -> _Display | None:
    """Where progress is shown; None if nobody watches."""
    if os.environ.get(VARIABLE) == "0":
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return _Notebook(sys.modules["IPython"].display.display)
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return _Terminal() if is_terminal else None
