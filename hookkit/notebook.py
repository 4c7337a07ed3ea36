"""How what hookkit shows looks in a notebook: tables, and the list of rules."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["RuleList", "html_table"]

# A notebook's own style sheets set numbers and text at the right, which suits neither names nor places.
_CELL = "text-align: left; vertical-align: top"


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    notes: Iterable[str] = (),
    depths: Iterable[int] = (),
) -> str:
    """Rows as a table of HTML, aligned at the left; a column in which nothing stands is left out.

    Args:
        header: the names of the columns.
        rows: the cells of each row.
        notes: paragraphs below the table.
        depths: how far the first cell of each row is indented, below the row in which it belongs.
    """
    rows = [[str(cell) if cell is not None else "" for cell in row] for row in rows]
    filled = [number for number in range(len(header)) if not rows or any(row[number] for row in rows)]
    indents = [*depths, *([0] * len(rows))]

    def cells(tag: str, row: Sequence[object], depth: int = 0) -> str:
        indent = f"; padding-left: {1.5 * depth + 0.5}em" if depth else ""
        first, *others = (html.escape(str(row[number])) for number in filled)
        found = [f'<{tag} style="{_CELL}{indent}">{first}</{tag}>']
        return "".join([*found, *(f'<{tag} style="{_CELL}">{other}</{tag}>' for other in others)])

    body = "".join(f"<tr>{cells('td', row, depth)}</tr>" for row, depth in zip(rows, indents, strict=False))
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>{below}"


class RuleList(list[Any]):
    """A list of rules that shows itself a rule a line, and in a notebook as a table: the program's own rules first."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no rules"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # IPython does not ask __repr__ of a list

    def _repr_html_(self) -> str:
        own, ships = [rule for rule in self if not rule.ships], [rule for rule in self if rule.ships]
        table = _table(own) if own else ""
        if not ships:
            return table or "<p>no rules</p>"
        opened = "" if own else " open"
        return (
            f"{table}<details{opened}><summary>{len(ships)} that ship with hookkit</summary>{_table(ships)}</details>"
        )


def _table(rules: Sequence[Any]) -> str:
    rows = [(rule.name, _targets(rule), rule.mode, rule.priority, rule.declared_at) for rule in rules]
    return html_table(("rule", "takes", "mode", "priority", "declared at"), rows)


def _targets(rule: Any) -> str:
    named = [str(target) for target in rule.targets]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
