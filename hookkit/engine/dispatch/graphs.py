"""Where the parts of ``thunderfx``'s graphs went, thunder, Inductor or PyTorch, and why."""

from __future__ import annotations

import weakref
from typing import Any

import attrs
import torch

__all__ = ["Graph", "GraphPart", "graphs_of", "left_to_pytorch", "operations_of"]

# For each compiler of thunderfx the graphs that PyTorch runs: after how many others, what they call, and why.
left_to_pytorch: weakref.WeakKeyDictionary[Any, list[tuple[int, tuple[str, ...], str]]] = weakref.WeakKeyDictionary()


@attrs.frozen
class GraphPart:
    """A part of a graph that one compiler got.

    Attributes:
        compiler: ``"thunder"``, ``"Inductor"``, or ``"PyTorch"``, which runs it as it is.
        operations: the names of what is called in it, in order.
    """

    compiler: str
    operations: tuple[str, ...]


@attrs.frozen
class Graph:
    """One of Dynamo's graphs.

    Attributes:
        parts: its parts, in order.
        reasons: why thunder did not get all of it.
    """

    parts: tuple[GraphPart, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        shown = [f"{len(part.operations)} in {part.compiler}" for part in self.parts]
        return ", ".join(shown) if shown else "no operations"


def graphs_of(jitted: Any) -> tuple[Graph, ...]:
    """The graphs that Dynamo made for what ``thunderfx`` returned, in order; none for what it did not return."""
    backend: Any = getattr(jitted, "_backend", None)
    if not hasattr(backend, "subgraph_infos"):
        return ()
    graphs = [_split(info) for info in backend.subgraph_infos]
    for place, operations, reason in reversed(left_to_pytorch.get(backend, [])):
        graphs.insert(place, Graph((GraphPart("PyTorch", operations),), (reason,)))
    return tuple(graphs)


def _split(info: Any) -> Graph:
    parts = []
    for module, compiled in info.submodule_to_compiled_functions.items():
        compiler = "thunder" if compiled.compiler.name == "THUNDER" else "Inductor"
        parts.append(GraphPart(compiler, operations_of(module)))
    return Graph(tuple(parts), tuple(dict.fromkeys(map(_in_words, info.split_reasons or ()))))


def operations_of(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """The names of what a graph calls."""
    return tuple(_name(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", None) or str(target)


def _in_words(reason: Any) -> str:
    """A reason of thunder's to split a graph, in one line."""
    cause = str(reason.exception).strip().splitlines() if reason.exception else []
    return " ".join(str(reason.info).split()) + (f": {cause[-1]}" if cause else "")
