"""The call that a rule takes over, before it is decided whether it is traced or opaque."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, TensorProxy

from hookkit.call import Call
from hookkit.engine.interpreter.attempt import is_made
from hookkit.engine.trace import gradflow
from hookkit.engine.values.binding import Bound
from hookkit.engine.values.wrapping import tensors_in
from hookkit.modes import ModeInForce
from hookkit.rule import Rule

__all__ = ["Invocation"]


@attrs.define(eq=False)
class Invocation:
    """A call that a rule takes over, with the interpreter's wrapped values.

    Attributes:
        rule: the rule.
        call: the call, with plain values.
        bound: the call's arguments by name.
        owner: the wrapped Function class whose ``apply`` is called, or None.
        args: wrapped positional arguments.
        kwargs: wrapped keyword arguments.
        grad_mode: whether grad mode is on around the call.
        mode: whether it is traced, opaque, or either, and who says so.
        guarded: how many guards there were before it was tried to trace it; None if that was not tried.
        itself: whether what is called runs if the call is opaque, and not the providers.
    """

    rule: Rule[..., Any]
    call: Call
    bound: Bound
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_mode: bool
    mode: ModeInForce
    guarded: int | None = None
    itself: bool = False

    @property
    def name(self) -> str:
        """What the call's symbol is called: after the Function, the rule, or what a predicate was asked about."""
        if self.call.function is not None or self.operator_parts:
            return self.call.name
        return self.rule.name if self.rule.forward is not None or self.rule.is_named else self.call.name

    @property
    def subject(self) -> Any:
        """What is remembered if the call cannot be traced: the rule, or what runs under it.

        That is the Function that runs itself, or the code that is handed to a rule for a higher-order operator.
        """
        if self.call.function is not None and self.rule.opaque_callee:
            return self.call.function
        if self.operator_parts:
            return self.call.callable
        given = self.call.args[0] if self.call.args else None
        if callable(given) and (self.rule.pass_call or (self.rule.inlines and not isinstance(given, torch.nn.Module))):
            return getattr(given, "__code__", given)
        return self.rule

    @property
    def stands_for_pytorch(self) -> bool:
        """Whether the rule ships with hookkit and does what PyTorch does in what is called, where thunder does not."""
        return self.rule.ships and not (self.call.function or self.operator_parts or self.rule.opaque_callee)

    @property
    def operator_parts(self) -> list[Any]:
        """What is traced of the operator that is called, if the rule traces that."""
        if self.rule.forward is None or not self.rule.opaque_callee or self.call.operator is None:
            return []
        return self.call.operator.traced

    @property
    def note(self) -> str:
        """What is added to an exception that the call raises (PEP 678)."""
        place = "" if self.rule.ships else f", declared at {self.rule.declared_at},"
        return f"raised in {self.call}, which hookkit's rule {self.rule.name}{place} takes over"

    @staticmethod
    def is_made_by_program(value: Any) -> bool:
        """Whether a wrapped value was made while the program is traced, so that nothing else can change it."""
        return is_made(value.provenance)

    def provider_arguments(self) -> tuple[Any, ...]:
        """The wrapped arguments of the forward provider, the call before them if the rule wants it."""
        return (self.wrapped_call(), *self.args) if self.rule.pass_call else self.args

    def wrapped_call(self) -> Any:
        """The call as an interpreter value; its ``function`` keeps the provenance that it has in the program."""
        wrapped = wrap(self.call, provenance=ProvenanceRecord(PseudoInst.NEW, inputs=[wrap_const(Call).provenance]))
        if self.owner is not None:
            wrapped.attribute_wrappers["function"] = self.owner
        for item, wrapped_item in zip(self.call.args, self.args, strict=True):
            assert item is unwrap(wrapped_item)
        return wrapped

    def named_arguments(self) -> dict[str, Any]:
        """The wrapped arguments by the names of their parameters."""
        return {**dict(zip(self.bound.names, self.args, strict=False)), **self.kwargs}

    def differentiable_inputs(self) -> list[TensorProxy]:
        """The tensors of the call that need a gradient."""
        trace = get_jit_ctx().computation_trace
        tree = self.call.args if self.rule.track == "positional" else (self.call.args, self.call.kwargs)
        found = [a for a in tree if isinstance(a, Proxy)] if self.rule.track == "positional" else tensors_in(tree)
        unique = {p.name: p for p in found if isinstance(p, TensorProxy)}
        return [p for p in unique.values() if gradflow.requires_grad(trace, p)]
