"""Which tensors of a trace require grad.

Only the inputs of a trace say so; of intermediates it follows from the operations recorded so far: a result requires
grad if an operand does, unless it was computed with grad mode off.
"""

from __future__ import annotations

import weakref
from typing import Any

from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx

from hookkit.engine.trace.aliasing import Sharing, changes_in_place, may_view
from hookkit.engine.values.wrapping import is_differentiable_dtype

__all__ = [
    "CALL",
    "DRAWS",
    "OPAQUE_BACKWARD",
    "REGION",
    "TRACED",
    "WHERE_USED",
    "forget",
    "is_explicit",
    "is_made_leaf",
    "is_opaque_backward",
    "note_made_leaf",
    "requires_grad",
    "set_requires_grad",
]

# The ids of hookkit's symbols begin with one of these.
CALL = "hookkit.call."  # its results say whether they require grad
TRACED = "hookkit.traced."  # thunder differentiates its operations
REGION = "hookkit.region."  # what a region is compiled to, which computes its forward or its backward
OPAQUE_BACKWARD = "hookkit.backward."
WHERE_USED = "hookkit.where_used."
DRAWS = "hookkit_draws."  # keeps the state of random generators; part of no call


class _Flow:
    def __init__(self) -> None:
        self.flags: dict[str, bool] = {}
        self.changed: dict[str, set[str]] = {}  # for each name of a tensor that was changed in place all its names
        self.views = Sharing()  # without those that are detached
        self.made_leaves: set[str] = set()
        self.seen: dict[int, int] = {}  # id of a scope's list -> how many of its symbols are accounted for


_flows: weakref.WeakKeyDictionary[TraceCtx, _Flow] = weakref.WeakKeyDictionary()


def requires_grad(trace: TraceCtx, value: Any) -> bool:
    """Whether a value is a tensor proxy that requires grad, as eager PyTorch would say at this point."""
    if not isinstance(value, TensorProxy):
        return False
    flow = _flows.setdefault(trace, _Flow())
    for scope in trace.scopes:
        if scope is None:
            continue
        start = min(flow.seen.get(id(scope), 0), len(scope))
        for bsym in scope[start:]:
            _account(flow, bsym)
        flow.seen[id(scope)] = len(scope)
    return _flag(flow, value)


def set_requires_grad(trace: TraceCtx, tensor: TensorProxy, value: bool) -> None:
    """State whether a tensor requires grad."""
    _flows.setdefault(trace, _Flow()).flags[tensor.name] = value


def note_made_leaf(trace: TraceCtx, tensor: TensorProxy) -> None:
    """The program has made a leaf of a tensor that it made: ``x.requires_grad_()``."""
    _flows.setdefault(trace, _Flow()).made_leaves.add(tensor.name)


def is_made_leaf(trace: TraceCtx, tensor: TensorProxy) -> bool:
    """Whether the program has made a leaf of a tensor that does not require grad otherwise."""
    return tensor.name in _flows.setdefault(trace, _Flow()).made_leaves


def forget(trace: TraceCtx, scope: list[Any]) -> None:
    """A scope is gone; another list may get its identity."""
    flow = _flows.get(trace)
    if flow is not None:
        flow.seen.pop(id(scope), None)


def _flag(flow: _Flow, tensor: Proxy) -> bool:
    return flow.flags.get(tensor.name, bool(getattr(tensor, "requires_grad", False)))


def is_explicit(bsym: Any) -> bool:
    """Whether a bound symbol is a call of hookkit's, whose results themselves say whether they require grad."""
    return isinstance(bsym.sym.id, str) and bsym.sym.id.startswith(CALL)


def is_opaque_backward(bsym: Any) -> bool:
    """Whether a bound symbol is the backward of an opaque call."""
    return isinstance(bsym.sym.id, str) and bsym.sym.id.startswith(OPAQUE_BACKWARD)


def _account(flow: _Flow, bsym: Any) -> None:
    if is_explicit(bsym):
        for out in bsym.flat_proxy_outs:
            flow.flags.setdefault(out.name, bool(getattr(out, "requires_grad", False)))
        return
    tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    if not tensors:
        return  # an input that is unpacked, or a new tensor: it says itself
    any_requires = any(_flag(flow, t) for t in tensors)
    names = {t.name for t in tensors}
    detached = bsym.sym.name in ("detach", "detach_") or any(
        ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)
    )
    for out in bsym.flat_proxy_outs:
        if isinstance(out, TensorProxy) and out.name not in names and out.name not in flow.flags:
            flow.flags[out.name] = any_requires and not detached and is_differentiable_dtype(out)
    if may_view(bsym) and not detached:
        for out in bsym.flat_proxy_outs:
            flow.views.join(tensors[0].name, out.name)
    if changes_in_place(bsym):
        names = flow.changed.setdefault(tensors[0].name, {tensors[0].name})
        names.update(o.name for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy))
        flow.changed.update(dict.fromkeys(names, names))
        if any_requires and not detached:
            flow.flags.update((view, True) for name in names for view in flow.views.group(name))
