"""What hookkit corrects around thunder's differentiation of a whole trace.

Three things: which outputs of a compiled program require grad; that what a forward provider computes for the backward
is computed in the forward; that an opaque backward sees None where eager PyTorch has no gradient. Second derivatives
are those of :mod:`.run_again`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from thunder.core import dtypes, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import cpu
from thunder.core.proxies import CollectionProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import tracectx

from hookkit.engine.joint import run_again
from hookkit.engine.joint.autograd_link import Functions
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place
from hookkit.engine.trace.composite import Composite, called, where_used
from hookkit.engine.trace.in_place_check import NoRegion, Retrace
from hookkit.engine.trace.reachability import (
    Reach,
    reach_of_calls,
    sources_of_gradients,
    unreached_arguments,
    where_added,
)
from hookkit.engine.values.wrapping import Tag

__all__ = ["RESIDUAL", "check_undefined", "differentiate", "differentiate_region", "split"]


RESIDUAL = Tag("hookkit.RESIDUAL")


@attrs.define
class _Noted:
    """What is noted of a program between its differentiation and the split.

    Attributes:
        differentiable: which outputs require grad.
        program: the program before it is differentiated.
        may_draw: whether it may draw random numbers.
        unreached: the arguments, by name, that lead to none of the outputs that require grad.
        calls: the names of the calls that hookkit took over.
        reach: for each argument what its gradient is made from; empty if that does not matter.
    """

    differentiable: list[bool]
    program: run_again.Program
    may_draw: bool
    unreached: set[str]
    calls: list[str]
    reach: list[Reach | None] = attrs.Factory(list)


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.noted: weakref.WeakKeyDictionary[Any, _Noted] = weakref.WeakKeyDictionary()


_here = _OfThisThread()


def differentiate(stock: Callable[..., Any], trace: Any) -> Any:
    """Run thunder's gradient transform, and remember which outputs of the trace require grad.

    Args:
        stock: ``thunder.transforms.autodiff.grad_transform_on_trace``.
        trace: the computation trace.
    """
    _tag_detached(trace)
    outputs, _ = tree_flatten_with_dataclass(trace.bound_symbols[-1].args[0]["output"])
    # a tensor that is returned twice is one output of the graph
    first = {getattr(o, "name", None): i for i, o in reversed(list(enumerate(outputs)))}
    differentiable = [gradflow.requires_grad(trace, o) and first[o.name] == i for i, o in enumerate(outputs)]
    tracked = [o for o, d in zip(outputs, differentiable, strict=True) if d]
    program, may_draw = run_again.Program(trace, differentiable), run_again.may_draw(trace)
    unreached = unreached_arguments(trace, tracked)
    for place, reached in reach_of_calls(trace, tracked, _edges).items():
        call = called(trace.bound_symbols[place])
        if call is not None and len(reached) < len(tracked):
            call.reach = reached
    _feed_undefined(trace, outputs)
    calls = [b.sym.name for b in trace.bound_symbols if gradflow.is_explicit(b)]
    noted = _here.noted[get_compile_data()] = _Noted(differentiable, program, may_draw, unreached, calls)
    joint = stock(trace)
    # they have other names now
    outputs, _ = tree_flatten_with_dataclass(joint.bound_symbols[-1].args[0]["fw_flat_out"])
    noted.reach = _sources(trace, joint, [o for o, d in zip(outputs, differentiable, strict=True) if d])
    _drop_undefined_gradients(joint)
    _give_zeros_a_shape(joint)
    return joint


def differentiate_region(stock: Callable[..., Any], trace: Any) -> Any:
    """Run thunder's gradient transform on the trace of a region, one of whose outputs requires grad.

    Args:
        stock: ``thunder.transforms.autodiff.grad_transform_on_trace``.
        trace: the region's trace, which returns what a program's does.
    """
    _tag_detached(trace)
    _feed_undefined(trace, trace.bound_symbols[-1].args[0]["output"])
    joint = stock(trace)
    _give_zeros_a_shape(joint)
    return joint


def _tag_detached(trace: Any) -> None:
    for bsym in trace.bound_symbols:
        if bsym.sym.name in ("detach", "detach_"):
            for out in bsym.flat_proxy_outs:
                out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def _sources(trace: Any, joint: Any, tracked: list[Any]) -> list[Reach | None]:
    """What the gradients of a program's arguments are made from; noted for those that opaque calls get, too."""
    opaque = [b for b in joint.bound_symbols if gradflow.is_opaque_backward(b)]
    if len(tracked) < 2 and not opaque:  # all are made from the one output
        return []
    traced = [c for c in map(called, trace.bound_symbols) if isinstance(c, Composite)]
    sources = sources_of_gradients(joint, tracked, {n: c.reach for c in traced for n in c.gradient_names})
    for bsym in opaque:
        call = called(bsym)
        call.output_sources = [sources.get(a.name, frozenset()) for a in bsym.args[1:]]
        call.gradient_names = [o.name for o in bsym.output]
    gradients = joint.bound_symbols[-1].args[0]["output"]
    arguments = [sources.get(g.name) if g is not None else None for g in gradients]
    if opaque:

        def operator(meta: Any, gradient: Any) -> Any:
            symbol = where_used(opaque[0].sym.executor, f"{gradient.name}_where_defined", meta)
            bsym = symbol.bind(gradient, output=meta(gradient))
            bsym.tags.add(BoundSymbolTag.BACKWARD)
            return bsym

        with tracectx(joint):
            where_added(joint, len(tracked), sources, operator)
    return arguments


def _edges(bsym: Any) -> tuple[Any, Any]:
    """Those of a bound symbol's arguments that are edges of the autograd graph; of a call's, which get a gradient."""
    call = called(bsym) if gradflow.is_explicit(bsym) else None
    if call is None:
        return bsym.flat_proxy_args, None
    is_node = not isinstance(call, Composite) or call.is_node
    return call.tracked(bsym.args), call.given_gradients(bsym.args) if is_node else None


def check_undefined(trace: Any) -> None:
    """Look for traced calls whose backward runs without any gradient, and would be given None.

    Raises:
        Retrace: if there is one; it was traced with a gradient. If there is a region of whose operations that is not
            known, it is traced again without the region.
    """
    for call, _, source, runs in _fed_undefined(trace, trace.bound_symbols[-1].flat_proxy_args):
        if isinstance(call, Composite) and not call.is_node:
            raise NoRegion(call.subject, "what used its output may return None for it")
        may_be_none = not runs or not isinstance(source, Composite)
        if may_be_none and isinstance(call, Composite) and call.backward is not None and not call.materializes:
            raise Retrace(call.subject, "materialize_grads is off, and what used its output may return None for it")


def _feed_undefined(trace: Any, outputs: Any) -> None:
    """Have the backwards of calls run whose outputs get no gradient, because what used them returned None for it.

    PyTorch's engine runs every node that is connected to an output of the program, and a custom Function's gets zeros;
    thunder leaves out what no gradient reaches. So the backward that returns None feeds zeros to the earlier call.
    """
    calls = [c for b in trace.bound_symbols if (c := called(b)) is not None]
    if any(map(changes_in_place, trace.bound_symbols)) and sum(gradflow.requires_grad(trace, o) for o in outputs) == 1:
        for call in calls:  # which of them that is is not known; each leads to the output that is used
            call.is_fed_undefined = True
    for call, output, returns_none, runs in _fed_undefined(trace, outputs):
        call.is_fed_undefined = True
        if not runs:
            returns_none.undefined.append(output)


def _fed_undefined(trace: Any, outputs: Any) -> Iterator[tuple[Any, Any, Any, bool]]:
    """The calls for an output of which another call returns None.

    Each with that output and that other call (an opaque one, of which that is known at run time only, if there is one),
    and whether some gradient reaches it.
    """
    if any(map(changes_in_place, trace.bound_symbols)):
        return
    defined = {o.name for o in outputs if gradflow.requires_grad(trace, o)}
    undefined: dict[str, Any] = {}  # by tensor the call that returns None for its gradient
    for bsym in reversed(trace.bound_symbols[:-1]):
        reached = [o for o in bsym.flat_proxy_outs if o.name in defined or o.name in undefined]
        reached = [o for o in reached if gradflow.requires_grad(trace, o)]
        if not reached:
            continue
        without = min(
            (o for o in reached if o.name in undefined),
            key=lambda o: isinstance(undefined[o.name], Composite),
            default=None,
        )
        source = undefined[without.name] if without is not None else None
        runs = any(o.name in defined for o in reached)
        call = called(bsym) if gradflow.is_explicit(bsym) else None
        tracked, given = _edges(bsym)
        if call is not None:
            if source is not None:
                yield call, without, source, runs
            if not isinstance(call, Composite) or call.is_node:
                source, runs = call, True
        if runs:
            defined.update(a.name for a in (tracked if given is None else given))
        if source is not None:
            always = {a.name for a in given or () if isinstance(source, Composite)}
            for name in [a.name for a in tracked if gradflow.requires_grad(trace, a) and a.name not in always]:
                before = undefined.get(name)
                undefined[name] = source if before is None or isinstance(before, Composite) else before


def _drop_undefined_gradients(joint: Any) -> None:
    """In the arguments of opaque backward operators, None in the place of zeros that stand for no gradient.

    thunder reads the gradient of an output that nothing used as zeros (``grad_transform_on_trace``); eager PyTorch
    says undefined, and leaves it to the Function whether that becomes zeros.
    """
    zeros = {
        b.output.name
        for b in joint.bound_symbols
        if b.sym.name == "zeros"
        and isinstance(b.output, TensorProxy)
        and not b.subsymbols
        and BoundSymbolTag.BACKWARD in b.tags
    }
    if not zeros:
        return
    for index, bsym in enumerate(joint.bound_symbols):
        if gradflow.is_opaque_backward(bsym):
            args = tuple(None if isinstance(a, Proxy) and a.name in zeros else a for a in bsym.args)
            joint.bound_symbols[index] = bsym.from_bsym(args=args)


def _give_zeros_a_shape(joint: Any) -> None:
    """Zeros for the gradient of an unused output without dimensions: thunder calls for them without any shape."""
    for index, bsym in enumerate(joint.bound_symbols):
        if bsym.sym.name == "zeros" and not bsym.args:
            joint.bound_symbols[index] = bsym.from_bsym(args=((),))


def split(stock: Callable[..., Any], joint: Any) -> tuple[Any, Any]:
    """Split a joint trace with thunder's own split, keeping residuals in the forward.

    Args:
        stock: ``thunder.transforms.autodiff.split_into_forward_and_backward``.
        joint: the joint trace, in which the executors' operators stand.

    Returns:
        The forward and the backward trace; None for the backward if no output requires grad.
    """
    # thunder's transform for execution puts a write whose own result nothing reads behind the return
    joint.bound_symbols.sort(key=lambda b: b.sym.id == prims.PrimIDs.RETURN)
    returned = joint.bound_symbols[-1]
    values = returned.args[0]
    outputs = values["fw_flat_out"]
    noted = _here.noted.pop(get_compile_data(), None)
    flat, _ = tree_flatten_with_dataclass(outputs)
    if noted is None or len(flat) != len(outputs) or len(flat) != len(noted.differentiable):
        return stock(joint)  # type: ignore[no-any-return]
    differentiable = noted.differentiable
    read = {a.name for b in joint.bound_symbols if BoundSymbolTag.BACKWARD in b.tags for a in b.flat_proxy_args}
    residuals = {
        o.name: o
        for b in joint.bound_symbols
        if BoundSymbolTag.BACKWARD not in b.tags
        for o in b.flat_proxy_outs
        if isinstance(o, TensorProxy) and RESIDUAL in o.tags and o.name in read
    }
    residuals.update(_written(joint))
    for output in flat:
        residuals.pop(getattr(output, "name", None), None)
    if any(differentiable) and not any(g is not None for g in values["output"]):
        _add_something_backward(joint)
    extended = (*outputs, *residuals.values())
    joint.bound_symbols[-1] = returned.from_bsym(args=({**values, "fw_flat_out": extended}, *returned.args[1:]))
    forward, backward = stock(joint)
    if backward is None:
        return _without_extra_outputs(forward, len(outputs), differentiable), None
    kept = [i for i, d in enumerate(differentiable) if d]
    forward = _without_extra_outputs(forward, len(outputs), differentiable)
    if not kept:
        return forward, None
    saved: list[Any] = [_functions(forward, noted)]
    if noted.may_draw:
        saved.append(run_again.record_generators(forward))
    _save(forward, saved)
    _take_cotangents(backward, kept, extra=len(saved))
    return forward, backward


def _written(joint: Any) -> dict[str, Any]:
    """What the forward writes in place, by name.

    thunder's split drops a write into a view if nothing reads the view under the name that is written to.
    """
    forward = [b for b in joint.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags]
    return {b.output.name: b.output for b in forward if b.sym.name == "copy_"}


def _functions(forward: Any, noted: _Noted) -> Functions:
    """The names of the calls that hookkit took over, for the backward's messages, and what arguments lead to."""
    functions = Functions(", ".join(dict.fromkeys(noted.calls)))
    functions.reach, functions.program = noted.reach, noted.program
    arguments = forward.bound_symbols[-1].args[0]["flat_args"]
    functions.unreached = [i for i, a in enumerate(arguments) if getattr(a, "name", None) in noted.unreached]
    return functions


def _save(forward: Any, saved: list[Any]) -> None:
    """Hand something on to the backward."""
    returned = forward.bound_symbols[-1]
    values, (tensors, others) = returned.args
    forward.bound_symbols[-1] = returned.from_bsym(args=(values, (tensors, (*others, *saved))))


def _add_something_backward(joint: Any) -> None:
    """Have something in the backward, even if every gradient is None: thunder drops an empty backward."""
    with tracectx(joint):
        scope: list[Any] = []
        joint.push_scope(scope)
        try:
            prims.full((), 0, device=cpu, dtype=dtypes.float32)
        finally:
            joint.pop_scope()
    for bsym in scope:
        bsym.tags.add(BoundSymbolTag.BACKWARD)
    joint.bound_symbols[-1:-1] = scope


def _without_extra_outputs(forward: Any, count: int, differentiable: list[bool]) -> Any:
    """Return the program's outputs alone, and connect only those to autograd that require grad."""
    returned = forward.bound_symbols[-1]
    values = dict(returned.args[0])
    values["output"] = tuple(values["output"][:count])
    values["flat_output"] = tuple(o for o, d in zip(values["flat_output"][:count], differentiable, strict=True) if d)
    forward.bound_symbols[-1] = returned.from_bsym(args=(values, *returned.args[1:]))
    return forward


def _take_cotangents(backward: Any, kept: list[int], extra: int) -> None:
    """Let the backward take the gradients of the outputs that are connected to autograd, and no others.

    All that it takes is unpacked, also what it does not use: thunder's ``ThunderFunction`` wants its lists emptied.
    """
    (tensors, others), cotangents = backward.args
    cotangents = [cotangents[i] for i in kept]
    others = [*others, *[None] * extra]
    consuming = [b for b in backward.bound_symbols if b.sym.id not in (prims.PrimIDs.RETURN, prims.PrimIDs.DEL)]
    consumed = {a.name for b in consuming if not gradflow.is_opaque_backward(b) for a in b.flat_proxy_args}
    for bsym in backward.bound_symbols:
        if gradflow.is_opaque_backward(bsym):
            operator = called(bsym)
            operator.handed_on = [getattr(o, "name", None) not in consumed for o in bsym.output]
    body = [b for b in backward.bound_symbols if not _unpacks_arguments(b)]
    names = ("saved_for_backward", "cotangents", "C0", "C1")
    backward.names.difference_update(names)
    scope: list[Any] = []
    with tracectx(backward):
        backward.push_scope(scope)
        try:
            parts = [CollectionProxy(list(tensors), name="C0"), CollectionProxy(list(others), name="C1")]
            saved = CollectionProxy(parts, name="saved_for_backward")
            taken = CollectionProxy(cotangents, name="cotangents")
            prims.unpack_trivial(saved, name="saved_for_backward")
            prims.unpack_trivial(taken, name="cotangents")
            for collection in (saved, taken, *parts):
                prims.unpack_sequence(collection, len(collection.coll))
            backward.args = ([p.collection() for p in parts], taken.collection())
        finally:
            backward.pop_scope()
    backward.bound_symbols = [*scope, *body]


def _unpacks_arguments(bsym: Any) -> bool:
    unpacks = (prims.PrimIDs.UNPACK_SEQUENCE, prims.PrimIDs.UNPACK_TRIVIAL)
    taken = bsym.args[0] if bsym.args else bsym.output
    return bsym.sym.id in unpacks and isinstance(taken, CollectionProxy)
