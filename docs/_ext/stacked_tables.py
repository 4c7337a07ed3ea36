"""Tables that fit a narrow screen: each cell carries the heading of its column, which the style sheet shows there.

A table of three columns and more that is wide is shown as a list of its rows where the screen is narrow (``site.css``).
"""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

NARROW = 48  # what a screen of 400 pixels has room for, in characters


def visit_table(writer: HTML5Translator, node: nodes.table) -> None:
    """Begin a table; one of several columns with long texts is marked."""
    columns = list(zip(*(row.children for row in node.findall(nodes.row)), strict=True))
    if len(columns) > 2 and sum(max(len(cell.astext()) for cell in column) for column in columns) > NARROW:
        node["classes"].append("stacked")
    HTML5Translator.visit_table(writer, node)


def visit_entry(writer: HTML5Translator, node: nodes.entry) -> None:
    """Begin a cell, with the heading of its column."""
    place = len(writer.body)
    HTML5Translator.visit_entry(writer, node)
    writer.body[place] = writer.body[place].replace(">", f' data-label="{escape(heading(node))}">', 1)


def depart_table(writer: HTML5Translator, node: nodes.table) -> None:
    """End a table."""
    HTML5Translator.depart_table(writer, node)


def depart_entry(writer: HTML5Translator, node: nodes.entry) -> None:
    """End a cell."""
    HTML5Translator.depart_entry(writer, node)


def heading(node: nodes.entry) -> str:
    """The heading of a cell's column."""
    row = node.parent
    group = row.parent.parent
    heads = list(group.findall(nodes.thead))
    if not heads or row.parent is heads[0]:
        return ""
    return heads[0][0][row.index(node)].astext()


def setup(app: Sphinx) -> dict[str, Any]:
    """Write tables and their cells so."""
    app.add_node(nodes.table, override=True, html=(visit_table, depart_table))
    app.add_node(nodes.entry, override=True, html=(visit_entry, depart_entry))
    return {"parallel_read_safe": True}
