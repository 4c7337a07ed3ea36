"""In-place operations on a Function's own temporaries, written as operations that make new tensors.

thunder does this for the operations of a program's main trace; those inside a composite symbol it does not see. What
would need to know which tensors share memory (views, arguments) is refused, and so becomes opaque.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.trace import tracectx

from hookkit.engine.gradflow import changes_in_place
from hookkit.errors import UntraceableError

__all__ = ["functionalise"]


def functionalise(trace: Any, bsyms: list[Any]) -> tuple[list[Any], dict[Any, Proxy]]:
    """Replace in-place operations on temporaries.

    Args:
        trace: the trace in which names are made.
        bsyms: the bound symbols of one provider, in order.

    Returns:
        The new bound symbols, and for each tensor that was changed the one that holds its last value.

    Raises:
        UntraceableError: if something is changed that is not a temporary, or that shares memory.
    """
    if not any(changes_in_place(b) for b in bsyms):
        return bsyms, {}
    produced = {o.name for b in bsyms for o in b.flat_proxy_outs}
    shared = _sharing(bsyms)
    current: dict[Any, Proxy] = {}
    result: list[Any] = []
    for original in bsyms:
        bsym = original.from_bsym_swap_proxies(current, skip_output=True) if current else original
        if not changes_in_place(original):
            result.append(bsym)
            continue
        target = next(a for a in original.flat_proxy_args if isinstance(a, TensorProxy))
        if target.name not in produced:
            raise UntraceableError(f"{original.sym.name} changes {target.name}, which comes from outside, in place")
        if target.name in shared:
            raise UntraceableError(f"{original.sym.name} changes {target.name}, which shares memory with a view of it")
        *computation, copy = original.subsymbols
        if copy.sym.id != prims.PrimIDs.COPY_:
            raise UntraceableError(f"{original.sym.name} changes {target.name} in place in a way that is not known")
        written, destination = copy.args[0], copy.args[1]
        result.extend(b.from_bsym_swap_proxies(current, skip_output=True) if current else b for b in computation)
        new: Any = written
        if isinstance(written, Proxy):
            new = current.get(variableify(written), written)
        new = _as(trace, new, destination, result)
        for out in original.flat_proxy_outs:
            if isinstance(out, TensorProxy):
                current[variableify(out)] = new
        # whatever stood for the old value stands for the new one
        for old, held in list(current.items()):
            if held.name == getattr(current.get(variableify(target), target), "name", None):
                current[old] = new
        current[variableify(target)] = new
    return result, current


def _as(trace: Any, value: Any, like: TensorProxy, result: list[Any]) -> TensorProxy:
    """The written value in the shape and dtype of the tensor that it is written to."""
    scope: list[Any] = []
    trace.push_scope(scope)
    try:
        with tracectx(trace):
            if not isinstance(value, TensorProxy):
                new = clang.full(like.shape, value, device=like.device, dtype=like.dtype)
            else:
                new = clang.maybe_convert_to_dtype(value, like.dtype)
                if tuple(new.shape) != tuple(like.shape):
                    new = clang.expand(new, like.shape)
                if new is value:
                    new = prims.shallow_copy(value)
    finally:
        trace.pop_scope()
    result.extend(scope)
    return new


def _sharing(bsyms: list[Any]) -> set[str]:
    """The names of tensors that may share memory with another tensor."""
    shared: set[str] = set()
    for bsym in bsyms:
        viewing = bsym.sym in ltorch._syms_returning_views or bsym.sym in ltorch._syms_that_may_return_views
        if not viewing or changes_in_place(bsym):
            continue
        inputs = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        outputs = [o.name for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
        if inputs and outputs and inputs[0] not in outputs:
            shared.update((inputs[0], *outputs))
    return shared
