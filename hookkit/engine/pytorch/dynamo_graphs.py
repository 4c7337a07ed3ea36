"""The graphs that Dynamo makes of a custom Function's forward and backward, run by PyTorch as the Function would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.fx import GraphModule, Node

__all__ = ["as_function", "drop_contexts", "is_once_differentiable", "never_compiled", "write_no_grad"]

_ONCE = once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(function: type[Any]) -> bool:
    """Whether a Function's backward is marked with ``once_differentiable``."""
    return getattr(function.backward, "__code__", None) is _ONCE


def write_no_grad(module: GraphModule) -> None:
    """Have all of a graph run with grad mode off, inside of what switches it already."""
    switch, graph = torch._C._set_grad_enabled, module.graph
    with graph.inserting_before(_computes_first(module)):
        for value in (False, False):
            graph.call_function(switch, (value,))
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        for value in (False, True):
            graph.call_function(switch, (value,))
    module.recompile()


def drop_contexts(module: GraphModule) -> None:
    """Take away the contexts that nothing uses, which an older Dynamo makes beside each Function; thunder knows none.

    A graph inside of another, as of a checkpoint, would be left to inductor for one.
    """
    for inner in (m for m in module.modules() if isinstance(m, GraphModule)):
        unused = [n for n in inner.graph.nodes if n.target is FunctionCtx and not n.users]
        for node in unused:
            inner.graph.erase_node(node)
        if unused:
            inner.recompile()


def as_function(fwd: GraphModule, bwd: GraphModule) -> tuple[GraphModule, Callable[..., Any]]:
    """The operands of ``autograd_function_apply`` with which it has the second derivatives of the Function.

    Dynamo traces a backward with grad mode off, and writes that into its graph. A backward of which all runs with grad
    mode off all the same is taken for one that is marked with ``once_differentiable``.
    """
    graph = _copy(bwd)
    switches = _switches(graph)
    if switches and not switches[0].args[0] and switches[-1].args[0]:
        for switch in (switches[0], switches[-1]):
            graph.graph.erase_node(switch)
        switches = switches[1:-1]
        graph.recompile()
    if not (switches and not switches[0].args[0] and _computes_first(graph) is switches[0]):
        return fwd, graph
    count = sum(n.op == "placeholder" for n in graph.graph.nodes) - len(_output(fwd)[1])

    def once(*values: Any) -> Any:
        gradients, saved = values[:count], values[count:]
        return once_differentiable(lambda _, *given: graph(*given, *saved))(None, *gradients)

    return fwd, once


def _copy(module: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    return GraphModule(module, graph)


def _switches(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.target is torch._C._set_grad_enabled]


def _computes_first(module: GraphModule) -> Node:
    found: Node = next(n for n in module.graph.nodes if n.op != "placeholder")
    return found


def _output(module: GraphModule) -> Any:
    return next(n for n in module.graph.nodes if n.op == "output").args[0]


def never_compiled(function: Any) -> Any:
    """A function that Dynamo does not compile, nor what it calls.

    In a frame that Dynamo runs it would compile a backward, too, if that runs between two of its graphs.

    Args:
        function: a Python function, which is returned.
    """
    # ``torch.compiler.disable`` would cost time at each call; this costs none. torch 2.7 to 2.15 have it.
    frames = torch._C._dynamo.eval_frame
    never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, never)
    return function
