"""What calls that do the same are compiled to: thunder's passes run over their operations once.

Forward and backward are programs of their own, with the executors of the program in which the calls are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms import autodiff

from hookkit.engine.joint.differentiation import RESIDUAL, differentiate_region
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import Sharing, note_sharing
from hookkit.engine.trace.composite import Composite, make_symbol, renamed
from hookkit.engine.trace.recomputation import draws
from hookkit.patch import replaced

__all__ = ["Region", "program_of", "sharing_of"]


@attrs.define(eq=False, slots=False)
class Region:
    """What is compiled once for all calls that do the same.

    Attributes:
        name: what its calls are called in traces.
        pattern: the operations, with names of their own.
        executor: the executor of the program.
        executors: the executors of the program, that one among them.
        names: the names that are taken where the operations were recorded.
        calls: how many calls of the program are its.
        seconds: how long compiling it took, in all.
    """

    name: str
    pattern: Composite
    executor: Any
    executors: Sequence[Any]
    names: set[str]
    calls: int = 0
    seconds: float = 0.0
    _plain: _Operator | None = attrs.field(init=False, default=None)
    _differentiated: Differentiated | None = attrs.field(init=False, default=None)

    def plain(self) -> _Operator:
        """The operator that computes the outputs."""
        if self._plain is None:
            with _Timed(self):
                pattern = self.pattern
                self._plain = self._operator(self.name, pattern.forward, pattern.inputs, pattern.outputs, self.names)
        return self._plain

    def differentiated(self) -> Differentiated:
        """The operators of forward and backward."""
        if self._differentiated is None:
            with _Timed(self):
                self._differentiated = self._differentiate()
        return self._differentiated

    def shared(self) -> tuple[list[int], list[int]]:
        """The places of inputs, and of outputs, whose memory the backward may read."""
        pattern = self.pattern
        if not pattern.is_node:
            return [*range(len(pattern.inputs))], [*range(len(pattern.outputs))]
        sharing = sharing_of(pattern.forward)
        read = pattern.residual_names()
        inputs, outputs = (
            [i for i, p in enumerate(proxies) if sharing.group(p.name) & read]
            for proxies in (pattern.inputs, pattern.outputs)
        )
        return inputs, outputs

    def operations(self, inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> list[BoundSymbol]:
        """The operations of a call, with new names in the active trace, for the inputs and outputs that it has."""
        pattern = self.pattern
        env: dict[Any, Proxy] = {variableify(p): a for p, a in zip(pattern.inputs, inputs, strict=True)}
        env.update({variableify(p): a for p, a in zip(pattern.outputs, outputs, strict=True)})
        return renamed(pattern.forward, env)

    def _differentiate(self) -> Differentiated:
        names = set(self.names)
        parts = self.pattern if self.pattern.is_node else _by_thunder(self.pattern, names)
        assert parts.backward is not None
        cotangents = [g for g in parts.output_gradients if g is not None]
        wanted = [i for i, g in enumerate(parts.input_gradients) if g is not None]
        gradients = [g for g in parts.input_gradients if g is not None]
        made = {o.name: o for b in parts.forward for o in b.flat_proxy_outs}
        made.update((p.name, p) for p in (*parts.outputs, *parts.inputs))
        backward = self._operator(
            f"{self.name}_backward", parts.backward, [*made.values(), *cotangents], gradients, names, always=cotangents
        )
        given = {p.name for p in (*parts.inputs, *parts.outputs)}
        residuals = [p for p in backward.read if p.name not in given]
        outputs = [*parts.outputs, *residuals]
        forward = self._operator(f"{self.name}_forward", parts.forward, parts.inputs, outputs, names, RESIDUAL)
        return Differentiated(
            forward=forward.symbol,
            backward=backward.symbol,
            names=[p.name for p in (*parts.inputs, *outputs)],
            read=[p.name for p in backward.read],
            differentiable=[i for i, g in enumerate(parts.output_gradients) if g is not None],
            wanted=wanted,
        )

    def _operator(
        self,
        name: str,
        bsyms: Sequence[BoundSymbol],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        names: set[str],
        tag: Any = None,
        always: Sequence[Any] | None = None,
    ) -> _Operator:
        """An operator of compiled operations.

        Args:
            name: its name.
            bsyms: the operations.
            inputs: what they may read.
            outputs: what it returns.
            names: the names that are taken.
            tag: a mark for what it returns.
            always: None if it takes all inputs; else the last ones, which it takes in any case, beside what it reads.
        """
        trace = _trace(name, bsyms, inputs, tuple(outputs), set(names))
        executed = transform_for_execution(trace, self.executors)
        read: list[Any] = []
        taken = list(inputs)
        if always is not None:
            body = [b for b in executed.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
            used = {a.name for b in body for a in b.flat_proxy_args}
            read = [p for p in inputs[: len(inputs) - len(always)] if p.name in used]
            taken = [*read, *always]
            executed.args = tuple(taken)
            executed._siginfo = _signature(name, taken)
        compiled = del_last_used(executed).python_callable(include_decorators=False)

        def meta(*_: Any) -> tuple[TensorProxy, ...]:
            results = tuple(TensorProxy(like=o, requires_grad=o.requires_grad) for o in outputs)
            for result in results if tag is not None else ():
                result.tags.add(tag)
            return results

        symbol = make_symbol(
            self.executor, name, meta, compiled, kind=gradflow.REGION, is_prim=True, draws=any(map(draws, bsyms))
        )
        return _Operator(symbol, compiled, read)


@attrs.frozen
class _Operator:
    """Compiled operations.

    Attributes:
        symbol: what stands for them in a trace.
        run: what runs them.
        read: those of the inputs that they take because they read them.
    """

    symbol: Symbol
    run: Callable[..., Any]
    read: list[Any]


class _Timed:
    """Adds to a region the time that compiling takes."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._region.seconds += time.perf_counter() - self._start


@attrs.frozen
class Differentiated:
    """The operators of a region's forward and backward.

    Attributes:
        forward: returns the outputs, and the residuals.
        backward: takes what it reads of these and of the inputs, then the gradients; returns those of the inputs.
        names: the pattern's names of inputs, outputs and residuals.
        read: those that the backward takes.
        differentiable: the places of the outputs whose gradients the backward takes.
        wanted: the places of the inputs whose gradients it returns.
    """

    forward: Symbol
    backward: Symbol
    names: list[str]
    read: list[str]
    differentiable: list[int]
    wanted: list[int]


def sharing_of(bsyms: Sequence[BoundSymbol]) -> Sharing:
    """Which tensors of operations share memory."""
    sharing = Sharing()
    for bsym in bsyms:
        note_sharing(sharing, bsym)
    return sharing


def _by_thunder(pattern: Composite, names: set[str]) -> Composite:
    """Operations with the gradient that thunder has for them; the names that they get are added to those taken."""
    joint = differentiate_region(replaced(autodiff.grad_transform_on_trace), program_of(pattern.name, pattern, names))
    returned = joint.bound_symbols[-1].args[0]
    outputs = returned["fw_flat_out"]
    body = [b for b in joint.bound_symbols[:-1] if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    cotangents = {b.args[0].name: b.output for b in body if b.sym == prims.get_grad}
    forward, backward = _split([b for b in body if b.sym != prims.get_grad], (*outputs, *pattern.inputs))
    return attrs.evolve(
        pattern,
        outputs=outputs,
        forward=forward,
        backward=backward,
        output_gradients=tuple(cotangents.get(o.name) for o in outputs),
        input_gradients=tuple(returned["output"]),
    )


def _split(bsyms: Sequence[BoundSymbol], given: Sequence[Any]) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """What a joint trace's forward needs, and the rest, as thunder splits them."""
    needed = {p.name for p in given}
    read = {a.name for b in bsyms if BoundSymbolTag.BACKWARD in b.tags for a in b.flat_proxy_args}
    forward: list[BoundSymbol] = []
    backward: list[BoundSymbol] = []
    for bsym in reversed(bsyms):
        made = {o.name for o in bsym.flat_proxy_outs}
        kept = any(RESIDUAL in o.tags and o.name in read for o in bsym.flat_proxy_outs)
        if BoundSymbolTag.BACKWARD not in bsym.tags and (made & needed or kept or draws(bsym)):
            forward.append(bsym)
            needed |= made | {a.name for a in bsym.flat_proxy_args}
        else:
            backward.append(bsym)
    return forward[::-1], backward[::-1]


def program_of(name: str, composite: Composite, names: set[str]) -> TraceCtx:
    """A trace of the operations that returns what a program's does."""
    result = {"output": tuple(composite.outputs), "flat_args": list(composite.inputs)}
    return _trace(name, composite.forward, composite.inputs, result, names)


def _trace(name: str, bsyms: Sequence[BoundSymbol], inputs: Sequence[Any], result: Any, names: set[str]) -> TraceCtx:
    trace = TraceCtx(None)
    trace.names = names
    trace.args = tuple(inputs)
    trace._siginfo = _signature(name, inputs)
    with tracectx(trace):
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
        trace.bound_symbols.extend(bsyms)
        prims.python_return(result)
    return trace


def _signature(name: str, inputs: Sequence[Any]) -> SigInfo:
    signature = SigInfo(name)
    signature.args = [(p.name, None) for p in inputs]
    return signature
