"""The directive ``behaviours-table``: the programs of ``docs/behaviours.py``, which tests run, as one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent.parent))


class BehavioursTable(SphinxDirective):
    """Shows every behaviour, with what becomes of it by each way."""

    def run(self) -> list[nodes.Node]:
        from behaviours import BEHAVIOURS

        self.env.note_dependency(str(Path(__file__).parent.parent / "behaviours.py"))
        lines = ["| behaviour | eager | thunder.jit | thunderfx |", "|---|---|---|---|"]
        lines += [f"| {b.words} | {b.eager} | {b.jit} | {b.fx} |" for b in BEHAVIOURS]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, "behaviours.py"), 0, container)
        return container.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("behaviours-table", BehavioursTable)
    return {"parallel_read_safe": True}
