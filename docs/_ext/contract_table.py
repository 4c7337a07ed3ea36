"""The directive ``contract-table``: the cases of ``docs/contract.py``, which tests run, as a section for each group."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent.parent))


class ContractTable(SphinxDirective):
    """Shows every point of the contract with its state."""

    def run(self) -> list[nodes.Node]:
        from contract import CASES

        self.env.note_dependency(str(Path(__file__).parent.parent / "contract.py"))
        return [self.section(group, cases) for group, cases in itertools.groupby(CASES, key=lambda case: case.group)]

    def section(self, group: str, cases: Iterator[Any]) -> nodes.section:
        """The points of a group, as a table under a heading."""
        lines = ["| what a Function may do | state |", "|---|---|"]
        lines += [f"| {case.point} | {case.state} |" for case in cases]
        title, _ = self.parse_inline(group)
        section = nodes.section("", nodes.title(group, "", *title), ids=[nodes.make_id(group)], names=[group.lower()])
        self.state.document.note_implicit_target(section, section)
        self.state.nested_parse(StringList(lines, "contract.py"), 0, section)
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("contract-table", ContractTable)
    return {"parallel_read_safe": True}
