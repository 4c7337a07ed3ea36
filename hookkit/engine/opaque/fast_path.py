"""The short way of an opaque call: a custom Function applied to tensors, its backward called without the engine.

What :mod:`hookkit.engine.pytorch.graph_run` does for any callee costs several times a Function's own ``apply``. Most
Functions take tensors and plain values and return tensors, and their backward needs nothing but their node; for those
it is enough to call the node (:mod:`hookkit.engine.pytorch.node_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch

from hookkit import compat
from hookkit.engine.interpreter.attempt import add_note
from hookkit.engine.pytorch import node_run
from hookkit.engine.pytorch.graph_run import OpaqueState, is_own_leaf
from hookkit.engine.trace import reachability
from hookkit.engine.values.wrapping import PLAIN, Slot, TensorMetadata

__all__ = ["DirectCall", "NodeState"]


class NodeState(OpaqueState):
    """What is kept between a Function's forward and its backward: its node."""

    __slots__ = ("call", "node", "owner", "runs_without")

    def __init__(self, node: Any, call: DirectCall, owner: Any, runs_without: bool) -> None:
        self.node = node
        self.call = call
        self.owner = owner  # what keeps the node from freeing what it saved
        self.runs_without = runs_without  # whether the backward runs if no output has a gradient

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradient of each input that needs one, by the input's index."""
        if not self.runs_without and all([g is None for g in gradients]):
            return dict.fromkeys(self.call.inputs)
        return self.validated(node_run.apply(self.node, gradients, self.call.outputs))

    def validated(self, found: tuple[Any, ...]) -> dict[int, torch.Tensor | None]:
        """What the Function's backward returned, as the engine would hand it on."""
        return node_run.validated(self.node, found, self.call.arguments, self.call.inputs)

    def apply(self, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """What the Function's backward returns for gradients none of which is undefined."""
        node = self.node
        result = node.apply(*gradients)
        node.maybe_clear_saved_tensors()  # unless the graph is kept
        return result if isinstance(result, tuple) else (result,)


@attrs.define(eq=False)
class DirectCall:
    """A Function applied to tensors and plain values.

    Attributes:
        function: the Function.
        arguments: the positional arguments, a slot for each tensor.
        needs: for each slot whether it requires grad.
        places: for each slot that needs a gradient its index and its place among the arguments.
        tensors: for each slot its index, its place, and whether it requires grad.
        inputs: by index the metadata of each slot that gets a gradient, in order.
        outputs: the metadata of each output.
    """

    function: type[Any]
    arguments: tuple[Any, ...]
    needs: tuple[bool, ...]
    places: list[tuple[int, int]]
    tensors: list[tuple[int, int, bool]]
    inputs: dict[int, TensorMetadata] = attrs.field(factory=dict)
    outputs: Sequence[TensorMetadata] = ()

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
        return cls(function, args, needs, places, tensors)

    def operator(
        self,
        is_tuple: bool,
        note: str,
        refuse: Callable[[Any], NoReturn],
        is_fed_undefined: Callable[[], bool],
    ) -> Callable[..., Any]:
        """What an opaque call's operator does at run time, as one closure: it is called at every step.

        Args:
            is_tuple: whether the outputs come as a tuple.
            note: what is added to an exception that the Function raises (PEP 678).
            refuse: called with an output that is not as the metadata says.
            is_fed_undefined: whether the backward has to run without any gradient, too.
        """
        template, tensors, apply = self.arguments, self.tensors, compat.apply_of(self.function)
        expected = [(m.shape, m.dtype, m.device) for m in self.outputs]
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
            if count > 1 and len(set(map(id, outputs))) < count:  # the gradients of one tensor come to one place
                refuse(output)
            owner = owner_of(outputs[0]) if owner_of is not None else None
            results.append(NodeState(node, self, owner, is_fed_undefined()))
            return tuple(results)

        return forward

    def backward_operator(
        self, backward: Callable[..., tuple[Any, ...]], absent: Callable[[int], Any], note: str
    ) -> Callable[..., tuple[Any, ...]]:
        """What the backward operator does at run time, as one closure.

        Args:
            backward: what it does where gradients are undefined, or do not fit as they are.
            absent: what to return for the gradient at a place that the Function does not give.
            note: what is added to an exception that the Function raises.
        """
        place_of = dict(self.places)
        wanted = [(n, place_of[i], m.shape, m.dtype, m.device) for n, (i, m) in enumerate(self.inputs.items())]
        rest = [p for p in range(len(self.arguments)) if p not in {place for _, place, *_ in wanted}]
        count, tensor_type = len(self.arguments), torch.Tensor

        def direct_backward(state: Any, *gradients: Any) -> tuple[Any, ...]:
            if type(state) is not NodeState or reachability.anything_undefined():
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
                for number, place, shape, dtype, device in wanted:
                    g = found[place]
                    if g is None:
                        fitting.append(absent(number))
                    elif (
                        not isinstance(g, tensor_type) or g.shape != shape or g.dtype is not dtype or g.device != device
                    ):
                        break
                    else:
                        fitting.append(g)
                else:
                    return tuple(fitting)
            return backward(state, found=found)

        return direct_backward

    def keeps_its_inputs(self, node: Any, values: Sequence[torch.Tensor]) -> bool:
        """Whether the node keeps every tensor that it needs a gradient for, so that handing it on keeps no more."""
        kept = [t for t in node.saved_tensors if isinstance(t, torch.Tensor)]
        return all(any(torch._C._is_alias_of(values[i], t) for t in kept) for i, _ in self.places)  # type: ignore[attr-defined]
