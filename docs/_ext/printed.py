"""The directive ``printed``: at build time, what the Python block before it prints.

The Python blocks of a page that stand before the directive are run in order, in one namespace, as the tests run them;
what the last of them printed is put in the directive's place. Output that is shown and not compared (a trace, say) is
so never out of date. With ``:svg:`` it is a picture.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Printed(SphinxDirective):
    """Shows what the Python block before the directive prints."""

    option_spec: ClassVar[dict[str, Any]] = {
        "language": directives.unchanged,
        "from": directives.unchanged,
        "until": directives.unchanged,
        "svg": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.doc2path(self.env.docname))
        lines = path.read_text().splitlines(keepends=True)
        text = run_blocks("".join(lines[: self.lineno - 1]), path.name).rstrip()
        if "from" in self.options:
            text = text[text.index(self.options["from"]) :]
        if "until" in self.options:
            text = text[: text.index(self.options["until"])].rstrip()
        if "svg" in self.options:
            return [nodes.raw("", f'<div class="picture wide">{text}</div>', format="html")]
        block = nodes.literal_block(text, text, language=self.options.get("language", "text"))
        return [block]


def run_blocks(page: str, name: str) -> str:
    """Run the Python blocks of a page, and return what the last one prints.

    Code is compiled under the page's own name, without its folder: it is what traces and reports show as the place.
    """
    import hookkit

    hookkit.enable()
    before = hookkit.rules()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    # thunder reads the lines of a program from linecache, for the comments of its traces.
    linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)
    try:
        for block in BLOCK.finditer(page):
            above = "\n" * page.count("\n", 0, block.start(1))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(above + block[1], name, "exec", dont_inherit=True), namespace)
    finally:
        linecache.cache.pop(name, None)
        hookkit.enable()
        for rule in hookkit.rules():
            if rule not in before:
                rule.unregister()
    return printed.getvalue()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("printed", Printed)
    return {"parallel_read_safe": False}
