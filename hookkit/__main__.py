"""The command line.

``python -m hookkit`` says what is installed and in force, ``--rules`` lists the rules, ``check`` compares small
programs with eager PyTorch on this installation, ``explain`` says which rules would take which calls of a program.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import attrs
import torch

import hookkit
from hookkit import compat, doctor, install, patch
from hookkit.entry_points import ENTRY_POINT_GROUP, entry_points
from hookkit.errors import HookError
from hookkit.reporting import explain
from hookkit.targets import NameTarget

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0; 1 if a program differs from eager PyTorch or the one to explain cannot be traced; 2 if the
        arguments are wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m hookkit", description=__doc__)
    parser.add_argument("--version", action="version", version=hookkit.__version__)
    parser.add_argument(
        "--rules",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="list the rules, or those of this name, pattern of names, or target",
    )
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("check", help="compare small programs with eager PyTorch on this installation")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("explain", help="say which rules would take which calls of a program")
    command.add_argument("function", help="the program, as module:function")
    command.add_argument(
        "--inputs",
        help="its example inputs, as module:name of a tuple of arguments, or of a function that returns one; by "
        "default example_inputs in the program's module",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            return _check(options.json)
        if options.command == "explain":
            return _explain(options.function, options.inputs, options.json)
        print(_rules(options.rules) if options.rules is not None else _information())
    except HookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _information() -> str:
    """The versions, what does not fit them, and how many rules there are, from where."""
    rules = hookkit.rules()
    points = [
        f"{point.name} = {point.value} ({f'{point.dist.name} {point.dist.version}' if point.dist else 'unknown'})"
        + (", left out by HOOKKIT_DISABLE_PLUGINS" if left_out else "")
        for point, left_out in entry_points()
    ]
    waiting = [f"{rule.name}{names}" for rule in rules if (names := _open_names(rule))]
    return "\n".join(
        [
            *_version_lines(),
            *_section("compat measures", compat.active_measures()),
            *_section("left out, as it does not fit", [*map(str, patch.left_out), *_refused_targets(rules)]),
            *_section(f"entry points {ENTRY_POINT_GROUP!r}", points),
            *_section("rules for what is not imported yet", waiting),
            *_section(
                "more",
                [
                    f"{len(rules)} rules are in force: --rules lists them, --rules '*checkpoint*' some of them",
                    "check compares small programs with eager PyTorch here",
                ],
            ),
        ]
    )


def _rules(pattern: str) -> str:
    """The rules of a name, pattern or target."""
    found = hookkit.rules(pattern)
    if not found:
        return f"no rule's name or target is like {pattern!r}"
    return "\n".join(f"{rule}{_open_names(rule)}" for rule in found)


def _versions() -> dict[str, str]:
    """What is installed here, and the GPU if there is one."""
    versions = {
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "thunder": importlib.metadata.version("lightning-thunder"),
        "hookkit": f"{hookkit.__version__}, {'enabled' if install.is_enabled() else 'disabled'}",
    }
    if torch.cuda.is_available():
        versions["CUDA"] = f"{torch.version.cuda}, {torch.cuda.get_device_name()}"
    return versions


def _version_lines() -> list[str]:
    return [f"{name:<8}  {version}" for name, version in _versions().items()]


def _section(title: str, items: Sequence[str]) -> list[str]:
    width = max(shutil.get_terminal_size().columns, 40)
    wrapped = (
        textwrap.fill(item, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
        for item in items or ("none",)
    )
    return [f"{title}:", *wrapped]


def _refused_targets(rules: Sequence[hookkit.Rule[..., Any]]) -> list[str]:
    return [f"calls of {misfit} are refused by the rule {rule.name}" for rule in rules for misfit in rule.misfits]


def _open_names(rule: hookkit.Rule[..., Any]) -> str:
    states = [t.state for t in rule.targets if isinstance(t, NameTarget)]
    missing = [state for state in states if state != "resolved"]
    return f"; {'; '.join(missing)}" if missing else ""


def _check(as_json: bool) -> int:
    rows = list(doctor.check())
    if as_json:
        print(json.dumps({"versions": _versions(), "programs": [attrs.asdict(row) for row in rows]}, indent=2))
    else:
        print("\n".join([*_version_lines(), "", doctor.table(rows)]))
    return 0 if all(row.ok for row in rows) else 1


def _explain(function: str, inputs: str | None, as_json: bool) -> int:
    program = _load(function)
    given = _load(inputs or f"{function.partition(':')[0]}:example_inputs")
    arguments = given() if callable(given) else given
    arguments = arguments if isinstance(arguments, tuple | list) else (arguments,)
    explanation = explain(program, *arguments)
    print(json.dumps(explanation.to_dict(), indent=2) if as_json else explanation)
    return 1 if explanation.error is not None else 0


def _load(name: str) -> Any:
    """What a name ``module:name`` stands for; the module is imported."""
    module, _, qualname = name.partition(":")
    if not (module and qualname):
        raise HookError(f"{name!r} is not of the form module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise HookError(
            f"{name!r} is not there: {error}. The example inputs of a program are a tuple, or a function that returns "
            "one, called example_inputs in the program's module, or named with --inputs module:name."
        ) from error
    return found


if __name__ == "__main__":
    sys.exit(main())
