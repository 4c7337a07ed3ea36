"""Looking at programs: what rules would do in one that is not compiled, and what is in one that is.

Returns plain data, without thunder's objects; ``hookkit.reporting`` gives it a form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import thunder
from thunder.core import langctxs
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from hookkit.call import Source
from hookkit.engine.dispatch.graphs import graphs_of
from hookkit.engine.interpreter.call_log import CallRecord, MissedForm, tracings_of, want_all_candidates
from hookkit.engine.joint.transforms import eager_runs_of
from hookkit.engine.opaque.operator import OpaqueCall
from hookkit.engine.trace.composite import Composite
from hookkit.errors import HookError

__all__ = ["CompiledCall", "CompiledRegion", "CompiledStep", "Operation", "acquire", "compiled_steps", "with_depth"]


def acquire(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Acquired:
    """Trace a program without compiling or running it, all rules being asked about each call.

    Args:
        function: a function or module, or what ``thunder.jit`` made of one.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The calls that rules could take, and what tracing raised.
    """
    compiled = thunder.compile_data(function)
    if compiled is not None:
        # The first executor is that of the compiled program itself, for what it alone defines.
        jitted = thunder.jit(compiled.fn, executors=compiled.executors_list[1:], **compiled.compile_options)
    else:
        jitted = thunder.jit(function)
    data, stats = thunder.compile_data(jitted), thunder.compile_stats(jitted)

    # As `get_computation_and_inputs` in thunder/__init__.py does.
    @langctxs.langctx(data.langctx)  # type: ignore[untyped-decorator, unused-ignore]
    @thunder._with_cache_info_ctx  # type: ignore[untyped-decorator, unused-ignore]
    def trace() -> None:
        data.populate_cache_info(thunder._get_cache_info(), *args, **kwargs)
        data.acquire_initial_trace(data.fn, args, kwargs, data, stats, data.executors_list[0])

    error = None
    with want_all_candidates() as missed:
        try:
            trace()
        except Exception as raised:
            error = raised
    calls = [record for tracing in tracings_of(stats) for record in tracing.calls]
    return Acquired(calls, error, list(dict.fromkeys(missed)))


@attrs.frozen
class Acquired:
    """What :func:`acquire` found."""

    calls: list[CallRecord]
    error: Exception | None
    missed: list[MissedForm] = attrs.Factory(list)


def with_depth(calls: Sequence[CallRecord], depth: int = 0) -> Iterator[tuple[CallRecord, int]]:
    """All calls, those inside another one behind it, and how deep each is inside others."""
    for record in calls:
        yield record, depth
        yield from with_depth(record.inside, depth + 1)


@attrs.frozen
class CompiledCall:
    """One call of a compiled program that a rule took.

    Attributes:
        name: what was called.
        rule: the name of the rule.
        source: where in the user's program.
        depth: in how many other such calls it is.
        outcome: ``"traced"``, ``"region"`` or ``"opaque"``.
        reason: why it is opaque.
        forward_operations: how many operations its forward has in the trace.
        backward_operations: the same for its backward; None if thunder differentiates the forward by itself.
        saved_bytes: how much it keeps for its backward; None if that is not known.
        replays: how often the operations of an earlier call were used again.
        region: the name of the region that it is a call of, or None.
        no_region: why it is none, although it was to be one.

    Example:
        >>> import hookkit, thunder, torch
        >>> jitted = thunder.jit(lambda x: torch.sinc(x))
        >>> _ = jitted(torch.ones(3))
        >>> call = hookkit.report(jitted).calls[0]
        >>> call.name, call.outcome
        ('sinc', 'opaque')
    """

    name: str
    rule: str
    source: Source | None
    depth: int
    outcome: str
    reason: str | None
    forward_operations: int
    backward_operations: int | None
    saved_bytes: int | None
    replays: int
    region: str | None = None
    no_region: str | None = None


@attrs.frozen
class CompiledRegion:
    """What was compiled once for several calls of a program.

    Attributes:
        name: what its calls are called in the trace.
        calls: how many calls of the program are its.
        seconds: how long compiling it took; 0 if that is yet to be done.
    """

    name: str
    calls: int
    seconds: float


@attrs.frozen
class Operation:
    """One operation of a trace; ``call`` is the index of the call that it stands for, or None."""

    name: str
    call: int | None


@attrs.frozen
class CompiledStep:
    """The program that a compiled function ran last.

    Attributes:
        calls: the calls that rules took, in the order of the program.
        forward: the operations of the program, each hooked call being one.
        backward_operations: how many operations the backward has.
        saved_bytes: how much the forward keeps for the backward in tensors.
        regions: what was compiled once for several of the calls.
    """

    calls: list[CompiledCall]
    forward: list[Operation]
    backward_operations: int
    saved_bytes: int
    regions: list[CompiledRegion] = attrs.Factory(list)


def compiled_steps(jitted: Any) -> list[CompiledStep]:
    """What a compiled function ran last: one step, or one for each graph of ``thunderfx``; none if only PyTorch ran it.

    Raises:
        HookError: if it is no compiled function, or was not called yet.
    """
    backend = getattr(jitted, "_backend", None)
    if backend is not None and hasattr(backend, "subgraph_infos"):
        parts = [f for info in backend.subgraph_infos for f in info.thunder_compiled_fns or ()]
        if graphs_of(jitted) and not parts:  # thunder got none of it
            return []
    else:
        parts = [jitted]
    stats = [thunder.compile_stats(part) for part in parts]
    if None in stats:
        raise HookError(
            f"hookkit.report(...) takes what thunder.jit, thunder.compile or thunderfx returned; got {jitted!r}"
        )
    steps = [_compiled_step(s) for s in stats if s.last_traces]
    if not steps and not eager_runs_of(jitted):
        skipped = "" if backend is None else "; if it was called, Dynamo has left all of it to Python"
        raise HookError(f"nothing is compiled yet: call the compiled function once, then hookkit.report(...){skipped}")
    return steps


def _compiled_step(stats: Any) -> CompiledStep:
    acquired, executed = stats.last_traces[0], stats.last_traces[-1]
    taken = [
        (record, depth)
        for tracing in tracings_of(stats)
        if tracing.names is acquired.names
        for record, depth in with_depth(tracing.calls)
        if record.outcome in ("traced", "region", "opaque")
    ]
    regions = {id(r): r for record, _ in taken if (r := record.region) is not None}.values()
    index_of = {bsym.sym.id: i for i, (record, _) in enumerate(taken) for bsym in record.symbols}
    backward = next((entry.backward_traces for entry in stats.interpreter_cache if _is(entry, stats)), ())
    return CompiledStep(
        calls=[_compiled_call(record, depth) for record, depth in taken],
        forward=[Operation(b.sym.name, index_of.get(b.sym.id)) for b in _operations(acquired.bound_symbols)],
        backward_operations=len(_operations(backward[-1].bound_symbols)) if backward else 0,
        saved_bytes=_bytes(_saved_tensors(executed)) if backward else 0,
        regions=[CompiledRegion(r.name, r.calls, r.seconds) for r in regions],
    )


def _is(entry: Any, stats: Any) -> bool:
    return entry.computation_traces is stats.last_traces


# What a trace holds beside operations.
_BOOKKEEPING = {PrimIDs.RETURN, PrimIDs.DEL, PrimIDs.COMMENT, PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE}


def _operations(bsyms: Sequence[Any]) -> list[Any]:
    return [b for b in bsyms if b.sym.id not in _BOOKKEEPING and b.sym.name != "clear_mutable_collection"]


def _saved_tensors(trace: Any) -> list[TensorProxy]:
    """What a forward that has a backward returns beside its outputs (``connect_to_autograd`` in thunder)."""
    saved = trace.bound_symbols[-1].args[1][0]
    return [t for t in saved if isinstance(t, TensorProxy)]


def _bytes(tensors: Sequence[TensorProxy]) -> int:
    unique = {t.name: t for t in tensors}.values()
    return sum(math.prod(int(n) for n in t.shape) * int(t.dtype.bytes) for t in unique)


def _compiled_call(record: CallRecord, depth: int) -> CompiledCall:
    assert record.rule is not None
    forward, backward, saved = 0, 0, 0
    known, differentiated_by_thunder = True, record.rule.mode == "inline"
    for bsym in record.symbols:
        if isinstance(bsym.sym.meta, Composite):
            composite = record.region.pattern if record.region is not None else bsym.sym.meta
            differentiated_by_thunder |= not composite.is_node and composite.backward is not None
            forward += len(_operations(composite.forward))
            if composite.backward is not None:
                backward += len(_operations(composite.backward))
                saved += _bytes(_residuals(composite))
            elif record.rule.backward_provider is None:
                differentiated_by_thunder = True
            continue
        forward += 1
        operator = getattr(bsym.sym.meta, "operator", None)
        if isinstance(operator, OpaqueCall) and operator.has_backward:
            backward += 1
            assert operator.expected is not None
            if operator.expected.saved_bytes is None:
                known = False
            else:
                saved += operator.expected.saved_bytes
    return CompiledCall(
        name=record.name,
        rule=record.rule.name,
        source=record.source,
        depth=depth,
        outcome=record.outcome,
        reason=record.reason,
        forward_operations=forward,
        backward_operations=None if differentiated_by_thunder else backward,
        saved_bytes=saved if known and not differentiated_by_thunder else None,
        replays=record.replays,
        region=record.region.name if record.region is not None else None,
        no_region=record.no_region,
    )


def _residuals(composite: Composite) -> list[TensorProxy]:
    """The tensors that a call's backward reads, the gradients of its outputs left out."""
    made = {g.name for g in composite.output_gradients if g is not None}
    residuals = []
    for bsym in composite.backward or ():
        residuals += [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy) and a.name not in made]
        made.update(o.name for o in bsym.flat_proxy_outs)
    return residuals
