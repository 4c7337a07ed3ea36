"""Runs the programs of the contract with hookkit and without it, and counts what becomes of them: cases.py [PATTERN].

The programs are those of ``docs/contract.py``: small ones around a custom ``torch.autograd.Function``, one for each
thing that it may do. Each is run by eager PyTorch, by thunder with hookkit enabled, and by thunder with hookkit
disabled, which is thunder as it was (imported with hookkit's help, as it cannot be imported on PyTorch 2.13 or newer
otherwise). PATTERN is a part of a program's description. ``--list`` prints every program, ``--show`` its source, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import io
import json
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from check_install import contract_of, raised_eagerly

import hookkit
from hookkit.testing import Difference, assert_same

ROOT = Path(__file__).parent.parent
OUTCOMES = ("right", "refused", "error", "wrong")
MEANINGS = {
    "right": "outputs, requires_grad and every gradient are eager PyTorch's, or the exception is",
    "refused": "hookkit raises an error that says what to do",
    "error": "another error",
    "wrong": "something differs from eager PyTorch, and nothing says so",
}


def without_hookkit(run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run with thunder as it was."""
    hookkit.disable()
    try:
        return run()
    finally:
        hookkit.enable()


def outcome(case: Any) -> tuple[str, str]:
    """What becomes of a program under thunder, as one of the outcomes and what is to be said about it."""
    program, arguments = case.make()
    further = [a for a in arguments if callable(a)]
    arguments = tuple(a for a in arguments if not callable(a))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # thunder prints the programs that it cannot compile
            jitted = assert_same(copy.deepcopy(program), *arguments)
            for derivative in further:
                assert_equal(derivative(jitted, *arguments), derivative(program, *arguments))
    except Difference as error:
        return "wrong", first_line(error)
    except hookkit.HookError as error:
        return "refused", first_line(error)
    except Exception as error:
        is_eager = type(error) is type(raised_eagerly(program, arguments))
        return ("right" if is_eager else "error"), f"{type(error).__name__}: {first_line(error)}"
    return "right", ""


def assert_equal(found: Any, expected: Any) -> None:
    """Compare what was computed of a program and of the compiled one."""
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError as error:
        raise Difference(str(error)) from error


def first_line(error: Exception) -> str:
    """The beginning of a message."""
    return next(iter(str(error).strip().splitlines()), "")[:200]


def rows(cases: list[Any], *, is_loud: bool) -> Iterator[dict[str, Any]]:
    """Run each program both ways."""
    for number, case in enumerate(cases, 1):
        if is_loud:
            print(f"\r{number} of {len(cases)}", end="", file=sys.stderr, flush=True)
        both = {"with": outcome(case), "without": without_hookkit(lambda case=case: outcome(case))}
        yield {"group": case.group, "point": case.point, **both}
    if is_loud:
        print("\r", end="", file=sys.stderr)


def table(found: list[dict[str, Any]]) -> str:
    """How many programs have each outcome."""
    counts = {way: Counter(row[way][0] for row in found) for way in ("without", "with")}
    lines = [f"{len(found)} programs, torch {torch.__version__}", f"{'':<9}{'thunder':>9}{'with hookkit':>14}"]
    for name in OUTCOMES:
        lines.append(f"{name:<9}{counts['without'][name]:>9}{counts['with'][name]:>14}   {MEANINGS[name]}")
    return "\n".join(lines)


def listing(found: list[dict[str, Any]], sources: list[str]) -> Iterator[str]:
    """Each program with what became of it."""
    for row, source in zip(found, sources, strict=True):
        yield f"{row['group']}: {row['point']}"
        for way, name in (("without", "thunder"), ("with", "with hookkit")):
            state, why = row[way]
            yield f"    {name:<13} {state}{f': {why}' if why else ''}"
        if source:
            yield textwrap.indent(source, "    | ")


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; return the exit status: 1 if a program is wrong, or fails, with hookkit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="a part of a program's description")
    parser.add_argument("--list", action="store_true", help="print each program's outcomes")
    parser.add_argument("--show", action="store_true", help="print each program's source, too")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    cases = [c for c in contract_of(ROOT).CASES if options.pattern in f"{c.group}: {c.point}".replace("`", "")]
    if not cases:
        parser.error(f"no program's description has {options.pattern!r} in it")
    found = list(rows(cases, is_loud=sys.stderr.isatty()))
    if options.list or options.show:
        sources = [inspect.getsource(case.make) if options.show else "" for case in cases]
        print("\n".join(listing(found, sources)), end="\n\n")
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "programs": found}, indent=2) + "\n")
    return 0 if all(row["with"][0] in ("right", "refused") for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
