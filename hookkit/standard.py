"""Python's own functions as targets, and modules that Python does not find."""

from __future__ import annotations

import builtins
import difflib
import importlib.util
import pkgutil
import sys
import types
from typing import Any

__all__ = ["is_pythons_own", "missing_module", "refused"]

# What the interpreter of a program calls itself, for the program's syntax or for its own ends.
_INTERPRETERS_OWN = frozenset(
    {
        "__build_class__",
        "__import__",
        "any",
        "callable",
        "compile",
        "delattr",
        "dir",
        "eval",
        "exec",
        "getattr",
        "globals",
        "hasattr",
        "hash",
        "id",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "locals",
        "next",
        "setattr",
        "vars",
    }
)
_OF_TYPES = types.WrapperDescriptorType | types.MethodDescriptorType | types.ClassMethodDescriptorType


def refused(function: Any) -> str | None:
    """Why one of Python's own functions is no target, in words; None if it is one."""
    advice = (
        "which the interpreter of every program calls for its own ends; give a function of the program, or of torch"
    )
    owner = getattr(function, "__objclass__", None) if isinstance(function, _OF_TYPES) else None
    of_type = str(getattr(owner, "__name__", ""))
    if owner is not None and vars(builtins).get(of_type) is owner:
        return f"a method of Python's {of_type}, {advice}"
    name = str(getattr(function, "__name__", ""))
    if name in _INTERPRETERS_OWN and getattr(builtins, name, None) is function:
        return f"a function of Python's, {advice}"
    return None


def is_pythons_own(function: Any) -> bool:
    """Whether a function is written in C and belongs to Python, so that torch and thunder call it, too."""
    module = getattr(function, "__module__", None)
    return (
        isinstance(function, types.BuiltinFunctionType)
        and isinstance(module, str)
        and module.partition(".")[0] in sys.stdlib_module_names
    )


def missing_module(name: str) -> str | None:
    """Why a module that is not imported cannot be, although the package in which it were is; None if it may come.

    Nothing is imported.
    """
    package, _, last = name.rpartition(".")
    parent = sys.modules.get(package)
    spec = getattr(parent, "__spec__", None)
    if parent is None:
        return missing_module(package) if package else None
    if spec is None or getattr(spec, "_initializing", False):
        return None
    path = getattr(parent, "__path__", None)
    if path is None:
        return f"{package} is imported and is no package, so that there is no module {name}"
    if importlib.util.find_spec(name) is not None:
        return None
    known = {module.name for module in pkgutil.iter_modules(path)}
    near = difflib.get_close_matches(last, known, n=3)
    return f"{package} is imported and has no module {last!r}" + (f"; nearest: {', '.join(near)}" if near else "")
