"""Diagrams and plots, made when the site is built: the directives flow, layers, compile-times and sweep-matrix.

``flow`` and ``layers`` are lists, which the style sheet shows as boxes, so that they fit every screen and are text to a
reader of the Markdown pages. The other two are SVG, in colours of the style sheet.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from operations_table import COLUMNS, SOURCE, STATES, worst
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent.parent
TIMES = ROOT / "docs/compile_times.json"
sys.path.insert(0, str(ROOT / "scripts"))
import layering  # noqa: E402  (a script of the repository)


class Flow(SphinxDirective):
    """Shows a list as boxes from top to bottom, with arrows; a list in an item as boxes side by side."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        container = nodes.container()
        self.state.nested_parse(self.content, self.content_offset, container)
        for found in container.findall(nodes.bullet_list):
            if found.parent is container:
                found["classes"].append("flow")
        return container.children


class Layers(SphinxDirective):
    """Shows the order of imports that ``scripts/layering.py`` checks, as boxes on top of each other."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(layering.__file__)
        container = nodes.container()
        lines = [f"- {' '.join(f'`{name}`' for name in group)}{about(group)}" for group in layering.ORDER]
        self.state.nested_parse(StringList(lines, "layering.py"), 0, container)
        (found,) = container.children
        found["classes"].append("layers")
        for item, group in zip(found.children, layering.ORDER, strict=True):
            item["classes"] += ["engine"] if group[0].startswith("engine/") else []
        return container.children


def about(group: list[str]) -> str:
    """What lives in a folder, as its docstring says."""
    path = ROOT / "hookkit" / group[0] / "__init__.py"
    if not path.is_file() or not group[0].endswith("/"):
        return ""
    doc = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    return f" {doc.replace('``', '`')}"


class Picture(SphinxDirective):
    """Shows an SVG."""

    source: Path
    about: str

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(self.source))
        drawing = self.draw(json.loads(self.source.read_text()))
        raw = nodes.raw("", f'<div class="picture">{drawing}</div>', format="html")
        return [raw]

    def draw(self, figures: dict[str, Any]) -> str:
        """The picture of what the source has."""
        raise NotImplementedError


class CompileTimes(Picture):
    """Plots the time until the first gradient against the number of applications of a Function."""

    source = TIMES
    width, height, left, bottom, top, right = 480, 330, 48, 42, 12, 14
    ways = {  # noqa: RUF012  (in the order of the legend)
        "stock": "thunder alone",
        "plain": "a plain function",
        "aot_eager": "torch.compile, aot_eager",
        "custom": "with hookkit",
    }

    def draw(self, figures: dict[str, Any]) -> str:
        rows = figures["applications"]
        self.places = [row["n"] for row in rows]
        seconds = [row[way] for row in rows for way in self.ways]
        self.low, self.high = math.floor(math.log10(min(seconds)) * 2) / 2, math.log10(max(seconds) * 1.2)
        body = [*self.axes(), *(part for way in self.ways for part in self.line(way, rows)), *self.legend()]
        title = "Seconds until the first gradient is there, against the number of applications of a Function"
        return svg(self.width, self.height, title, body)

    def x(self, n: float) -> float:
        share = math.log(n / self.places[0]) / math.log(self.places[-1] / self.places[0])
        return self.left + share * (self.width - self.left - self.right)

    def y(self, seconds: float) -> float:
        share = (math.log10(seconds) - self.low) / (self.high - self.low)
        return self.height - self.bottom - share * (self.height - self.bottom - self.top)

    def axes(self) -> Iterator[str]:
        floor, end = self.height - self.bottom, self.width - self.right
        for seconds in (0.05, 0.1, 0.3, 1, 3, 10, 30, 100):
            if self.low <= math.log10(seconds) <= self.high:
                y = self.y(seconds)
                yield f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}"/>'
                yield text(self.left - 8, y + 4, f"{seconds:g} s", anchor="end")
        for n in self.places:
            yield text(self.x(n), floor + 18, str(n), anchor="middle")
        yield text((self.left + end) / 2, self.height - 4, "applications", anchor="middle")
        yield f'<line class="axis" x1="{self.left}" y1="{floor}" x2="{end}" y2="{floor}"/>'

    def line(self, way: str, rows: list[dict[str, Any]]) -> Iterator[str]:
        points = [(self.x(row["n"]), self.y(row[way])) for row in rows]
        yield f'<polyline class="{way}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        for (x, y), row in zip(points, rows, strict=True):
            said = f"{self.ways[way]}, {row['n']} applications: {row[way]:.2g} s"
            yield f'<circle class="{way}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{tip(said)}</circle>'

    def legend(self) -> Iterator[str]:
        for number, (way, name) in enumerate(self.ways.items()):
            y = self.top + 12 + 18 * number
            yield f'<circle class="{way}" cx="{self.left + 14}" cy="{y - 4}" r="4"/>'
            yield text(self.left + 24, y, name)


class SweepMatrix(Picture):
    """Shows each operator of the sweep as a square in the colour of its state, without hookkit and with it."""

    source = SOURCE
    size, columns, gap = 9, 60, 26

    def draw(self, figures: dict[str, Any]) -> str:
        judged = {
            name: [worst(found[column]) for column in COLUMNS]
            for name, found in figures["operators"].items()
            if all(worst(found[column]) for column in COLUMNS)
        }
        # what thunder alone has right first, so that a square of one half stands where it stands in the other
        names = sorted(judged, key=lambda name: (*map(STATES.index, judged[name]), name))
        height = math.ceil(len(names) / self.columns) * self.size
        body = []
        for place, label in enumerate(COLUMNS.values()):
            top = place * (height + 2 * self.gap) + self.gap
            body.append(text(0, top - 8, label))
            body += self.squares(top, ((name, judged[name][place]) for name in names))
        title = "The state of each operator, under thunder alone and with hookkit"
        return svg(self.columns * self.size, 2 * height + 3 * self.gap, title, body)

    def squares(self, top: int, states: Iterable[tuple[str, str]]) -> Iterator[str]:
        for number, (name, state) in enumerate(states):
            x, y = number % self.columns * self.size, top + number // self.columns * self.size
            side = self.size - 1
            place = f'x="{x}" y="{y}" width="{side}" height="{side}"'
            yield f'<rect class="{state}" {place}>{tip(f"{name}: {state}")}</rect>'


def svg(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """An SVG that takes the room that there is."""
    size = f'viewBox="0 0 {width} {height}" style="max-width: {1.25 * width:g}px"'
    return f'<svg role="img" aria-label="{escape(title)}" {size}>{"".join(body)}</svg>'


def text(x: float, y: float, shown: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def tip(shown: str) -> str:
    return f"<title>{escape(shown)}</title>"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("flow", Flow)
    app.add_directive("layers", Layers)
    app.add_directive("compile-times", CompileTimes)
    app.add_directive("sweep-matrix", SweepMatrix)
    return {"parallel_read_safe": True}
