"""Why a call cannot be traced, in the terms of the program, and where a program is that torch and thunder run."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

import thunder
import torch
from thunder.core.interpreter import InterpreterError, get_interpreterruntimectx, unwrap

from hookkit.call import Source
from hookkit.errors import HookError

__all__ = ["in_words", "is_called_by_user", "is_users", "of_silent_failure", "user_source"]

_OWN = tuple(os.path.dirname(os.path.abspath(str(path))) + os.sep for path in (torch.__file__, thunder.__file__))
_HOOKKIT = str(Path(__file__).resolve().parents[2]) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["platlib"] + os.sep)
_OF_GRAPHS = ("<eval_with_key>", "fx_generated_")  # what torch.fx calls the code that it makes of a graph
_GENERATED = ("<frozen", "<attrs generated", "<__array_function__", *_OF_GRAPHS)

# What thunder 0.2.6 says, and what the program did.
_SAID = (
    (r"Exception encountered when doing automatic registration for (\w+)", r"calls Tensor.\1()"),
    (
        r"casting a TensorProxy to a Python (\w+) is not supported",
        r"uses the value of a tensor as a Python \1, which is known only when the program runs",
    ),
    (r"Can't call numpy\(\) on Tensor", "calls Tensor.numpy()"),
    (
        r"uses the value of a .* as (an? [\w ]+|text)(?: at .*)? \(data dependency\)",
        r"uses the value of a tensor as \1, which is known only when the program runs",
    ),
    (r"(\w+)\(\) at .* makes Python values of a tensor", r"calls Tensor.\1()"),
    (r"(\w+)\(\) of a tensor is not known while a call is traced", r"calls Tensor.\1()"),
    (r"launches the kernel '([^']+)' of Triton", r"launches the kernel \1 of Triton"),
)


def is_users(file: str) -> bool:
    """Whether a file is not torch's, thunder's, hookkit's or Python's own."""
    if file.startswith((*_GENERATED, *_OWN, _HOOKKIT)):
        return False
    return not file.startswith(_STANDARD) or file.startswith(_INSTALLED)


def in_words(error: BaseException) -> str:
    """Why a call cannot be traced, and the last line of the program that led there."""
    text = str(error).strip()
    line = text.splitlines()[0][:300] if text else ""
    for pattern, words in _SAID:
        if (match := re.search(pattern, text)) is not None:
            line = match.expand(words)
            break
    else:
        if isinstance(error, HookError):
            return f"{type(error).__name__}: {line}"
        line = f"{type(error).__name__}: {line}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{line} at {Source(frames[-1].filename, frames[-1].lineno or 0)}" if frames else line


def of_silent_failure(error: BaseException) -> str | None:
    """What an exception of thunder's without a text does not say: the line that raised it, and the program's.

    Nor one that says that something it wrapped is out of sync: an opaque call has changed it since the program read it.

    Args:
        error: what ended the tracing of a program. None is said of one with a text, or that the user's own line raised.
    """
    found = error.__cause__ if isinstance(error, InterpreterError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(found.__traceback__)
    text = str(found).strip()
    if (text and "out of sync" not in text) or not frames or is_users(frames[-1].filename):
        return None
    last = frames[-1]
    users = [f for f in frames if is_users(f.filename)]
    place = Source(users[-1].filename, users[-1].lineno or 0) if users else _line_around()
    said = "" if text else ", without a text,"
    return (
        f"thunder ended the tracing of the program with {type(found).__name__}{said} in {last.name}() at "
        f"{Source(last.filename, last.lineno or 0)}: {last.line}\n"
        f"{'The program was at' if users else 'The program is called at'} {place}. What it does there is not supported "
        "by thunder: do it outside of the compiled program, or in a function that runs as one operator, "
        "hookkit.opaque(function), or compile the program by thunder.dynamo.thunderfx."
    )


def user_source() -> Source | None:
    """Where the user's program is: its innermost line that is not in torch, thunder, hookkit or Python itself.

    Where it has none, a module of torch that is compiled as it is, that is the line which calls the compiled program.
    """
    for frame in reversed(get_interpreterruntimectx().frame_stack):
        code: CodeType = frame.code
        positions: Any = frame.positions
        if positions is None or positions.lineno is None:
            continue
        if code.co_filename.startswith(_OF_GRAPHS):
            found = _line_of_graph(frame)
            if found is not None:
                return found
        elif is_users(code.co_filename):
            return Source(code.co_filename, positions.lineno)
    return _line_around()


def _line_of_graph(frame: Any) -> Source | None:
    """The line of the program from which an operation of a graph comes, which Dynamo notes."""
    module = unwrap(frame.localsplus[0]) if frame.localsplus else None
    if not isinstance(module, torch.fx.GraphModule):
        return None
    lines: dict[int, Any] = getattr(module, "_lineno_map", None) or {}
    place = lines.get(frame.positions.lineno - frame.code.co_firstlineno)
    nodes = list(module.graph.nodes)
    trace = nodes[place].meta.get("stack_trace") if place is not None and place < len(nodes) else None
    places = [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace or "")]
    return next((Source(*found) for found in reversed(places) if is_users(found[0])), None)


def _line_around() -> Source | None:
    """The innermost line of the user's that Python runs, and not thunder's interpreter."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return Source(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def is_called_by_user() -> bool:
    """Whether the function that calls is the user's own, and not one of torch's, thunder's or hookkit's."""
    frames = get_interpreterruntimectx().frame_stack
    return not frames or is_users(frames[-1].code.co_filename)
