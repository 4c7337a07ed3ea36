"""References by annotations: ``hookkit.rule.Rule``, where a class is made, leads to ``hookkit.Rule``, its public name.

A type in an annotation that is not public is shown without a link.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import hookkit


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Find a name of hookkit's by its last part."""
    target = node.get("reftarget", "")
    module, _, last = target.rpartition(".")
    if (
        node.get("refdomain") != "py"
        or not last.isidentifier()
        or not (module in ("", "hookkit") or target.startswith("hookkit."))
    ):
        return None
    found = env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], f"hookkit.{last}", node, content
    )
    if found is None and target.startswith("hookkit.") and last not in hookkit.__all__ and module != "hookkit":
        return content  # the type of something that is not public
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the resolver."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
