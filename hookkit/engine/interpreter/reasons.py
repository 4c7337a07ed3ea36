"""Why a call cannot be traced, in the terms of the program, and where a program is that torch and thunder run."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from types import CodeType
from typing import Any

import thunder
import torch
from thunder.core.interpreter import get_interpreterruntimectx

from hookkit.call import Source
from hookkit.errors import HookError

__all__ = ["in_words", "is_users", "user_source"]

_OWN = tuple(os.path.dirname(os.path.abspath(str(path))) + os.sep for path in (torch.__file__, thunder.__file__))
_HOOKKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["platlib"] + os.sep)

# What thunder 0.2.6 says, and what the program did.
_SAID = (
    (r"Exception encountered when doing automatic registration for (\w+)", r"calls Tensor.\1()"),
    (
        r"casting a TensorProxy to a Python (\w+) is not supported",
        r"uses the value of a tensor as a Python \1, which is known only when the program runs",
    ),
    (r"Can't call numpy\(\) on Tensor", "calls Tensor.numpy()"),
    (r"(\w+)\(\) of a tensor is not known while a call is traced", r"calls Tensor.\1()"),
)


def is_users(file: str) -> bool:
    """Whether a file is not torch's, thunder's, hookkit's or Python's own."""
    if file.startswith("<frozen") or file.startswith((*_OWN, _HOOKKIT)):
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


def user_source() -> Source | None:
    """Where the user's program is: its innermost line that is not in torch, thunder, hookkit or Python itself."""
    outermost = None
    for frame in reversed(get_interpreterruntimectx().frame_stack):
        code: CodeType = frame.code
        positions: Any = frame.positions
        if positions is None or positions.lineno is None:
            continue
        if is_users(code.co_filename):
            return Source(code.co_filename, positions.lineno)
        outermost = outermost or Source(code.co_filename, positions.lineno)
    return outermost
