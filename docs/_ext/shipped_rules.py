"""The directive ``shipped-rules``: the rules of a file of hookkit as a table, from their declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch.overrides import resolve_name

import hookkit
from hookkit.targets import PredicateTarget

FOLDER = Path(inspect.getfile(hookkit)).parent


class ShippedRules(SphinxDirective):
    """Lists the rules of the file that is named."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = FOLDER / self.arguments[0]
        self.env.note_dependency(str(path))
        lines = ["| rule | mode, priority | takes | what it does |", "|---|---|---|---|"]
        for rule in hookkit.rules():
            if Path(rule.declared_at.file) == path:
                takes = ", ".join(f"`{name}`" for name in names(rule))
                lines.append(f"| `{rule.name}` | {rule.mode}, {rule.priority} | {takes} | {description(rule)} |")
        if len(lines) == 2:
            raise self.error(f"no rule is declared in {path}")
        container = nodes.container()
        self.state.nested_parse(StringList(lines, path.name), 0, container)
        return container.children


def names(rule: hookkit.Rule) -> list[str]:
    """What a rule takes; of a function of torch that is also a method of tensors, the name alone."""
    found = list(dict.fromkeys(map(name_of, rule.targets)))
    both = {name for name in map(last_part, found) if {f"torch.{name}", f"torch.Tensor.{name}"} <= set(found)}
    return list(dict.fromkeys(last_part(name) if is_either(name, both) else name for name in found))


def name_of(target: Any) -> str:
    """A target as people write it."""
    name = resolve_name(getattr(target, "callable", None)) or str(target)
    name = re.sub(r"hookkit\.(mends\.)?rules\.\w+\.", "", name)
    return name.removesuffix(".__get__").replace("autograd.function.F", "autograd.F")


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def is_either(name: str, both: set[str]) -> bool:
    return name in {f"{owner}.{n}" for owner in ("torch", "torch.Tensor") for n in both}


def description(rule: hookkit.Rule) -> str:
    """What the docstrings of its provider, meta function, conditions and predicates say, a paragraph of each."""
    parts = list(paragraphs(rule.forward, rule._meta))
    if rule.mode == "opaque" and rule.forward is None:
        parts.insert(0, "PyTorch runs it, and gives its gradient.")
    conditions = [rule._when, *(target.predicate for target in rule.targets if isinstance(target, PredicateTarget))]
    parts += [
        f"Only {text[0].lower()}{text[1:]}".replace("Only whether", "Only where") for text in paragraphs(*conditions)
    ]
    return " ".join(parts).replace("|", "\\|")


def paragraphs(*functions: Callable[..., Any] | None) -> Iterator[str]:
    """The first paragraph of each docstring, in Markdown."""
    for doc in filter(None, (inspect.getdoc(f) for f in functions if f is not None)):
        yield re.sub(r"\s+", " ", doc.split("\n\n")[0].replace("``", "`"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("shipped-rules", ShippedRules)
    return {"parallel_read_safe": True}
