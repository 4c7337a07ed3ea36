"""The directives ``operations-table`` and ``operations-list``: what the sweep over torch's operators found.

Both read ``docs/operations.json``, which ``scripts/sweep_operations.py`` writes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SOURCE = Path(__file__).parent.parent / "operations.json"
STATES = ("right", "refused", "error", "wrong")
COLUMNS = {"thunder": "thunder alone", "hookkit": "with hookkit"}


def worst(forms: dict[str, Any]) -> str | None:
    """The state of an operator: that of its worst form; None if it has no sample."""
    states = [f if isinstance(f, str) else f[0] for f in forms.values()]
    return max(states, key=STATES.index, default=None)


class OperationsTable(SphinxDirective):
    """Counts the operators in each state."""

    def run(self) -> list[nodes.Node]:
        return shown(self, counts(json.loads(SOURCE.read_text())["operators"]))


class OperationsList(SphinxDirective):
    """Lists what does not work with hookkit, and why."""

    def run(self) -> list[nodes.Node]:
        return shown(self, exceptions(json.loads(SOURCE.read_text())["operators"]))


def counts(operators: dict[str, Any]) -> list[str]:
    """The table of counts, in Markdown."""
    found = {column: Counter(worst(o[column]) for o in operators.values()) for column in COLUMNS}
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---|---|---|"]
    return lines + [f"| {state} | {' | '.join(str(found[c][state]) for c in COLUMNS)} |" for state in STATES]


def exceptions(operators: dict[str, Any]) -> list[str]:
    """What is not right with hookkit, as a list in Markdown: why, and which operators, with their forms."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, columns in sorted(operators.items()):
        for form, judged in columns["hookkit"].items():
            if judged != "right":
                found.setdefault((judged[0], reason(judged[1])), {}).setdefault(name, []).append(form)
    lines = []
    for (state, why), names in sorted(found.items(), key=lambda item: (STATES.index(item[0][0]), -len(item[1]))):
        listed = [named(name, forms, operators[name]["hookkit"]) for name, forms in names.items()]
        lines.append(f"- **{state}**, {why}: {', '.join(listed)}")
    return lines


def reason(message: str) -> str:
    """Why, without the operator's name and where it is called."""
    if "depends on the values of tensors" in message:
        return "what it returns depends on the values of tensors"
    text = re.sub(r"^\w+: \w+(\(\))? at \S+:\d+ ", "", message).replace("|", "\\|")
    return re.split(r"(?<=[\w)]); |(?<=[\w)])\. (?=[A-Z])", text)[0]


def named(name: str, forms: list[str], judged: dict[str, Any]) -> str:
    """An operator, and in which forms if not in all."""
    return f"`{name}`" if len(forms) == len(judged) else f"`{name}` ({', '.join(forms)})"


def shown(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """Markdown as nodes."""
    directive.env.note_dependency(str(SOURCE))
    container = nodes.container()
    directive.state.nested_parse(StringList(lines, SOURCE.name), 0, container)
    return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("operations-table", OperationsTable)
    app.add_directive("operations-list", OperationsList)
    return {"parallel_read_safe": True}
