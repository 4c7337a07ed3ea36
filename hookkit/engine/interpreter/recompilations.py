"""Why a program is compiled again, for the log: what the programs that are compiled already find different."""

from __future__ import annotations

import linecache
import logging
import re
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from thunder.core.compile_data import _compile_data
from thunder.core.options import CACHE_OPTIONS

from hookkit.engine.interpreter import cache_guards
from hookkit.logs import RECOMPILES
from hookkit.registry import registry
from hookkit.targets import describe_callable, place_of

__all__ = ["note"]

# What is checked of the surroundings of a program (``populate_cache_info`` in thunder/__init__.py, and hookkit's own).
_SURROUNDINGS = {
    cache_guards.ARGUMENTS: "what it is called with, tensors and numbers left out, is not as it was",
    cache_guards.SETTINGS: "settings of torch are not as they were",
    cache_guards.STATE: "Python state that it read while it was compiled has changed",
}


def note(function: Any, args: Any, kwargs: Any) -> None:
    """Tell the log that a program is compiled, if that is not the first time, and why.

    Args:
        function: the program.
        args: what it is called with.
        kwargs: the same, by keyword.
    """
    if not RECOMPILES.isEnabledFor(logging.INFO):
        return
    data, stats = _compile_data.get()
    if not stats.interpreter_cache:
        return
    place = place_of(getattr(function, "forward", function))
    reasons: dict[str, list[str]] = {}
    for number, entry in enumerate(stats.interpreter_cache):
        reasons.setdefault(_why_not(entry, data, args, kwargs), []).append(str(number))
    named = f"{describe_callable(function)}{f' ({place})' if place else ''}"
    lines = [f"  not as in compilation {', '.join(numbers)}: {reason}" for reason, numbers in reasons.items()]
    RECOMPILES.info("%s", "\n".join([f"{named} is compiled again:", *lines]))


def _why_not(entry: Any, data: Any, args: Any, kwargs: Any) -> str:
    """What a compiled program checks first that is not as it was."""
    if data.cache_option is CACHE_OPTIONS.NO_CACHING:
        return "caching is off"
    try:
        entry.prologue_fn(*args, **kwargs)
    except Exception as error:
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_name == "prologue"]
        said = f"{error}".replace("\n", " ")[:300]
        return (_in_words(frames[-1], said) if frames else None) or f"{type(error).__name__}: {said}"
    return "nothing differs"


def _in_words(prologue: FrameType, said: str) -> str | None:
    """What a check of a prologue means; None if that is not known."""
    file, line = prologue.f_code.co_filename, prologue.f_lineno
    check = re.match(r"\s*check_(\w+)\((\w+), (.*)\)$", linecache.getline(file, line).rstrip())
    if check is None:
        return None
    kind, name, wanted = check.groups()
    value = prologue.f_locals.get(name)
    if name == "cache_info_hookkit_rules":
        return _of_rules(wanted.strip("'\""), str(value))
    surrounding = name.removeprefix("cache_info_")
    if surrounding in _SURROUNDINGS:
        return _SURROUNDINGS[surrounding]
    if surrounding != name:
        return f"{surrounding} is {value!r} and was {wanted}"
    if kind == "len":
        kind = {"args": "positional arguments", "kwargs": "keyword arguments"}.get(name, f"items of {name}")
        return f"it is called with {len(value or ())} and not {wanted} {kind}"
    lines = [linecache.getline(file, n).strip() for n in range(prologue.f_code.co_firstlineno, line)]
    path = _path(name, lines)
    return f"{path}: {said}" if kind.startswith("tensor") else f"{path} is {value!r} and was {wanted}"


def _of_rules(before: str, now: str) -> str:
    """How the rules and modes in force differ, from their fingerprints."""
    (rules_before, mode_before), (rules_now, mode_now) = (text.rpartition(";")[::2] for text in (before, now))
    names = {str(rule.serial): rule.name for rule in registry.current().rules}
    new = [names.get(s, s) for s in rules_now.split(",") if s not in rules_before.split(",")]
    gone = len(set(rules_before.split(",")) - set(rules_now.split(",")))
    said = [f"rules are in force that were not: {', '.join(new)}"] if new else []
    said += [f"{gone} {'rule is' if gone == 1 else 'rules are'} in force no longer, or changed since"] if gone else []
    said += [f"the mode is not the same: {mode_now.partition(':')[0]}"] if mode_before != mode_now else []
    return "; ".join(said) or "the rules in force have another order"


def _path(name: str, lines: Sequence[str]) -> str:
    """How the program names what a prologue has fetched, from the lines that fetched it."""
    for line in reversed(lines):
        found = re.match(rf'{name}(?:: ".*?")? = (?:[\w.]+\.get_thunder_module\()?(\w+)(.*?)\)?$', line)
        if found is None:
            continue
        holder, rest = found.groups()
        if holder == "globals":  # the program: a function, or a module
            return "" if name == "fn" else "self"
        if holder in ("args", "kwargs"):
            return name
        rest = re.sub(r"\.get_(?:parameter|buffer|submodule)\('([\w.]+)'\)?$", r".\1", rest.replace(".__globals__", ""))
        rest = re.sub(r"^\[?'([\w.]+)'\]?$", r".\1", rest)  # a name that is looked up in globals or in a module
        return f"{_path(holder, lines)}{rest}".lstrip(".")
    return name
