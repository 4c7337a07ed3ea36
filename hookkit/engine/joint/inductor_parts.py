"""The parts of ``thunderfx``'s graphs that Inductor compiles: where their gradients are to have a graph.

What Inductor compiles has a backward that PyTorch takes for a constant, or refuses to differentiate. Where gradients
are to have a graph, or are asked for many at once, PyTorch runs the part again, on the inputs that were kept, and
differentiates that. Otherwise the backward is Inductor's, and a step pays for the references to the inputs alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from hookkit import compat
from hookkit.engine.interpreter.side_effects import Generators
from hookkit.engine.joint.autograd_link import is_to_have_graph, refuse_derivative
from hookkit.engine.joint.run_again import Again, GeneratorStates, Kept, NotAgain
from hookkit.engine.pytorch.dynamo_graphs import never_compiled
from hookkit.engine.pytorch.graph_run import Autocast, autocast_regions
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "compile_part", "split"]


def split(
    stock: Callable[..., Any], graph: Any, jit: Callable[..., Any], inductor: Callable[..., Any], *rest: Any
) -> Any:
    """``thunder.dynamo.splitter._splitter``, whose parts for Inductor are differentiable as often as in eager PyTorch.

    Args:
        stock: thunder's.
        graph: one of Dynamo's graphs.
        jit: what compiles the parts for thunder.
        inductor: what compiles the others.
        *rest: passed on.
    """
    return stock(graph, jit, partial(compile_part, inductor), *rest)


def compile_part(inductor: Callable[..., Any], graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A part of a graph, compiled.

    Args:
        inductor: what compiles it.
        graph: the part.
        inputs: tensors without data like those that it will be called with.
    """
    part = _Part.of(graph)  # Inductor may rewrite the graph
    return partial(part.run, inductor(graph, inputs))


@attrs.define(eq=False)
class _Part:
    """A part of a graph.

    Attributes:
        graph: what PyTorch runs.
        read: for each input whether it is read.
        autocasts: autocast around the graph that it is a part of.
        node_class: the class that its nodes of the autograd graph have; None until one is seen.
        places: for each output of such a node that is known where it is among what the part returns, and whether it is
            that, or what that is a view of.
    """

    graph: torch.fx.GraphModule
    read: list[bool]
    autocasts: list[Autocast]
    node_class: Any = None
    places: dict[int, tuple[int, bool]] = attrs.Factory(dict)

    @classmethod
    def of(cls, graph: torch.fx.GraphModule) -> _Part:
        devices = ("cpu", "cuda")
        return cls(
            torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)),
            [bool(n.users) for n in graph.graph.nodes if n.op == "placeholder"],
            [Autocast(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices],
        )

    def run(self, compiled: Callable[..., Any], *inputs: Any) -> Any:
        """Run what was compiled, and keep what it takes to run the part again.

        Args:
            compiled: what was compiled.
            *inputs: its inputs.
        """
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        kept = Kept(self, inputs, None)
        before = {i.grad_fn for i in inputs if isinstance(i, torch.Tensor)}
        outputs = compiled(*inputs)
        node = next((n for o in _leaves(outputs) if (n := _node(o)) is not None and n not in before), None)
        if node is None:
            return outputs
        if self.node_class is None:
            self._learn(node, outputs)
        place = kept.changed()
        if place is not None:  # which would keep itself alive: the graph of what it is now leads to the node
            kept.release(f"its input number {place} is changed in place by the program itself; return a new tensor")
        node.kept_by_hookkit = kept
        return outputs

    def _learn(self, node: Any, outputs: Any) -> None:
        """Learn which outputs of a node are which of the part's, and have its class's backward ask for a graph."""
        self.node_class = type(node)
        self.places = {}
        for place, output in enumerate(_leaves(outputs)):
            if isinstance(output, torch.Tensor):
                for tensor, is_base in ((output, False), (output._base, True)):
                    if tensor is not None and tensor.grad_fn is node:
                        self.places[tensor.output_nr] = place, is_base
        function = node._forward_cls  # a class that PyTorch has made for what it compiled of this part
        function.backward = staticmethod(partial(backward, function.backward))

    def built(self) -> Again:
        """The part as a function that PyTorch differentiates."""
        return Again(self._run_again, self.read, frozenset())

    def _run_again(self, *values: Any) -> tuple[torch.Tensor, ...]:
        state, generators = GeneratorStates(), Generators.now()
        with autocast_regions(self.autocasts), state.restored():
            outputs = _leaves(self.graph(*values))
            drawn = generators.drawn_from() or state.have_moved()
        generators.restore()
        if drawn:
            raise NotAgain("it draws random numbers, which Inductor does in its own way")
        roots = []
        for _, (place, is_base) in sorted(self.places.items()):
            root = outputs[place]._base if is_base else outputs[place]
            if root is None:
                raise NotAgain(f"its output number {place} is a view of a tensor in one run, and not in the other")
            roots.append(root)
        return tuple(roots)


@never_compiled
def backward(stock: Callable[..., Any], ctx: Any, *received: Any) -> Any:
    """The backward of what Inductor compiled; where the gradients are to have a graph, PyTorch's.

    Args:
        stock: the one of what Inductor compiled.
        ctx: its ctx.
        *received: the gradients; for some versions of PyTorch in a list.
    """
    kept: Kept = ctx.kept_by_hookkit
    if not is_to_have_graph():
        if not compat.graph_is_kept():
            kept.release()
        return stock(ctx, *received)
    gradients = received[0] if received and isinstance(received[0], list) else received
    try:
        return _backward_again(ctx, kept, gradients)
    except NotAgain as error:
        depends_on = [*(kept.inputs or ()), *gradients]
        with torch.no_grad():
            result = stock(ctx, *received)
        return refuse_derivative(str(error), depends_on, result)


def _backward_again(ctx: Any, kept: Kept, gradients: Sequence[Any]) -> tuple[Any, ...]:
    part: _Part = kept.program
    if kept.inputs is not None and len(ctx.needs_input_grad) != len(kept.inputs):
        raise NotAgain("what Inductor compiled takes other inputs than the part of the graph")
    unknown = [n for n, g in enumerate(gradients) if g is not None and n not in part.places]
    if unknown:
        raise NotAgain("what Inductor compiled returns other tensors than the part of the graph")
    ordered = [gradients[n] for n in sorted(part.places)]
    found = kept.gradients(ctx.needs_input_grad, ordered, [g is None for g in ordered])
    if not compat.graph_is_kept():
        kept.release()
        ctx.maybe_clear_saved_tensors()
    return tuple(found)


def _leaves(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _node(output: Any) -> Any:
    """The node of the autograd graph that what Inductor compiled made for an output, or for what that is a view of."""
    if not isinstance(output, torch.Tensor):
        return None
    for tensor in (output, output._base):
        node = tensor.grad_fn if tensor is not None else None
        if hasattr(getattr(node, "_forward_cls", None), "compiled_fw"):  # torch 2.7 to 2.15 call it so
            return node
    return None


PATCHES = [
    Patch(
        "thunder.dynamo.compiler:_splitter",
        around(split),
        "a second derivative through what thunderfx leaves to Inductor is lost",
        takes=("gm, thunder_jit, torch_inductor, _unused_sample_args, thunder_options",),
        concerns_thunderfx=True,
    )
]
