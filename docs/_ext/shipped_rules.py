"""The directive ``shipped-rules``: the rules of a file of ``hookkit/rules/`` as a table, from their declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch.overrides import resolve_name

import hookkit

FOLDER = Path(inspect.getfile(hookkit)).parent / "rules"


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
    return re.sub(r"hookkit\.rules\.\w+\.", "", name).removesuffix(".__get__").replace("autograd.function.F", "autograd.F")


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def is_either(name: str, both: set[str]) -> bool:
    return name in {f"{owner}.{n}" for owner in ("torch", "torch.Tensor") for n in both}


def description(rule: hookkit.Rule) -> str:
    """The first paragraph of the docstring of the provider, condition or predicate that has one."""
    docs = (inspect.getdoc(f) for f in functions(rule))
    text = next(filter(None, docs), "PyTorch runs it, and gives its gradient.").split("\n\n")[0]
    return re.sub(r"\s+", " ", text.replace("``", "`")).replace("|", "\\|")


def functions(rule: hookkit.Rule) -> Iterator[Any]:
    yield from (f for f in (rule.forward, rule._when, rule._meta) if f is not None)
    yield from (target.predicate for target in rule.targets if hasattr(target, "predicate"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("shipped-rules", ShippedRules)
    return {"parallel_read_safe": True}
