"""References by annotations: ``hookkit.rule.Rule``, where a class is defined, leads to ``hookkit.Rule``, its public name."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Find a name of hookkit's by its last part."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("hookkit."):
        return None
    name = f"hookkit.{target.rpartition('.')[2]}"
    if name == target:
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], name, node, content
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the resolver."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
