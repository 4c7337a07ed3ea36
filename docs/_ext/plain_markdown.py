"""A plain-Markdown version of each page beside its HTML, and ``llms.txt``, a list of them with a sentence on each.

Made from the resolved document trees, so that what directives bring in (API, printed output) is there, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.autosummary import autosummary_table

SKIPPED = (nodes.comment, nodes.target, nodes.raw, nodes.substitution_definition, nodes.meta, addnodes.index)
WRAPPERS = (nodes.document, nodes.container, nodes.compound, addnodes.desc_content, addnodes.only)


def inline(node: nodes.Node) -> str:
    """The Markdown of what stands in a line of text."""
    if isinstance(node, nodes.Text):
        return re.sub(r"\s+", " ", node.astext())
    if isinstance(node, nodes.literal):
        return f"`{node.astext()}`"
    if isinstance(node, nodes.image):
        return f"![{node.get('alt', '')}]({node['uri']})"
    text = "".join(_joined(node.children))
    if isinstance(node, nodes.strong):
        return f"**{text}**"
    if isinstance(node, nodes.title_reference):
        return f"*{text}*"
    if isinstance(node, nodes.reference):
        return f"[{text}]({link(node)})"
    return text


def _joined(children: list[nodes.Node]) -> Iterator[str]:
    """The Markdown of each; what is emphasised piece by piece, as the types of parameters are, in one."""
    for is_emphasised, group in itertools.groupby(children, key=lambda c: isinstance(c, nodes.emphasis)):
        if is_emphasised:
            yield f"*{''.join(child.astext() for child in group)}*"
        else:
            yield from map(inline, group)


def link(node: nodes.reference) -> str:
    """Where a reference leads: to the Markdown version of a page, if it leads to a page."""
    uri = node.get("refuri") or f"#{node.get('refid', '')}"
    return uri if "://" in uri else re.sub(r"\.html(?=$|#)", ".md", uri)


def blocks(node: nodes.Node, level: int) -> Iterator[str]:
    """The Markdown of a node, as blocks with a blank line between them."""
    if isinstance(node, autosummary_table):  # a comment, to writers that do not know it
        yield from within(node, level)
    elif isinstance(node, SKIPPED):
        return
    elif isinstance(node, nodes.section):
        for child in node.children:
            yield from blocks(child, level + 1)
    elif isinstance(node, nodes.title):
        yield f"{'#' * max(level, 1)} {inline(node)}"
    elif isinstance(node, nodes.rubric):
        yield f"**{inline(node)}**"
    elif isinstance(node, nodes.literal_block | nodes.doctest_block):
        language = node.get("language", "python" if isinstance(node, nodes.doctest_block) else "")
        yield f"```{'' if language == 'default' else language}\n{node.astext().rstrip()}\n```"
    elif isinstance(node, nodes.bullet_list | nodes.enumerated_list):
        yield "\n".join(items(node, level))
    elif isinstance(node, nodes.definition_list | nodes.field_list):
        for item in node.children:
            name, body = item.children[0], item.children[-1]
            yield f"**{inline(name)}**" + ("" if isinstance(node, nodes.definition_list) else ":")
            yield from within(body, level)
    elif isinstance(node, addnodes.desc):
        for child in node.children:
            if isinstance(child, addnodes.desc_signature):
                yield f"{'#' * (level + 1)} `{signature(child)}`"
            else:
                yield from within(child, level + 1)
    elif isinstance(node, nodes.Admonition) and not isinstance(node, nodes.system_message):
        title, *body = node.children if isinstance(node, nodes.admonition) else (None, *node.children)
        name = inline(title) if title is not None else type(node).__name__.capitalize()
        text = [f"**{name}**", *(block for child in body for block in blocks(child, level))]
        yield indented("\n\n".join(text), "> ")
    elif isinstance(node, nodes.block_quote):
        yield indented("\n\n".join(within(node, level)), "> ")
    elif isinstance(node, nodes.table):
        yield table(node)
    elif isinstance(node, nodes.transition):
        yield "---"
    elif isinstance(node, WRAPPERS):
        yield from within(node, level)
    else:
        text = inline(node).strip()
        if text:
            yield text


def signature(node: addnodes.desc_signature) -> str:
    return re.sub(r"\s+", " ", node.astext()).strip()


def within(node: nodes.Node, level: int) -> Iterator[str]:
    for child in node.children:
        yield from blocks(child, level)


def items(node: nodes.Element, level: int) -> Iterator[str]:
    for number, item in enumerate(node.children, 1):
        mark = f"{number}. " if isinstance(node, nodes.enumerated_list) else "- "
        yield mark + indented("\n\n".join(within(item, level)), " " * len(mark)).lstrip()


def table(node: nodes.table) -> str:
    rows = [
        ["<br>".join(b.replace("\n", " ") for b in within(cell, 1)).replace("|", "\\|") for cell in row.children]
        for row in node.findall(nodes.row)
    ]
    header, *body = rows if any(node.findall(nodes.thead)) else [[""] * len(rows[0]), *rows]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def indented(text: str, prefix: str) -> str:
    return "\n".join((prefix + line).rstrip() for line in text.splitlines())


def pages(app: Sphinx) -> list[str]:
    """The pages, in the order in which the tables of contents list them."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name not in found:
            found.append(name)
            for child in app.env.toctree_includes.get(name, ()):
                visit(child)

    visit(app.config.root_doc)
    return found


def summary(document: nodes.document) -> str:
    """The first sentence of a page."""
    paragraph = next((p for p in document.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)), None)
    text = re.sub(r"\s+", " ", paragraph.astext()) if paragraph is not None else ""
    return re.sub(":$", ".", re.split(r"(?<=[.?]) ", text)[0])


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the Markdown pages and llms.txt."""
    if error is not None or app.builder.format != "html":
        return
    lines = []
    for name in pages(app):
        document = app.env.get_and_resolve_doctree(name, app.builder)
        path = Path(app.outdir, f"{name}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(blocks(document, 0)) + "\n")
        if name == app.config.root_doc:
            lines += [f"# {app.config.project}", "", f"> {summary(document)}", ""]
            lines += ["Every page of the documentation as plain Markdown.", ""]
        title = app.env.titles[name].astext()
        if name.endswith("/index"):
            lines += ["", f"## {title}", ""]
        elif "/" not in name and name != app.config.root_doc and "## More" not in lines:
            lines += ["", "## More", ""]
        lines.append(f"- [{title}]({name}.md): {summary(document)}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Have the pages written when the HTML is."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
