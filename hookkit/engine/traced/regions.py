"""Regions: calls that are compiled by themselves, once for all that do the same, and called from the program.

A call that was traced becomes a region if nothing in it concerns what is outside (`obstacle`). Its forward and its
backward go through thunder's passes when the first of its calls does; in the program each of the calls is one
operator, and so is its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.extend import ImplInfo
from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform

from hookkit.engine.joint.differentiation import check_undefined
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place
from hookkit.engine.trace.composite import (
    Composite,
    called,
    clear_tags,
    feed_undefined,
    fresh,
    make_symbol,
    swapped,
    symbol_name,
)
from hookkit.engine.trace.functionalize import functionalise
from hookkit.engine.trace.in_place_check import Retrace, views_of_arguments
from hookkit.engine.trace.recomputation import draws, is_recomputing
from hookkit.engine.traced.compiled_region import Region, program_of, sharing_of
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.traced.structure import structure_of
from hookkit.engine.values.wrapping import PLAIN, leaves, map_leaves, proxies_in
from hookkit.errors import UntraceableError

__all__ = ["RegionCall", "as_region", "obstacle", "recorded"]


@attrs.define(eq=False)
class RegionCall(Composite):
    """One call of a region.

    Attributes:
        region: the region.
        number: which of the region's calls it is.
    """

    region: Region = attrs.field(kw_only=True)
    number: int = 0

    @property
    def where_used_name(self) -> str:
        """The name of the operator that hands its gradients on, of this call alone."""
        return f"{self.name}_where_used_{self.number}"

    def __call__(self, *args: Any) -> Any:
        """The outputs as proxies, or, outside of a trace, the outputs."""
        if get_tracectx() is None:
            return self.region.plain().run(*args)
        return tuple(TensorProxy(like=o, requires_grad=o.requires_grad) for o in self.outputs)

    def symbol(self, trace: TraceCtx) -> Symbol:
        """The symbol that stands for it in a trace."""
        self.region.calls += 1
        self.number = self.region.calls
        does_draw = any(map(draws, self.region.pattern.forward))
        symbol = make_symbol(self.executor, self.name, self, self, kind=gradflow.CALL, is_prim=True, draws=does_draw)
        transform = self.gradient_transform if self.backward is not None else self.execute
        self.executor._implmap[symbol.id] = ImplInfo(
            symbol=symbol, execution_transform=self.execute, grad_transform=transform
        )
        return symbol

    def beneath(self) -> Sequence[BoundSymbol]:
        """Nothing: it is one operator."""
        return ()

    def execute(self, *args: Any) -> Any:
        """Record the operator that computes the outputs."""
        return self.region.plain().symbol(*args)

    def gradient_transform(self, *args: Any) -> Any:
        """Record the operator of the forward, and that of the backward where the gradients are."""
        compiled = self.region.differentiated()
        results = compiled.forward(*args)
        by_name = dict(zip(compiled.names, (*args, *results), strict=True))
        outputs = results[: len(self.outputs)]
        given = [prims.get_grad(outputs[i]) for i in compiled.differentiable]
        gradients = compiled.backward(*(by_name[name] for name in compiled.read), *given)
        for place, gradient in zip(compiled.wanted, gradients, strict=True):
            found = self._where_used(gradient)
            self.gradient_names.append(found.name)
            prims.put_grad(args[place], found)
        feed_undefined(self.undefined)
        return outputs

    def residual_names(self) -> set[str]:
        """The names of the call's inputs and outputs that its backward reads, or whose memory it reads."""
        inputs, outputs = self.region.shared()
        return {*(self.inputs[i].name for i in inputs), *(self.outputs[i].name for i in outputs)}

    def copied(self, env: dict[Any, Proxy]) -> RegionCall:
        """A call of the same region with other inputs and new names for what it makes."""
        env.update({variableify(o): fresh(o) for o in self.outputs})
        return attrs.evolve(
            self,
            inputs=tuple(swapped(env, i) for i in self.inputs),
            outputs=tuple(swapped(env, o) for o in self.outputs),
            undefined=[],
            gradient_names=[],
            reach=None,
            is_fed_undefined=False,
        )

    def operations(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """Its operations, with new names in the active trace."""
        return self.region.operations(bsym.args, bsym.output)


_known: weakref.WeakKeyDictionary[TraceCtx, dict[Any, Region]] = weakref.WeakKeyDictionary()


def as_region(composite: Composite, returned: Any) -> tuple[RegionCall, Any]:
    """A recorded call as a call of a region: of an earlier one, if that does the same.

    Args:
        composite: the call, in which is no `obstacle`.
        returned: what it returns.

    Returns:
        The call, and what it returns.
    """
    jit = get_jit_ctx()
    trace = jit.computation_trace
    if composite.explicit:
        clear_tags(composite)
    else:
        composite, returned = _stated(trace, composite, returned)
    needs = tuple(gradflow.requires_grad(trace, i) for i in composite.inputs)
    key = structure_of(composite, needs)
    known = _known.setdefault(trace, {})
    region = known.get(key)
    if region is None:
        with tracectx(trace):
            given = [TensorProxy(like=i, requires_grad=n) for i, n in zip(composite.inputs, needs, strict=True)]
            pattern = composite.copied({variableify(i): g for i, g in zip(composite.inputs, given, strict=True)})
        name = symbol_name(trace, composite.name)
        for suffix in ("_forward", "_backward"):
            trace.names.add(name + suffix)
        executors = get_compile_data().executors_list
        region = known[key] = Region(name, pattern, jit.ad_hoc_executor, executors, trace.names)
    fields = {f.name: getattr(composite, f.name) for f in attrs.fields(Composite) if f.init}
    return RegionCall(**{**fields, "name": region.name, "forward": (), "region": region}), returned


def recorded(invocation: Invocation, bsyms: list[BoundSymbol], returned: Any) -> RegionCall | str:
    """What was interpreted as a call of a region, which stands for the operations; or why that cannot be.

    Args:
        invocation: the call, of which thunder has the gradient.
        bsyms: what was recorded.
        returned: what it returned; the outputs of the region are the tensors in it.
    """
    if not all(isinstance(v, (Proxy, *PLAIN)) for v in leaves(returned)):
        return "it returns an object of which the tensors are not known"
    try:
        operations, last = functionalise(get_jit_ctx().computation_trace, bsyms)
    except UntraceableError as error:
        return str(error)
    outputs = proxies_in(returned)
    now = [last.get(variableify(o), o) for o in outputs]
    made = {o.name for b in operations for o in b.flat_proxy_outs}
    if not all(o.name in made for o in now) or len({o.name for o in now}) < len(now):
        return "it returns a tensor that it did not make, or one twice"
    composite = Composite.of_operations(invocation.name, invocation.subject, operations, now)
    reason = obstacle(composite, now)
    if reason is not None:
        return reason
    call, _ = as_region(composite, None)
    later = get_jit_ctx()._proxy_swapmap  # thunder's names for tensors in variables
    for output, stated in zip(outputs, call.outputs, strict=True):
        _state(output, stated)
        if (renamed := later.get(variableify(output))) is not None:
            _state(renamed, stated)
    return attrs.evolve(call, outputs=tuple(outputs))


def _state(proxy: Any, stated: Proxy) -> None:
    """Have a proxy say what another says of whether it requires grad."""
    proxy._requires_grad = stated.requires_grad
    tag = ProxyTag.DETACHED_AUTOGRAD_GRAPH
    (proxy.tags.add if tag in stated.tags else proxy.tags.discard)(tag)


def _stated(trace: Any, composite: Composite, returned: Any) -> tuple[Composite, Any]:
    """A call that thunder differentiates, with outputs that say whether they require grad; those inputs first."""
    needs = {i.name: gradflow.requires_grad(trace, i) for i in composite.inputs}
    flags = _differentiable(composite, needs)
    swap: dict[Any, Proxy] = {}
    with tracectx(trace):
        for output, flag in zip(composite.outputs, flags, strict=True):
            stated = swap[variableify(output)] = TensorProxy(like=output, requires_grad=flag)
            stated.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
            if not any(flags):
                stated.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    inputs = sorted(composite.inputs, key=lambda i: not needs[i.name])
    stated = attrs.evolve(
        composite,
        inputs=tuple(inputs),
        outputs=tuple(swap.values()),
        forward=[b.from_bsym_swap_proxies(swap) for b in composite.forward],
        explicit=True,
        is_node=False,
        backward=() if any(flags) else None,
        tracked_count=sum(needs.values()) if any(flags) else 0,
    )
    return stated, map_leaves(lambda p: swapped(swap, p), returned)


def _differentiable(composite: Composite, needs: dict[str, bool]) -> list[bool]:
    """For each output of operations that thunder differentiates whether it requires grad."""
    alone = TraceCtx(None)
    for proxy in composite.inputs:
        if isinstance(proxy, TensorProxy):
            gradflow.set_requires_grad(alone, proxy, needs[proxy.name])
    alone.bound_symbols = list(composite.forward)
    return [gradflow.requires_grad(alone, o) for o in composite.outputs]


def obstacle(composite: Composite, returned: Any) -> str | None:
    """Why a recorded call cannot be a region, or None.

    Args:
        composite: the call.
        returned: what it returns.
    """
    if is_recomputing():
        return "it is inside of a checkpoint, which computes it again"
    if not all(isinstance(t, ExtractionOnlyPrologueTransform) for t in getattr(get_compile_data(), "transforms", ())):
        return "the program is compiled with transforms, which look at each operation"
    outputs = {o.name for o in composite.outputs}
    if any(isinstance(v, Proxy) and v.name not in outputs for v in leaves(returned)):
        return "it returns a tensor that it did not make"
    if not all(isinstance(p, TensorProxy) for p in (*composite.inputs, *composite.outputs)):
        return "it takes or returns a number that is known at run time only"
    if not composite.forward or not composite.outputs:
        return "it computes nothing"
    found = next(filter(None, map(_foreign, (*composite.forward, *(composite.backward or ())))), None)
    if found is not None:
        return found
    if composite.views or views_of_arguments(composite.forward, composite.outputs):
        return "what it returns may share memory with what it is given"
    sharing = sharing_of(composite.forward)
    if any(len(sharing.group(o.name) & outputs) > 1 for o in composite.outputs):
        return "two of the tensors that it returns may share memory"
    return None if composite.explicit else _undifferentiable(composite)


def _foreign(bsym: Any) -> str | None:
    """What in an operation cannot be compiled apart from the program, or None."""
    call = called(bsym)
    if call is not None and not isinstance(call, Composite):
        return f"PyTorch runs {bsym.sym.name} in it"
    if changes_in_place(bsym):
        return f"{bsym.sym.name} changes a tensor in place"
    if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags or bsym.sym.name == "checkpoint":
        return "a part of it is computed again in the backward"
    if bsym.sym.tags and prims.OpTags.DONT_DCE in bsym.sym.tags:
        return f"{bsym.sym.name} does more than computing a tensor"
    if type(bsym.sym.id).__module__ == "thunder.distributed.prims":
        return f"{bsym.sym.name} communicates between processes"
    if str(bsym.sym.id).startswith(gradflow.DRAWS) or not all(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):
        return f"{bsym.sym.name} makes something else than a tensor"
    inside = (*bsym.subsymbols, *((call.backward or ()) if call is not None else ()))
    return next(filter(None, map(_foreign, inside)), None)


def _undifferentiable(composite: Composite) -> str | None:
    """Why a region of operations that thunder differentiates would be wrong, or None."""
    trace = get_jit_ctx().computation_trace
    needs = {i.name: gradflow.requires_grad(trace, i) for i in composite.inputs}
    flags = _differentiable(composite, needs)
    if sum(flags) > 1:
        return "several of its outputs require grad, and which of their gradients are undefined is known at run time"
    if any(flags):
        try:
            check_undefined(program_of("region", composite, set(trace.names)))
        except Retrace as refused:
            return refused.reason
    return None
