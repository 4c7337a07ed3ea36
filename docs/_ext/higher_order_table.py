"""The directive ``higher-order-table``: the programs of ``docs/higher_order_operators.py``, which tests run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent.parent))


class HigherOrderTable(SphinxDirective):
    """Shows every program with its states; with ``others`` the operators that no program here calls, and why."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        from higher_order_operators import CASES, INTERNAL, OTHERS

        self.env.note_dependency(str(Path(__file__).parent.parent / "higher_order_operators.py"))
        if self.arguments:
            lines = ["| operator | why |", "|---|---|"]
            lines += [f"| `{name}` | {why} |" for name, why in sorted({**OTHERS, **INTERNAL}.items())]
        else:
            lines = ["| operator | called as | under `thunder.jit` | through `thunderfx` |", "|---|---|---|---|"]
            lines += [f"| `{case.operator}` | {case.point} | {case.jit} | {case.fx} |" for case in CASES]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, "higher_order_operators.py"), 0, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("higher-order-table", HigherOrderTable)
    return {"parallel_read_safe": True}
