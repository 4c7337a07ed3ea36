"""In-place operations of the program on tensors that a call keeps, or that share memory with what it returned.

Eager PyTorch watches these with version counters and view tracking; a trace does not. They are looked for when the
program is traced: a call whose residuals are changed later is made opaque, so that PyTorch's own version counters see
it; a view that a custom Function returned must not be changed, as in eager.
"""

from __future__ import annotations

from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy

from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import Sharing, changes_in_place, note_sharing, overwritten_names
from hookkit.engine.trace.composite import Composite
from hookkit.engine.values.wrapping import proxies_in
from hookkit.errors import HookError

__all__ = [
    "OVERWRITTEN",
    "NoRegion",
    "Retrace",
    "check",
    "cuts_gradient",
    "place",
    "refuse_changed_views",
    "shared_names",
    "views_of_arguments",
]


OVERWRITTEN = "another call overwrites what it is given or returns"


class Retrace(Exception):
    """What a call assumed turned out to be false; the program is traced again with the call opaque."""

    def __init__(self, subject: Any, reason: str) -> None:
        super().__init__(reason)
        self.subject = subject
        self.reason = reason


class NoRegion(Retrace):
    """A call cannot be a region; the program is traced again with the call traced."""


def check(trace: Any) -> None:
    """Look through a traced program for in-place operations that a call cannot stand.

    Raises:
        Retrace: if a residual of a traced call is changed.
        HookError: if a view that a call returned is changed, or the gradient of a tensor that is changed with grad mode
            off would be lost.
    """
    _check_overwritten(trace)
    if not any(changes_in_place(b) for b in trace.bound_symbols):
        return
    sharing = Sharing()
    residuals: dict[str, Composite] = {}
    views: dict[str, str] = {}
    cut: dict[str, Any] = {}  # inputs that were changed with grad mode off
    for bsym in trace.bound_symbols:
        if any(gradflow.requires_grad(trace, o) for o in bsym.flat_proxy_outs if o.name not in cut):
            for argument in bsym.flat_proxy_args:
                if argument.name in cut:
                    raise _lost_gradient(cut[argument.name])
        if changes_in_place(bsym):
            target = next(a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy))
            if cuts_gradient(trace, bsym, target):
                if target.history is None:
                    raise _lost_gradient(bsym)
                cut.update(dict.fromkeys(sharing.group(target.name), bsym))
            for name in sharing.group(target.name):
                if name in residuals:
                    call = residuals[name]
                    again = Retrace if call.is_node else NoRegion
                    raise again(call.subject, f"{bsym.sym.name} changes a tensor that its backward needs, in place")
                if name in views:
                    raise HookError(
                        f"{bsym.sym.name} changes in place what the result of {views[name]} shares with an argument of "
                        "the call or with another result, which a compiled program cannot follow; eager PyTorch "
                        f"refuses it for views made in a custom Function ({place(bsym)}). Clone the result first."
                    )
        note_sharing(sharing, bsym)
        call = bsym.sym.meta
        if isinstance(call, Composite) and call.backward is not None:
            residuals.update(dict.fromkeys(call.residual_names(), call))
        for name in getattr(call, "views", ()):
            views[name] = bsym.sym.name


def _check_overwritten(trace: Any) -> None:
    """Look for traced calls around an opaque one that overwrites what they are given or return.

    What of that their backward reads, and when, is as in eager where PyTorch runs them.

    Raises:
        Retrace: if there is one.
    """
    names = overwritten_names(trace.bound_symbols)
    for bsym in trace.bound_symbols if names else ():
        call = bsym.sym.meta
        if isinstance(call, Composite):
            touched = {p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
            if names & touched:
                raise (Retrace if call.is_node else NoRegion)(call.subject, OVERWRITTEN)


def _lost_gradient(bsym: Any) -> HookError:
    return HookError(
        f"{bsym.sym.name} changes a tensor that requires grad in place with grad mode off ({place(bsym)}), and it is "
        "used afterwards; thunder loses its gradient, eager PyTorch does not. Use the operation that returns a new "
        "tensor, or change it outside the compiled program."
    )


def refuse_changed_views(trace: Any, bsyms: list[Any]) -> None:
    """Refuse an in-place operation on a view, if the gradient would have to find its way to what shares its memory.

    thunder 0.2.6 writes to the memory and does not differentiate that; delete this when it does.

    Args:
        trace: the computation trace.
        bsyms: its bound symbols, those of views that are certain rewritten (:mod:`hookkit.engine.trace.functionalize`).

    Raises:
        HookError: if there is one.
    """
    views, same = Sharing(), Sharing()
    changed: dict[str, Any] = {}
    inputs = {o.name for b in bsyms if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL for o in b.flat_proxy_outs}
    for bsym in bsyms:
        is_return = bsym.sym.id == prims.PrimIDs.RETURN
        for argument in proxies_in(bsym.args[0]["output"]) if is_return else bsym.flat_proxy_args:
            if argument.name in changed and gradflow.requires_grad(trace, argument):
                change = changed[argument.name]
                raise HookError(
                    f"{change.sym.name} changes a tensor in place that is a view, or has one, and what shares its "
                    f"memory is read afterwards ({place(change)}); thunder does not differentiate that. Write it "
                    "without the view, as in h = torch.cat(...) or h = torch.where(...), or change the whole tensor. "
                    "Whether reshape, flatten and contiguous share or copy is not known: use view, or clone."
                )
        tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
        if not tensors:
            continue
        if changes_in_place(bsym):
            for out in outs:
                same.join(tensors[0].name, out.name)
                views.join(tensors[0].name, out.name)
            others = views.group(tensors[0].name) - same.group(tensors[0].name)
            # thunder has no gradient for an input that is changed through a detached view
            if any(gradflow.requires_grad(trace, o) for o in outs) or not others.isdisjoint(inputs):
                changed.update(dict.fromkeys(others, bsym))
        else:
            note_sharing(views, bsym)


def place(bsym: Any) -> str:
    """The user's file and line of an operation."""
    line = getattr(bsym.source_positions, "lineno", None)
    return f"{bsym.source_filename}:{line}"


def cuts_gradient(trace: Any, bsym: Any, target: TensorProxy) -> bool:
    """Whether an in-place operation writes into a tensor that requires grad with grad mode off."""
    copy = bsym.subsymbols[-1] if bsym.subsymbols else bsym
    return copy.kwargs.get("grad_enabled") is False and gradflow.requires_grad(trace, target)


def shared_names(bsyms: Any, roots: dict[str, str]) -> set[str]:
    """The tensors that may share memory with another one when that, or they themselves, are changed in place.

    Args:
        bsyms: bound symbols, in order.
        roots: from each name of a tensor that is changed in place to its first.
    """
    sharing = Sharing()
    names: dict[str, list[str]] = {}
    for name, root in roots.items():
        names.setdefault(root, []).append(name)
    shared: set[str] = set()
    seen: set[str] = set()  # not what exists only inside of an operation
    for bsym in bsyms:
        seen.update(p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
        if not changes_in_place(bsym):
            note_sharing(sharing, bsym)
            continue
        target = next(a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)).name
        group = {target}
        while len(wider := {n for g in group for m in names.get(roots.get(g, g), [g]) for n in sharing.group(m)}) > len(
            group
        ):
            group = wider
        tensors = {roots.get(n, n) for n in group & seen}
        if len(tensors) > 1:
            shared |= tensors
    return shared


def views_of_arguments(forward: Any, outputs: Any) -> frozenset[str]:
    """The outputs of recorded operations that may share memory with tensors from outside."""
    sharing = Sharing()
    made: set[str] = set()
    outside: set[str] = set()
    for bsym in forward:
        outside.update(a.name for a in bsym.flat_proxy_args if a.name not in made)
        made.update(o.name for o in bsym.flat_proxy_outs)
        note_sharing(sharing, bsym)
    return frozenset(o.name for o in outputs if sharing.group(o.name) & outside)
