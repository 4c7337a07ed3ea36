"""The short way of an opaque call: a custom Function applied to tensors, its backward called without the engine.

What :mod:`hookkit.engine.eager` does for any callee costs several times a Function's own ``apply``. Most Functions take
tensors and plain values and return tensors, and their backward needs nothing but their node; for those, calling the
node does what the engine would: the checks of ``validate_outputs`` (torch/csrc/autograd/engine.cpp) and of ``PyNode``
(torch/csrc/autograd/python_function.cpp) are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch

from hookkit import compat
from hookkit.engine import reach
from hookkit.engine.eager import OpaqueState, is_own_leaf, materializes_grads, undefined_root
from hookkit.engine.tracing import add_note
from hookkit.engine.values import PLAIN, Slot, broadcasts_to

__all__ = ["DirectCall", "NodeState"]


class NodeState(OpaqueState):
    """What is kept between a Function's forward and its backward: its node."""

    __slots__ = ("call", "node", "owner")

    def __init__(self, node: Any, call: DirectCall, owner: Any, root: Any) -> None:
        self.node = node
        self.call = call
        self.owner = owner  # what keeps the node from freeing what it saved
        self.root = root

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradient of each input that needs one, by the input's index."""
        if any([g is None for g in gradients]):
            return self._through_engine(gradients)
        return self.validated(self.apply(gradients))

    def validated(self, found: tuple[Any, ...]) -> dict[int, torch.Tensor | None]:
        """What the Function's backward returned as the engine would hand it on."""
        return self.call.validated(self.node, found)

    def apply(self, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """What the Function's backward returns."""
        node = self.node
        result = node.apply(*gradients)
        node.maybe_clear_saved_tensors()  # unless the graph is kept
        return result if isinstance(result, tuple) else (result,)

    def _through_engine(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """Let the engine decide what undefined gradients become."""
        edges = [torch.autograd.graph.GradientEdge(self.node, i) for i in range(len(gradients))]
        used = self.starts(edges, gradients)
        places = self.call.places
        if not used:
            return dict.fromkeys(i for i, _ in places)
        roots, cotangents = zip(*used, strict=True)
        inputs = [self.node.next_functions[self.call.edges[place]][0].variable for _, place in places]
        keep = compat.graph_is_kept()
        found = torch.autograd.grad(roots, inputs, cotangents, retain_graph=keep, allow_unused=True)
        return {i: g for (i, _), g in zip(places, found, strict=True)}


@attrs.define(eq=False)
class DirectCall:
    """A Function applied to tensors and plain values.

    Attributes:
        function: the Function.
        arguments: the positional arguments, a slot for each tensor.
        needs: for each slot whether it requires grad.
        places: for each slot that needs a gradient its index and its place among the arguments.
        tensors: for each slot its index, its place, and whether it requires grad.
        edges: from the place of a tensor to its place among the node's ``next_functions``, which has tensors only.
    """

    function: type[Any]
    arguments: tuple[Any, ...]
    needs: tuple[bool, ...]
    places: list[tuple[int, int]]
    tensors: list[tuple[int, int, bool]]
    edges: dict[int, int]

    @classmethod
    def of(cls, function: type[Any] | None, arguments: Any, needs: tuple[bool, ...]) -> DirectCall | None:
        """The short way of a call, if it has one."""
        args, kwargs = arguments
        if function is None or kwargs or not any(needs):
            return None
        if not all(isinstance(a, (*PLAIN, Slot)) or callable(a) for a in args):
            return None
        indices = [a.index for a in args if isinstance(a, Slot)]
        if len(indices) != len(set(indices)):
            return None
        places = [(a.index, place) for place, a in enumerate(args) if isinstance(a, Slot) and needs[a.index]]
        tensors = [(a.index, place, needs[a.index]) for place, a in enumerate(args) if isinstance(a, Slot)]
        edges = {place: edge for edge, (_, place, _) in enumerate(tensors)}
        return cls(function, args, needs, places, tensors, edges)

    def operator(
        self,
        metadata: Sequence[Any],
        is_tuple: bool,
        note: str,
        refuse: Callable[[Any], NoReturn],
        is_fed_undefined: Callable[[], bool],
    ) -> Callable[..., Any]:
        """What an opaque call's operator does at run time, as one closure: it is called at every step.

        Args:
            metadata: for each output shape, dtype and device.
            is_tuple: whether the outputs come as a tuple.
            note: what is added to an exception that the Function raises (PEP 678).
            refuse: called with an output that is not as the metadata says.
            is_fed_undefined: whether the backward has to run without any gradient, too.
        """
        template, tensors, apply = self.arguments, self.tensors, compat.apply_of(self.function)
        expected = [(m.shape, m.dtype, m.device) for m in metadata]
        zeros = metadata[0].zeros if metadata else None
        count, parameter, tensor_type = len(expected), torch.nn.Parameter, torch.Tensor
        owner_of = compat.gradient_edge if compat.nodes_need_owners() else None
        set_grad_mode, grad_mode = torch._C._set_grad_enabled, torch.is_grad_enabled

        def forward(*values: Any) -> tuple[Any, ...]:
            args = list(template)
            for index, place, needed in tensors:
                value = values[index]
                if value.requires_grad:
                    if not needed:
                        value = value.detach()
                    elif type(value) is not parameter and not is_own_leaf(value):
                        value = value.detach().requires_grad_()
                elif needed:
                    value = value.detach().requires_grad_()
                args[place] = value
            before = grad_mode()
            set_grad_mode(True)
            try:
                output = apply(*args)
            except Exception as error:
                add_note(error, note)
                raise
            finally:
                set_grad_mode(before)
            outputs = output if is_tuple else (output,)
            if type(outputs) is not tuple or len(outputs) != count:
                refuse(output)
            node = getattr(outputs[0], "grad_fn", None)
            if node is None:
                refuse(output)
            results: list[Any] = []
            for tensor, (shape, dtype, device) in zip(outputs, expected):  # noqa: B905 (as many as counted above)
                fits = isinstance(tensor, tensor_type) and tensor.grad_fn is node
                if not fits or tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
                    refuse(output)
                results.append(tensor.detach())
            owner = owner_of(outputs[0]) if owner_of is not None else None
            root = None
            if is_fed_undefined():
                root = zeros if materializes_grads(node) else undefined_root(outputs[0])
            results.append(NodeState(node, self, owner, root))
            return tuple(results)

        return forward

    def backward_operator(
        self, inputs: dict[int, Any], backward: Callable[..., tuple[Any, ...]], note: str
    ) -> Callable[..., tuple[Any, ...]]:
        """What the backward operator does at run time, as one closure.

        Args:
            inputs: by index of each slot that gets a gradient its shape, dtype and device, in order.
            backward: what it does where gradients are undefined, or do not fit as they are.
            note: what is added to an exception that the Function raises.
        """
        place_of = dict(self.places)
        wanted = [(place_of[i], m.shape, m.dtype, m.device) for i, m in inputs.items()]
        rest = [p for p in range(len(self.arguments)) if p not in {place for place, *_ in wanted}]
        count, tensor_type = len(self.arguments), torch.Tensor

        def direct_backward(state: Any, *gradients: Any) -> tuple[Any, ...]:
            if type(state) is not NodeState or reach.undefined_outputs():
                return backward(state, *gradients)
            for gradient in gradients:
                if gradient is None:
                    return backward(state, *gradients)
            try:
                found = state.apply(gradients)
            except Exception as error:
                add_note(error, note)
                raise
            fitting: list[Any] = []
            if len(found) == count and all([found[place] is None for place in rest]):
                for place, shape, dtype, device in wanted:
                    g = found[place]
                    if not isinstance(g, tensor_type) or g.shape != shape or g.dtype is not dtype or g.device != device:
                        break
                    fitting.append(g)
                else:
                    return tuple(fitting)
            return backward(state, found=found)

        return direct_backward

    def keeps_its_inputs(self, node: Any, values: Sequence[torch.Tensor]) -> bool:
        """Whether the node keeps every tensor that it needs a gradient for, so that handing it on keeps no more."""
        kept = [t for t in node.saved_tensors if isinstance(t, torch.Tensor)]
        return all(any(torch._C._is_alias_of(values[i], t) for t in kept) for i, _ in self.places)  # type: ignore[attr-defined]

    def validated(self, node: Any, gradients: tuple[Any, ...]) -> dict[int, torch.Tensor | None]:
        """Gradients as the engine would hand them on."""
        expected = len(self.arguments)
        if len(gradients) > expected and all(g is None for g in gradients[expected:]):
            gradients = gradients[:expected]
        if len(gradients) != expected:
            raise RuntimeError(
                f"function {node.name()} returned an incorrect number of gradients (expected {expected}, got "
                f"{len(gradients)})"
            )
        for argument, gradient in zip(self.arguments, gradients, strict=True):
            if gradient is None:
                continue
            if not isinstance(gradient, torch.Tensor):
                raise TypeError(f"expected Variable or None (got {type(gradient).__name__})")
            if type(argument) is not Slot:
                place = self.arguments.index(argument) + 1
                raise RuntimeError(
                    f"function {node.name()} returned a gradient different from None at position {place}, but the "
                    "corresponding forward input was not a Variable"
                )
        nodes = [(i, place, node.next_functions[self.edges[place]][0]) for i, place in self.places]
        return {i: _fitted(node, place, leaf.variable, gradients[place]) for i, place, leaf in nodes}


def _fitted(node: Any, place: int, like: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    if gradient.shape == like.shape and gradient.dtype == like.dtype and gradient.device == like.device:
        return gradient
    if gradient.device != like.device:
        raise RuntimeError(
            f"Function {node.name()} returned an invalid gradient at index {place} - expected device {like.device} but "
            f"got {gradient.device}"
        )
    if gradient.shape != like.shape:
        if not broadcasts_to(tuple(like.shape), tuple(gradient.shape)):
            raise RuntimeError(
                f"Function {node.name()} returned an invalid gradient at index {place} - got {list(gradient.shape)} "
                f"but expected shape compatible with {list(like.shape)}"
            )
        gradient = gradient.sum_to_size(like.shape)
    if gradient.is_complex() and not like.is_complex():
        raise RuntimeError(
            f"Function {node.name()} returned an invalid gradient at index {place}: it is complex, the input is real"
        )
    return gradient.to(like.dtype)
