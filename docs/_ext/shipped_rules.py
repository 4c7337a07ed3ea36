"""The directive ``shipped-rules``: the rules of a file of hookkit, each with what it does and takes.

Made from the declarations: what a rule does is what the docstrings of its providers and conditions say.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch.overrides import resolve_name

import hookkit
from hookkit.targets import PredicateTarget

FOLDER = Path(inspect.getfile(hookkit)).parent
MODES = {
    "auto": "traced where it can be",
    "trace": "traced",
    "opaque": "run by PyTorch",
    "inline": "traced as part of the program",
    "region": "compiled once for all calls that do the same",
}


class ShippedRules(SphinxDirective):
    """Lists the rules of the file that is named."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = FOLDER / self.arguments[0]
        self.env.note_dependency(str(path))
        found = [self.item(rule) for rule in hookkit.rules() if Path(rule.declared_at.file) == path]
        if not found:
            raise self.error(f"no rule is declared in {path}")
        return [nodes.definition_list("", *found, classes=["rules"])]

    def item(self, rule: hookkit.Rule) -> nodes.Node:
        """A rule: its name, how it works, what it does and what it takes."""
        name = nodes.literal(rule.name, rule.name)
        priority = str(rule.priority).replace("-", "\N{MINUS SIGN}")
        how = nodes.inline("", f" {MODES.get(rule.mode, rule.mode)}, priority {priority}")
        how["classes"].append("how")
        term = nodes.term("", "", name, how, ids=[f"rule-{nodes.make_id(rule.name)}"])
        paragraphs = [self.paragraph(description(rule))]
        takes = ", ".join(f"`{taken}`" for taken in names(rule))
        if takes:
            paragraphs.append(self.paragraph(f"Takes {takes}."))
        return nodes.definition_list_item("", term, nodes.definition("", *paragraphs))

    def paragraph(self, text: str) -> nodes.paragraph:
        inlines, _ = self.parse_inline(text)
        return nodes.paragraph("", "", *inlines)


def names(rule: hookkit.Rule) -> list[str]:
    """What a rule takes by name; of a function of torch that is also a method of tensors, the name alone."""
    targets = [target for target in rule.targets if not isinstance(target, PredicateTarget)]
    found = list(dict.fromkeys(map(name_of, targets)))
    both = {name for name in map(last_part, found) if {f"torch.{name}", f"torch.Tensor.{name}"} <= set(found)}
    return list(dict.fromkeys(last_part(name) if is_either(name, both) else name for name in found))


def name_of(target: Any) -> str:
    """A target as people write it."""
    name = resolve_name(getattr(target, "callable", None)) or str(target)
    return name.removesuffix(".__get__").replace("autograd.function.F", "autograd.F")


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def is_either(name: str, both: set[str]) -> bool:
    return name in {f"{owner}.{n}" for owner in ("torch", "torch.Tensor") for n in both}


def description(rule: hookkit.Rule) -> str:
    """What the docstrings of its provider, conditions and predicates say, the first paragraph of each."""
    # what a meta function says of itself is of no interest here, but what it asks of the arguments is
    parts = [*paragraphs(rule.forward), *(text for text in paragraphs(rule._meta) if text.startswith("Only"))]
    if rule.mode == "opaque" and rule.forward is None:
        parts.insert(0, "Has PyTorch run it and compute its gradient.")
    conditions = [rule._when, *(target.predicate for target in rule.targets if isinstance(target, PredicateTarget))]
    parts += [re.sub("^Whether", "Only where", text) for text in paragraphs(*conditions)]
    return " ".join(parts)


def paragraphs(*functions: Callable[..., Any] | None) -> Iterator[str]:
    """The first paragraph of each docstring, in Markdown."""
    for doc in filter(None, (inspect.getdoc(f) for f in functions if f is not None)):
        yield re.sub(r"\s+", " ", doc.split("\n\n")[0].replace("``", "`"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("shipped-rules", ShippedRules)
    return {"parallel_read_safe": True}
