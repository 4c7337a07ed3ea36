"""Whether gradients are recorded in and after each part of a graph of ``thunderfx`` that ``torch.no_grad`` is split in.

Where a part ends inside of ``torch.no_grad``, thunder takes its mode for that of the part's results, which lose their
gradients, and on later runs leaves it switched off. So each part ends in the mode that the graph starts in (those that
start in another have their switch first, as PyTorch splits them), and what the graph ends in comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "split_module"]


def split_module(stock: Callable[..., GraphModule], graph: GraphModule, **options: Any) -> GraphModule:
    """``torch.fx``'s, for thunder's splitter: no part leaves the mode of gradients as it is in its middle.

    Args:
        stock: PyTorch's.
        graph: one of Dynamo's graphs.
        **options: passed on.
    """
    switches = _switches(graph.graph)
    split = stock(graph, **options)
    if not switches:
        return split
    at_entry = torch.is_grad_enabled()
    for part in split.children():
        if isinstance(part, GraphModule) and _ends_in(part.graph, at_entry) is not at_entry:
            _end_in(part, at_entry)
    if switches[-1].args[0] is not at_entry:
        _end_in(split, switches[-1].args[0])
    return split


def _switches(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.target is torch._C._set_grad_enabled]


def _ends_in(graph: Graph, at_entry: bool) -> Any:
    switches = _switches(graph)
    return switches[-1].args[0] if switches else at_entry


def _end_in(graph: GraphModule, mode: Any) -> None:
    outputs = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(outputs[0] if outputs else graph.graph._root):
        graph.graph.call_function(torch._C._set_grad_enabled, (mode,))
    graph.recompile()


MENDS = [
    Mend(
        "the mode of gradients after a split graph",
        "A graph of `thunderfx` that is split inside of `torch.no_grad` leaves the mode as it is inside, for the "
        "rest of the process, from its second run on.",
        program="""
def f(x):
    y = x * 2
    with torch.no_grad():
        z = y.frac()
    return y * z

x = torch.ones(2, requires_grad=True)
g = thunder.dynamo.thunderfx(f)
g(x)
g(x)
print(torch.is_grad_enabled())
torch.set_grad_enabled(True)
""",
        stock="",
        eager="True",
        patches=(
            Patch(
                "thunder.dynamo.splitter:split_module",
                around(split_module),
                "a program of thunderfx may lose gradients, and leave them switched off",
                takes=None,
                concerns_thunderfx=True,
            ),
        ),
    )
]
