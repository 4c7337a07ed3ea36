"""The operator of one opaque call: what it returns, and what it and its backward do when the program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch
from thunder.core.proxies import TensorProxy

from hookkit.engine.interpreter.attempt import add_note
from hookkit.engine.interpreter.kept_closures import Kept
from hookkit.engine.opaque.fast_path import DirectCall, NodeState
from hookkit.engine.pytorch.graph_run import Autocast, EagerResult, OpaqueState, run_eagerly
from hookkit.engine.pytorch.provider_function import split_tensors
from hookkit.engine.trace.reachability import Reach, none_defined, note_undefined
from hookkit.engine.values.captured import fill
from hookkit.engine.values.wrapping import PLAIN, Slot, TensorMetadata
from hookkit.errors import HookError, MetaError

__all__ = ["Expected", "OpaqueCall", "same_structure"]


@attrs.define(eq=False)
class Expected:
    """What an opaque call returns.

    Attributes:
        structure: the output with a slot for each tensor.
        tensors: the metadata of each tensor.
        differentiable: for each tensor whether it requires grad, then the same for each argument that is changed.
        changed: the indices of arguments that are changed in place.
        dirty_outputs: from the place of an output to the index of the changed argument that it is.
        gradients: the indices of arguments that need a gradient; whether they get one is known at run time only.
        views: the places of outputs that share memory with an argument that is not changed, or with another output.
        overwritten: the indices of arguments that the call or its backward overwrites without PyTorch's counting it.
        spoiled: the same for the gradients that the backward is given, by place among those.
        backward_raised: what its backward raised when that was looked for.
        saved_bytes: how much PyTorch keeps for the backward; None if that is not known.
        without_data: what the call raised on tensors without data, if it was run on example values instead.
    """

    structure: Any
    tensors: list[TensorMetadata]
    differentiable: list[bool]
    changed: list[int]
    dirty_outputs: dict[int, int]
    gradients: list[int]
    views: list[int] = attrs.field(factory=list)
    direct: bool = False
    overwritten: frozenset[int] = frozenset()
    spoiled: frozenset[int] = frozenset()
    backward_raised: Exception | None = None
    saved_bytes: int | None = None
    is_tuple: bool = False
    without_data: BaseException | None = None

    @property
    def is_seen(self) -> bool:
        """Whether its backward ran when it was looked for what that overwrites."""
        return self.backward_raised is None

    def add_writes(self, other: Expected) -> None:
        """Add what was overwritten in another run."""
        self.overwritten |= other.overwritten
        self.spoiled |= other.spoiled

    def may_overwrite(self, slots: Sequence[Any]) -> None:
        """Take it that all that the call and its backward are given is overwritten."""
        tensors = {i for i, p in enumerate(slots) if isinstance(p, TensorProxy)}
        self.overwritten = frozenset(tensors - set(self.changed))
        self.spoiled = frozenset(range(sum(self.differentiable)))


@attrs.define(eq=False)
class OpaqueCall:
    """The operator of one opaque call.

    Attributes:
        description: the call, for messages.
        note: what is added to an exception that the call raises (PEP 678).
        callee: what PyTorch runs.
        arguments: positional and keyword arguments, with a slot for each proxy.
        needs: for each slot whether it requires grad.
        grad_mode: whether grad mode is on around the call.
        autocasts: the autocast regions around the call.
        written: the slots that it changes in place, by its schema.
        expected: what it returns.
        direct: the short way of the call, if it has one.
        inputs: the metadata of the slots that get a gradient.
        reach: to which of the program's outputs it leads, if not to all.
        output_sources: for each output that requires grad what its gradient is made from (trace/reachability.py).
        gradient_names: what the gradients that it gives are called there.
        handed_on: for each of them whether it may be None: nothing that thunder executes takes it.
        undefined: outputs of earlier calls to whose backward this one feeds zeros, see ``feed_undefined``.
        is_fed_undefined: whether another call returns None for the gradient of an output, so that its backward has to
            run without any gradient, as in eager.
        is_function: whether the callee is the ``apply`` of a Function, which looks for tensors in its arguments only.
        kept: what the program makes, of which the call has copies.
        meta: the meta function, in words.
        complete_before: the program's arguments that have their gradient when its backward begins to overwrite.
    """

    description: str
    note: str
    callee: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    needs: tuple[bool, ...]
    grad_mode: bool
    autocasts: tuple[Autocast, ...]
    written: frozenset[int] = frozenset()
    expected: Expected | None = None
    direct: DirectCall | None = None
    inputs: dict[int, TensorMetadata] = attrs.field(factory=dict)
    reach: Reach | None = None
    output_sources: Sequence[Reach] = ()
    gradient_names: Sequence[str] = ()
    handed_on: Sequence[bool] = ()
    undefined: list[TensorProxy] = attrs.field(factory=list)
    is_fed_undefined: bool = False
    is_function: bool = False
    kept: Kept = attrs.field(factory=Kept)
    meta: str = "its meta function"
    complete_before: frozenset[str] = frozenset()

    def tracked(self, args: Sequence[Any]) -> Sequence[Any]:
        """Those of the operator's arguments that are edges of the autograd graph."""
        if not self.is_function:
            return args
        return [args[a.index] for a in self.arguments[0] if isinstance(a, Slot)]

    def given_gradients(self, args: Sequence[Any]) -> list[Any]:
        """Those of the operator's arguments that get a gradient."""
        assert self.expected is not None
        return [args[i] for i in self.expected.gradients]

    def run(self, values: Sequence[Any], copied: Sequence[int] = ()) -> EagerResult:
        """Call the callee with values in the places of the slots."""
        with self.kept.unchanged(self.description):
            return run_eagerly(
                self.callee,
                self.arguments,
                values,
                self.needs,
                grad_mode=self.grad_mode,
                autocasts=self.autocasts,
                copied=copied,
                with_root=self.is_fed_undefined,
                written=self.written,
                is_function=self.is_function,
            )

    @property
    def has_backward(self) -> bool:
        """Whether a gradient can be asked for."""
        assert self.expected is not None
        return any(self.expected.differentiable)

    @property
    def returns_state(self) -> bool:
        """Whether the operator returns its state: for the backward, or because it returns nothing else.

        thunder drops a symbol without outputs: ``remove_duplicate_number_proxies`` in thunder/core/transform_common.py.
        """
        assert self.expected is not None
        return self.has_backward or not (self.expected.tensors or self.expected.changed)

    def operator(self) -> Callable[..., Any]:
        """What the operator does at run time."""
        assert self.expected is not None
        if self.direct is not None:
            self.direct.outputs, is_tuple = self.expected.tensors, self.expected.is_tuple
            return self.direct.operator(is_tuple, self.note, self._refuse, lambda: self.is_fed_undefined)
        return self.forward

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """What the operator does at run time, for any callee."""
        assert self.expected is not None
        try:
            result = self.run(values, self.expected.changed)
        except Exception as error:
            add_note(error, self.note)
            raise
        tensors, structure = split_tensors(result.output)
        self._check(tensors, structure, result)
        self._refuse_hidden_leaves(result)
        outputs = [*tensors, *(result.changed[i] for i in self.expected.changed)]
        return (*outputs, result.state) if self.returns_state else tuple(outputs)

    def _refuse(self, output: Any) -> NoReturn:
        tensors, structure = split_tensors(output)
        self._check(tensors, structure, EagerResult(structure, [t.requires_grad for t in tensors], {}, {}, None))
        raise MetaError(
            f"{self.description} returned a tensor that does not require grad, although its metadata said so"
        )

    def _refuse_hidden_leaves(self, result: EagerResult) -> None:
        """An operator gives gradients to its arguments; those of other tensors that the callee uses would be lost."""
        if self.is_function or result.state is None:  # a Function's node knows its arguments only
            return
        hidden = result.state.hidden_leaves()
        if hidden:
            shown = ", ".join(f"{type(t).__name__} {TensorMetadata.of(t)}" for t in hidden[:3])
            raise HookError(
                f"{self.description} runs as one opaque operator, which gives gradients to its arguments, and it uses "
                f"tensors that require grad and are no arguments ({shown}{', ...' if len(hidden) > 3 else ''}): a "
                "parameter of a module or a global tensor, say. Let the call be traced, or give the rule to a function "
                "that takes them as arguments; where no gradient is wanted, call it under torch.no_grad()."
            )

    def backward_operator(self) -> Callable[..., tuple[Any, ...]]:
        """What the backward operator does at run time."""
        if self.direct is not None:
            self.direct.inputs = self.inputs
            return self.direct.backward_operator(self.backward, self._absent, self.note)
        return self.backward

    def backward(
        self, state: OpaqueState | None, *gradients: torch.Tensor | None, found: tuple[Any, ...] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """What the backward operator does at run time, for any callee.

        Args:
            state: what the forward operator returned.
            *gradients: for each output that requires grad its gradient.
            found: what the Function's backward returned, if it has run.
        """
        assert self.expected is not None
        if state is None:
            raise MetaError(f"{self.description} returned no tensor that requires grad, although its metadata said so")
        if none_defined(self.reach):
            return self._filled({})
        try:
            if isinstance(state, NodeState) and found is not None:
                return self._filled(state.validated(found))
            gradients = tuple(
                [None if none_defined(s) else g for s, g in zip(self.output_sources, gradients, strict=True)]
            )
            return self._filled(state.backward(gradients))
        except Exception as error:
            add_note(error, self.note)
            raise

    def _filled(self, found: dict[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients in order."""
        assert self.expected is not None
        gradients = [found.get(i) for i in self.expected.gradients]
        return tuple([self._absent(n) if g is None else g for n, g in enumerate(gradients)])

    def _absent(self, number: int) -> torch.Tensor | None:
        """What stands for a gradient that the callee does not give: zeros, where the trace computes with it."""
        assert self.expected is not None
        note_undefined(self.gradient_names[number])
        may_be_none = self.handed_on and self.handed_on[number]
        return None if may_be_none else self.inputs[self.expected.gradients[number]].zeros()

    def _check(self, tensors: list[torch.Tensor], structure: Any, result: EagerResult) -> None:
        """Compare what the call returned with its metadata.

        Raises:
            MetaError: if they differ.
        """
        assert self.expected is not None
        got = [TensorMetadata.of(t) for t in tensors]
        if got != self.expected.tensors or not same_structure(structure, self.expected.structure):
            expected = fill(self.expected.structure, [str(t) for t in self.expected.tensors])
            raise MetaError(
                f"{self.description} returned {fill(structure, [str(t) for t in got])!r}; its metadata, with which the "
                f"program was compiled, is {expected!r}. If the result depends on the values of tensors "
                "(data-dependent), leave the call outside the compiled program; otherwise correct "
                f"{self.meta}."
            )
        if sorted(result.changed) != self.expected.changed:
            raise MetaError(
                f"{self.description} changed other arguments in place than when its metadata was found: "
                f"{sorted(result.changed)}, expected {self.expected.changed}"
            )
        if self.has_backward and result.state is not None and result.differentiable != self.expected.differentiable:
            raise MetaError(
                f"{self.description} returned tensors of which {result.differentiable} require grad; "
                f"its metadata says {self.expected.differentiable}"
            )


def same_structure(a: Any, b: Any) -> bool:
    """Whether two outputs are the same but for their tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_structure(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_structure, a, b))
    if isinstance(a, (*PLAIN, Slot)):
        return bool(a == b or (a != a and b != b))
    if attrs.has(type(a)) or hasattr(type(a), "__dataclass_fields__"):
        return same_structure(dict(vars(a)), dict(vars(b))) if hasattr(a, "__dict__") else bool(a == b)
    return a is b
