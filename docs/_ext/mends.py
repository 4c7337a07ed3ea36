"""The directive ``mends``: what hookkit mends of thunder, from the declarations in ``hookkit/mends/``.

Each fault has a section: what is wrong, the program that shows it, and what that gives with and without hookkit.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import hookkit
from hookkit import install

FOLDER = Path(inspect.getfile(hookkit)).parent / "mends"


class Mends(SphinxDirective):
    """A section for each mend."""

    def run(self) -> list[nodes.Node]:
        for path in FOLDER.rglob("*.py"):
            self.env.note_dependency(str(path))
        return [self.section(mend) for mend in install.mends()]

    def section(self, mend: Any) -> nodes.section:
        section = nodes.section("", nodes.title("", mend.name[0].upper() + mend.name[1:]))
        section["ids"].append(f"mend-{nodes.make_id(mend.name)}")
        self.state.document.note_explicit_target(section)
        section += self.paragraph(mend.fault)
        if mend.program:
            section += nodes.literal_block(mend.program.strip(), mend.program.strip(), language="python")
            section += self.paragraph(given(mend))
        section += self.paragraph(means(mend))
        return section

    def paragraph(self, text: str) -> nodes.paragraph:
        inlines, _ = self.parse_inline(text)
        return nodes.paragraph("", "", *inlines)


def given(mend: Any) -> str:
    """What the program of a mend gives: by thunder alone, by PyTorch, and by hookkit if that is not the same."""
    alone = f"`{mend.stock}`" if mend.stock else "which depends on the version of PyTorch"
    text = f"thunder {' and '.join(mend.seen_in)} alone: {alone}. Eager PyTorch: `{mend.eager}`."
    return text + (f" hookkit refuses the program: `{mend.refused}`." if mend.refused else "")


def means(mend: Any) -> str:
    """What a mend consists of."""
    parts = [f"`{re.sub(r'torch._dynamo.variables.', '…', patch.target)}`" for patch in mend.patches]
    what = [f"replaces {', '.join(parts)}"] if parts else []
    if mend.rules:
        what.append(
            f"has {'rules' if len(mend.rules) > 1 else 'the rule'} {', '.join(f'`{r.name}`' for r in mend.rules)}"
        )
    if mend.extension is not None:
        what.append("takes part in interpreting the program")
    return f"hookkit {' and '.join(what)}."


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("mends", Mends)
    return {"parallel_read_safe": True}
