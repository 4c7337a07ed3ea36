"""Which tensors of a trace share memory: views, and operations that may return what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import NumberProxy, ProxyTag, TensorProxy

__all__ = ["Sharing", "changes_in_place", "keeps_order", "may_view", "note_sharing", "overwritten_names", "viewed"]


class Sharing:
    """Groups of names of tensors that share memory."""

    def __init__(self) -> None:
        self._groups: dict[str, set[str]] = {}

    def group(self, name: str) -> set[str]:
        """The tensors that share memory with one, which is among them."""
        return self._groups.get(name, {name})

    def join(self, a: str, b: str) -> None:
        """Note that two tensors share memory."""
        group = self.group(a) | self.group(b)
        for name in group:
            self._groups[name] = group


def changes_in_place(bsym: Any) -> bool:
    """Whether a bound symbol writes into its first tensor argument."""
    if bsym.sym.tags and prims.OpTags.IN_PLACE in bsym.sym.tags:
        return True
    return bool(bsym.subsymbols) and bsym.subsymbols[-1].sym.id == prims.PrimIDs.COPY_


def note_sharing(sharing: Sharing, bsym: Any) -> None:
    """Note which results of an operation may share memory with its first tensor."""
    if not (changes_in_place(bsym) or may_view(bsym)):
        for inner in bsym.subsymbols:
            note_sharing(sharing, inner)
        return
    inputs = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    for out in bsym.flat_proxy_outs:
        if inputs and isinstance(out, TensorProxy):
            sharing.join(inputs[0], out.name)


def overwritten_names(bsyms: Sequence[Any]) -> set[str]:
    """The tensors, and those that share memory with them, that opaque calls overwrite without PyTorch's counting it."""
    calls = [(b, _overwritten(b)) for b in bsyms]
    if not any(places for _, places in calls):
        return set()
    sharing = Sharing()
    for bsym in bsyms:
        note_sharing(sharing, bsym)
    return {name for bsym, places in calls for i in places for name in sharing.group(bsym.args[i].name)}


def _overwritten(bsym: Any) -> frozenset[int]:
    operator = getattr(bsym.sym.meta, "operator", None)
    return getattr(getattr(operator, "expected", None), "overwritten", frozenset())


def may_view(bsym: Any) -> bool:
    """Whether an operation's results may share memory with its first tensor."""
    if bsym.sym is ltorch.getitem:
        return _is_basic(bsym.args[1])
    symbols = (ltorch._syms_returning_views, ltorch._syms_that_may_return_views, {prims.transpose})
    named = bsym.sym.name in ("detach", "shallow_copy")
    return named or any(bsym.sym in s for s in symbols) or bool(getattr(bsym.sym.meta, "views", ()))


def viewed(bsym: Any) -> TensorProxy | None:
    """The tensor of which an operation's one result is a view, whatever the strides; None if that is not certain.

    A result that PyTorch does not let a program change is not among them: one of several views, or made without grad.
    """
    tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    if not tensors or len(outs) != 1 or ProxyTag.DETACHED_AUTOGRAD_GRAPH in outs[0].tags:
        return None
    if bsym.sym in (ltorch.reshape, ltorch.flatten):
        certain = _splits(tensors[0].shape, outs[0].shape)
    elif bsym.sym is ltorch.getitem:
        certain = _is_basic(bsym.args[1])
    else:
        certain = bsym.sym in _VIEWS
    if not certain and len(bsym.subsymbols) == 1:  # x.to(x.dtype)
        (inner,) = bsym.subsymbols
        base = viewed(inner)
        certain = base is not None and (base.name, inner.flat_proxy_outs[0].name) == (tensors[0].name, outs[0].name)
    return tensors[0] if certain else None


def keeps_order(bsym: Any) -> bool:
    """Whether a view has all elements, in the order in which they were."""
    return bsym.sym is not ltorch.getitem and bsym.sym not in _OTHERS


_OTHERS = {
    prims.transpose,
    *(ltorch.diagonal, ltorch.expand, ltorch.expand_as, ltorch.movedim, ltorch.permute),
    *(ltorch.select, ltorch.t, ltorch.transpose),
}
_VIEWS = {
    prims.shallow_copy,
    *(ltorch.squeeze, ltorch.unflatten, ltorch.unsqueeze, ltorch.view, ltorch.view_as),
    *_OTHERS,
}


def _is_basic(key: Any) -> bool:
    """Whether what a tensor is indexed with makes a view of it, and not a copy."""
    keys = key if isinstance(key, tuple) else (key,)
    basic = (int, slice, NumberProxy, type(None), type(...))
    return all(isinstance(k, basic) and not isinstance(k, bool) for k in keys)


def _splits(shape: Any, into: Any) -> bool:
    """Whether a reshape only splits dimensions, so that it makes a view of a tensor with any strides."""
    rest = [n for n in into if n != 1]
    for size in (n for n in shape if n != 1):
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest
