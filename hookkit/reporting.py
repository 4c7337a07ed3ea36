"""explain and report: what rules would do in a program, and what they did in one that is compiled.

The numbers come from ``hookkit.engine.dispatch.inspection``; here they become text, a table for notebooks, a
dictionary, and a picture.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import attrs

from hookkit.call import Source
from hookkit.engine.dispatch.graphs import Graph, graphs_of
from hookkit.engine.dispatch.inspection import (
    CompiledCall,
    CompiledRegion,
    CompiledStep,
    acquire,
    compiled_steps,
    with_depth,
)
from hookkit.engine.interpreter.call_log import CallRecord
from hookkit.engine.joint.transforms import eager_runs_of
from hookkit.errors import HookError
from hookkit.install import is_enabled
from hookkit.notebook import html_table
from hookkit.registry import rules
from hookkit.targets import NameTarget

__all__ = ["ExplainedCall", "Explanation", "Report", "explain", "report"]


@attrs.frozen
class ExplainedCall:
    """What the rules would do with one call.

    Attributes:
        name: what is called.
        source: where in the user's program, or None if that is not known.
        depth: in how many other calls that rules take it is.
        rule: the name of the rule that would take it, or None.
        outcome: ``"traced"``, ``"region"``, ``"opaque"``, ``"raised"``, or ``"not taken"``.
        reason: why it is opaque, or what it raised.
        others: the names of the rules that would take it if those before them did not.
        declined: the names of the rules that declined, and why.

    Example:
        >>> import hookkit, torch
        >>> call = hookkit.explain(lambda x: torch.sinc(x), torch.ones(3)).calls[0]
        >>> call.name, call.outcome
        ('sinc', 'opaque')
    """

    name: str
    source: Source | None
    depth: int
    rule: str | None
    outcome: str
    reason: str | None
    others: tuple[str, ...]
    declined: dict[str, str]

    def __str__(self) -> str:
        indent = "  " * self.depth
        lines = [f"{indent}{self.name}(){f' at {self.source}' if self.source else ''}"]
        if self.rule is None:
            lines.append(f"{indent}  left to thunder")
        else:
            lines.append(f"{indent}  taken by {self.rule}, {self.outcome}{f': {self.reason}' if self.reason else ''}")
        lines += [f"{indent}  next would be {name}" for name in self.others]
        lines += [f"{indent}  declined by {name}: {reason}" for name, reason in self.declined.items()]
        return "\n".join(lines)


@attrs.frozen(repr=False)
class Explanation:
    """What the rules would do in a program; made by :func:`explain`.

    Attributes:
        calls: the calls that at least one rule was asked about and could take, in the order of the program.
        unresolved: the lazy names that stand for nothing among the targets of rules that are not hookkit's own, by
            rule, and why.
        error: what tracing raised after the last of the calls, or None.
        missed: calls of an operation in a form that no rule matches, although one is for another form of it.

    Example:
        >>> import hookkit, torch
        >>> print(hookkit.explain(lambda x: torch.logit(x).relu(), torch.full((3,), 0.5)))
        2 calls would be taken by rules
        logit() at ...
          taken by unsupported_operations, opaque...
        relu() at ...
          taken by relu, traced
    """

    calls: tuple[ExplainedCall, ...]
    unresolved: dict[str, str]
    error: str | None = None
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        taken = sum(call.rule is not None for call in self.calls)
        lines = [f"{_count(taken, 'call')} would be taken by rules"]
        lines += [str(call) for call in self.calls]
        lines += [f"no target yet for {rule}: {why}" for rule, why in self.unresolved.items()]
        lines += [f"not taken: {missed}" for missed in self.missed]
        if self.error is not None:
            lines.append(f"tracing stopped here: {self.error}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{call.name}()",
                call.source,
                call.rule if call.rule is not None else "left to thunder",
                call.outcome,
                call.reason,
                "; ".join(
                    [f"next would be {name}" for name in call.others]
                    + [f"declined by {name}: {reason}" for name, reason in call.declined.items()]
                ),
            )
            for call in self.calls
        ]
        notes = [f"no target yet for {rule}: {why}" for rule, why in self.unresolved.items()]
        notes += [f"not taken: {missed}" for missed in self.missed]
        if self.error is not None:
            notes.append(f"tracing stopped here: {self.error}")
        header = ("call", "where", "rule", "how", "why", "others")
        return html_table(header, rows, notes, (call.depth for call in self.calls))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain Python values, ready for JSON."""
        return {
            "calls": [_plain(call) for call in self.calls],
            "unresolved": dict(self.unresolved),
            "error": self.error,
            "missed": list(self.missed),
        }


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What the rules that are in force here would do in a program.

    The program is traced, and neither compiled nor run: its tensors are not computed. What it does beside computing
    with tensors, such as printing, happens.

    Args:
        function: a function or module, or what ``thunder.jit`` returned.
        *args: example arguments.
        **kwargs: example keyword arguments.

    Returns:
        Which rule would take each call that at least one rule could take, which declined and why, whether traced or
        opaque, and the user's file and line.

    Raises:
        HookError: if hookkit is disabled.

    Example:
        >>> import hookkit, torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> explanation = hookkit.explain(Double.apply, torch.ones(3, requires_grad=True))
        >>> [(call.name, call.rule, call.outcome) for call in explanation.calls]
        [('Double', 'autograd_function', 'traced')]
    """
    if not is_enabled():
        raise HookError("hookkit is disabled, so no rule would take any call; hookkit.enable() puts the rules in force")
    acquired = acquire(function, args, kwargs)
    error = acquired.error
    return Explanation(
        calls=tuple(_explained(record, depth) for record, depth in with_depth(acquired.calls)),
        unresolved={
            rule.name: f"{target}: {target.state}"
            for rule in rules()
            if not rule.ships
            for target in rule.targets
            if isinstance(target, NameTarget) and target.state != "resolved"
        },
        error=f"{type(error).__name__}: {error}" if error is not None else None,
        missed=tuple(f"{missed} (rule {missed.rule.name})" for missed in acquired.missed),
    )


def _explained(record: CallRecord, depth: int) -> ExplainedCall:
    return ExplainedCall(
        name=record.name,
        source=record.source,
        depth=depth,
        rule=record.rule.name if record.rule is not None else None,
        outcome=record.outcome,
        reason=record.reason,
        others=tuple(c.rule.name for c in record.candidates if c.declined is None and c.rule is not record.rule),
        declined={c.rule.name: c.declined for c in record.candidates if c.declined is not None},
    )


@attrs.frozen(repr=False)
class Report:
    """What rules did in a compiled program; made by :func:`report`.

    Attributes:
        steps: what the compiled function ran last; ``thunderfx`` has one step for each of its graphs.
        graphs: for each of the graphs of ``thunderfx`` which operations went to thunder and which elsewhere, and why.
        eager_runs: how often PyTorch ran the program, uncompiled, because of which transform that was active around it.

    Example:
        >>> import hookkit, thunder, torch
        >>> jitted = thunder.jit(lambda x: torch.sigmoid(x))
        >>> _ = jitted(torch.ones(3, requires_grad=True))
        >>> report = hookkit.report(jitted)
        >>> report.calls[0].rule, report.calls[0].saved_bytes, report.saved_bytes
        ('sigmoid', 12, 12)
        >>> report.to_dict()["calls"][0]["outcome"]
        'traced'
        >>> report.to_svg()[:4]
        '<svg'
    """

    steps: tuple[CompiledStep, ...]
    graphs: tuple[Graph, ...] = ()
    eager_runs: dict[str, int] = attrs.Factory(dict)

    @property
    def calls(self) -> tuple[CompiledCall, ...]:
        """The calls that rules took, in the order of the program."""
        return tuple(call for step in self.steps for call in step.calls)

    @property
    def regions(self) -> tuple[CompiledRegion, ...]:
        """What was compiled once for several calls."""
        return tuple(region for step in self.steps for region in step.regions)

    @property
    def saved_bytes(self) -> int:
        """How much the whole program keeps for its backward in tensors."""
        return sum(step.saved_bytes for step in self.steps)

    def __str__(self) -> str:
        calls = self.calls
        lines = [f"{_count(len(calls), 'call')} taken by rules; {_size(self.saved_bytes)} saved for backward in all"]
        if calls:
            header = ("call", "rule", "where", "how", "forward", "backward", "saved", "replayed")
            table = [header, *(_row(call) for call in calls)]
            widths = [max(len(row[i]) for row in table) for i in range(len(header))]
            lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += [_region(region) for region in self.regions]
        lines += dict.fromkeys(f"{call.name} is opaque: {call.reason}" for call in calls if call.reason)
        lines += dict.fromkeys(f"{call.name} is no region: {call.no_region}" for call in calls if call.no_region)
        lines += self._notes()
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = ("call", "rule", "where", "how", "forward", "backward", "saved", "replayed", "why")
        rows = [(call.name, *_row(call)[1:], call.reason or call.no_region) for call in self.calls]
        notes = [f"{_size(self.saved_bytes)} saved for backward in all", *map(_region, self.regions)]
        notes += self._notes()
        return html_table(header, rows, notes, (call.depth for call in self.calls)) + self.to_svg()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain Python values, ready for JSON."""
        graphs = [
            {
                "parts": [{"compiler": p.compiler, "operations": list(p.operations)} for p in graph.parts],
                "reasons": list(graph.reasons),
            }
            for graph in self.graphs
        ]
        return {
            "calls": [_plain(call) for call in self.calls],
            "regions": [attrs.asdict(region) for region in self.regions],
            "saved_bytes": self.saved_bytes,
            "graphs": graphs,
            "eager_runs": dict(self.eager_runs),
        }

    def _notes(self) -> list[str]:
        """What was not in thunder."""
        lines = [
            f"run by eager PyTorch {_count(number, 'time')}: {transform} was active around the program"
            for transform, number in self.eager_runs.items()
        ]
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number} of Dynamo's: operations {graph}")
            lines += [f"  not in thunder: {reason}" for reason in graph.reasons]
        return lines

    def to_svg(self) -> str:
        """A picture of the compiled step in which the calls that rules took stand out.

        The forward runs down on the left, and what rules' calls keep and do in the backward stands beside them.

        Returns:
            The text of an SVG file.
        """
        return _Picture(self.steps).render()


def report(jitted: Any) -> Report:
    """What rules did in the program that a compiled function ran last.

    Args:
        jitted: what ``thunder.jit``, ``thunder.compile`` or ``thunder.dynamo.thunderfx`` returned, after a call.

    Returns:
        Each call that a rule took, with the rule, the user's file and line, traced or opaque and why, the number of
        operations in its forward and backward, the bytes it keeps for its backward, and how often it was replayed; of
        ``thunderfx`` also which operations of each of Dynamo's graphs went to thunder and which elsewhere, and why. Of
        each region how many calls are its, and what compiling it cost. How often PyTorch ran the program, uncompiled,
        and which transform was the reason.

    Raises:
        HookError: if it is something else, or was not called yet.

    Example:
        >>> import hookkit, thunder, torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> jitted = thunder.jit(lambda x: Double.apply(x))
        >>> _ = jitted(torch.ones(3, requires_grad=True))
        >>> [(call.name, call.rule, call.outcome) for call in hookkit.report(jitted).calls]
        [('Double', 'autograd_function', 'traced')]
    """
    return Report(tuple(compiled_steps(jitted)), graphs_of(jitted), eager_runs_of(jitted))


def _region(region: CompiledRegion) -> str:
    """A region in words."""
    cost = f"compiled in {region.seconds * 1000:.0f} ms" if region.seconds else "not compiled yet"
    return f"region {region.name}: {_count(region.calls, 'call')}, {cost}"


def _row(call: CompiledCall) -> tuple[str, ...]:
    return (
        "  " * call.depth + call.name,
        call.rule,
        str(call.source) if call.source else "?",
        call.outcome,
        str(call.forward_operations),
        "by thunder" if call.backward_operations is None else str(call.backward_operations),
        "?" if call.saved_bytes is None else _size(call.saved_bytes),
        str(call.replays),
    )


def _plain(call: CompiledCall | ExplainedCall) -> dict[str, Any]:
    values = attrs.asdict(call, recurse=False)
    values["source"] = {"file": call.source.file, "line": call.source.line} if call.source else None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(number: int) -> str:
    """A number of bytes, with the unit that people read."""
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class _Picture:
    """The drawing of compiled steps as SVG: plain shapes and text, readable on light and dark pages."""

    width, row, gap, margin = 320, 44, 10, 16

    def __init__(self, steps: Sequence[CompiledStep]) -> None:
        self._shapes: list[str] = []
        self._y = self.margin
        for number, step in enumerate(steps):
            self._title("forward" if len(steps) == 1 else f"forward of graph {number}", "backward")
            for call, operations in groupby(step.forward, key=lambda operation: operation.call):
                names = [operation.name for operation in operations]
                if call is None:
                    self._plain_operations(names)
                else:
                    self._hooked_call(step.calls[call])

    def render(self) -> str:
        """The picture as an SVG document."""
        width, height = 2 * self.width + 5 * self.margin, self._y + self.margin
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>'
            f"{''.join(self._shapes)}</svg>"
        )

    @property
    def _right(self) -> int:
        return self.width + 4 * self.margin

    def _title(self, left: str, right: str) -> None:
        for x, text in ((self.margin, left), (self._right, right)):
            self._text(x, self._y + 12, text, "#333333", bold=True)
        self._y += 12 + self.gap

    def _plain_operations(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        self._box(self.margin, "#eeeeee", "#bbbbbb", "#555555", shown)
        self._y += self.row + self.gap

    def _hooked_call(self, call: CompiledCall) -> None:
        fill, line = ("#ffe3c2", "#d9730d") if call.outcome == "opaque" else ("#cfe8ff", "#1769aa")
        where = str(call.source) if call.source else ""
        self._box(self.margin, fill, line, "#111111", f"{call.name}, {call.outcome} by {call.rule}", where)
        if call.backward_operations != 0:
            count = "by thunder" if call.backward_operations is None else _count(call.backward_operations, "operation")
            saved = "" if call.saved_bytes is None else f"from {_size(call.saved_bytes)} saved"
            self._box(self._right, fill, line, "#111111", f"backward of {call.name}: {count}", saved)
            y = self._y + self.row // 2
            self._shapes.append(
                f'<line x1="{self.margin + self.width}" y1="{y}" x2="{self._right}" y2="{y}" stroke="{line}" '
                'stroke-dasharray="4 3"/>'
            )
        self._y += self.row + self.gap

    def _box(self, x: int, fill: str, line: str, ink: str, *texts: str) -> None:
        self._shapes.append(
            f'<rect x="{x}" y="{self._y}" width="{self.width}" height="{self.row}" rx="6" fill="{fill}" '
            f'stroke="{line}"><title>{html.escape(" ".join(texts))}</title></rect>'
        )
        texts = tuple(text for text in texts if text)
        for number, text in enumerate(texts):
            self._text(x + 8, self._y + self.row // 2 + 4 + 16 * number - 8 * (len(texts) - 1), text, ink)

    def _text(self, x: int, y: int, text: str, ink: str, *, bold: bool = False) -> None:
        room = self.width // 7
        shown = text if len(text) <= room else "…" + text[1 - room :] if "/" in text else text[: room - 1] + "…"
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(f'<text x="{x}" y="{y}" fill="{ink}"{weight}>{html.escape(shown)}</text>')
