"""In-place operations on temporaries of a Function or of a program, written as operations that make new tensors.

In a Function, what would need to know which tensors share memory (views, arguments) is refused, and so becomes opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.trace import from_trace, tracectx

from hookkit.engine import gradflow
from hookkit.engine.gradflow import changes_in_place, is_explicit
from hookkit.engine.mutation import cuts_gradient, shared_names
from hookkit.errors import UntraceableError

__all__ = ["functionalise", "functionalise_program"]


def functionalise_program(stock: Callable[..., Any], trace: Any, *options: Any) -> Any:
    """Write a program's in-place operations on its own temporaries as operations that make new tensors.

    thunder executes them in place: what it keeps of such a tensor for the backward is overwritten, and operations that
    it puts in another order read the wrong value. An input that requires grad gets its new value at the end of the
    program: through an operation that changes it thunder gives it no gradient. What shares memory, and other inputs,
    stay thunder's.

    Args:
        stock: ``thunder.core.update_aliases.insert_alias_updates``.
        trace: the computation trace.
        *options: its other arguments.
    """
    if any(changes_in_place(b) for b in trace.bound_symbols):
        bsyms, values = functionalise(trace, trace.bound_symbols, strict=False)
        inputs = {o.name: o for b in bsyms if b.sym.id in _UNPACKING for o in b.flat_proxy_outs}
        changed = {i.name: values[variableify(i)] for i in inputs.values() if variableify(i) in values}
        if changed:
            bsyms[-1:] = _write_inputs(trace, bsyms[-1], inputs, changed)
        functional = from_trace(trace)
        functional.bound_symbols = bsyms
        functional.scopes = [functional.bound_symbols]
        trace = functional
    return stock(trace, *options)


def functionalise(trace: Any, bsyms: list[Any], *, strict: bool = True) -> tuple[list[Any], dict[Any, Proxy]]:
    """Replace in-place operations on temporaries.

    Args:
        trace: the trace in which names are made.
        bsyms: the bound symbols of one provider, or of a program, in order.
        strict: whether an in-place operation that cannot be replaced is refused; else it is left as it is.

    Returns:
        The new bound symbols, and for each tensor that was changed the one that holds its last value.

    Raises:
        UntraceableError: if something is changed that is not a temporary, or that shares memory.
    """
    if not any(changes_in_place(b) for b in bsyms):
        return bsyms, {}
    produced = {o.name for b in bsyms if b.sym.id not in _UNPACKING for o in b.flat_proxy_outs}
    shared = shared_names(bsyms)
    # PyTorch's version counters watch what an opaque call keeps for its backward
    watched = (
        set() if strict else {p.name for b in bsyms if is_explicit(b) for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    )
    current: dict[Any, Proxy] = {}
    result: list[Any] = []
    for original in bsyms:
        bsym = original.from_bsym_swap_proxies(current, skip_output=True) if current else original
        if not changes_in_place(original):
            result.append(bsym)
            continue
        target = next(a for a in original.flat_proxy_args if isinstance(a, TensorProxy))
        obstacle = _obstacle(trace, original, target, produced, shared, watched, strict)
        if obstacle is not None:
            if strict:
                raise UntraceableError(f"{original.sym.name} changes {target.name} in place, {obstacle}")
            result.append(bsym)
            continue
        *computation, copy = original.subsymbols
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
        before = current.get(variableify(target), target).name
        current.update({name: new for name, held in current.items() if held.name == before})
        current[variableify(target)] = new
    return result, current


_UNPACKING = frozenset({prims.PrimIDs.UNPACK_TRIVIAL})


def _write_inputs(trace: Any, returned: Any, inputs: dict[str, Proxy], changed: dict[str, Proxy]) -> list[Any]:
    """What writes the last values of inputs into them, and the program's return, in the place of its return."""
    scope: list[Any] = []
    trace.push_scope(scope)
    try:
        with tracectx(trace):
            copies = {n: prims.copy_(value, inputs[n], grad_enabled=False) for n, value in changed.items()}
    finally:
        trace.pop_scope()
    for copy in copies.values():
        copy.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    values = dict(returned.args[0])
    by_value = {value.name: inputs[name] for name, value in changed.items()}
    # by these thunder finds the gradients of the inputs; what is written is returned so that it is not dropped
    values["flat_args"] = [by_value.get(getattr(a, "name", None), a) for a in values["flat_args"]]
    values["written"] = list(copies.values())
    return [*scope, returned.from_bsym(args=(values, *returned.args[1:]))]


def _obstacle(
    trace: Any, bsym: Any, target: TensorProxy, produced: set[str], shared: set[str], watched: set[str], strict: bool
) -> str | None:
    """Why an in-place operation cannot be replaced, or None."""
    if target.name not in produced and (strict or not gradflow.requires_grad(trace, target)):
        return "which comes from outside"
    if target.name in watched:
        return "which a call may keep for its backward"
    if target.name in shared:
        return "which shares memory with a view of it"
    if not bsym.subsymbols or bsym.subsymbols[-1].sym.id != prims.PrimIDs.COPY_:
        return "in a way that is not known"
    if cuts_gradient(trace, bsym, target):
        return "with grad mode off, although it requires grad"
    return None


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
