"""In-place operations on temporaries of a Function or of a program, written as operations that make new tensors.

In a Function, what would need to know which tensors share memory (views, arguments) is refused, and so becomes opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.trace import from_trace, tracectx

from hookkit.engine import gradflow
from hookkit.engine.gradflow import changes_in_place
from hookkit.engine.mutation import cuts_gradient, shared_names
from hookkit.engine.symbols import Composite, called, make_symbol, symbol_name
from hookkit.errors import HookError, UntraceableError

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
        HookError: if an input would lose its gradient.
    """
    if not any(changes_in_place(b) for b in bsyms):
        return bsyms, {}
    roots = _changed_tensors(bsyms)
    made = {o.name for b in bsyms if b.sym.id not in _UNPACKING for o in b.flat_proxy_outs}
    fixed = _fixed(trace, bsyms, roots, strict)
    watched: dict[str, Any] = {}  # from what an opaque call may keep for its backward to that call's executor
    current: dict[Any, Proxy] = {}
    result: list[Any] = []
    for original in bsyms:
        bsym = original.from_bsym_swap_proxies(current, skip_output=True) if current else original
        if not changes_in_place(original):
            result.append(bsym)
            for proxy in (*original.flat_proxy_args, *original.flat_proxy_outs):
                if called(original) and not isinstance(original.sym.meta, Composite):
                    watched[roots.get(proxy.name, proxy.name)] = original.sym.executor
                elif original.sym.id in _UNPACKING and proxy.name in roots and proxy.name not in fixed:
                    current[variableify(proxy)] = _recorded(trace, result, prims.clone, proxy)
            continue
        target = _target(original)
        root = roots[target.name]
        obstacle = fixed.get(root) or _obstacle(trace, original)
        if obstacle is not None:
            if strict:
                raise UntraceableError(f"{original.sym.name} changes {target.name} in place, {obstacle}")
            if (
                obstacle == SHARES
                and root == target.name
                and root not in made
                and gradflow.requires_grad(trace, target)
            ):
                raise HookError(
                    f"{original.sym.name} changes an input of the compiled program in place that requires grad and of "
                    f"which there is a view ({original.source_filename}); thunder loses its gradient, eager PyTorch "
                    "does not. Clone the input first, or take the view after the change."
                )
            result.append(bsym)
            continue
        *computation, copy = original.subsymbols
        written, destination = copy.args[0], copy.args[1]
        result.extend(b.from_bsym_swap_proxies(current, skip_output=True) if current else b for b in computation)
        new: Any = written
        if isinstance(written, Proxy):
            new = current.get(variableify(written), written)
        new = _recorded(trace, result, _as, new, destination)
        for out in original.flat_proxy_outs:
            if isinstance(out, TensorProxy):
                current[variableify(out)] = new
        # whatever stood for the old value stands for the new one
        before = current.get(variableify(target), target)
        if root in watched:
            _recorded(trace, result, _changed_symbol(trace, watched[root]), before)
        current.update({name: new for name, held in current.items() if held.name == before.name})
        current[variableify(target)] = new
    return result, current


SHARES = "which shares memory with a view of it"
_UNPACKING = frozenset({prims.PrimIDs.UNPACK_TRIVIAL})


def _write_inputs(trace: Any, returned: Any, inputs: dict[str, Proxy], changed: dict[str, Proxy]) -> list[Any]:
    """What writes the last values of inputs into them, and the program's return, in the place of its return."""
    scope: list[Any] = []
    # PyTorch refuses to change a leaf with grad mode on, and so does thunder's copy
    write = partial(prims.copy_, grad_enabled=True)
    copies = {n: _recorded(trace, scope, write, value, inputs[n]) for n, value in changed.items()}
    for copy in copies.values():
        copy.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    values = dict(returned.args[0])
    by_value = {value.name: inputs[name] for name, value in changed.items()}
    # by these thunder finds the gradients of the inputs; what is written is returned so that it is not dropped
    values["flat_args"] = [by_value.get(getattr(a, "name", None), a) for a in values["flat_args"]]
    values["written"] = list(copies.values())
    return [*scope, returned.from_bsym(args=(values, *returned.args[1:]))]


def _target(bsym: Any) -> TensorProxy:
    """The tensor that an in-place operation changes."""
    return next(a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy))


def _changed_tensors(bsyms: list[Any]) -> dict[str, str]:
    """From each name that a tensor has which is changed in place to its first: the results are the tensor itself."""
    roots: dict[str, str] = {}
    for bsym in bsyms:
        if changes_in_place(bsym):
            target = _target(bsym).name
            root = roots.setdefault(target, target)
            roots.update((o.name, root) for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy))
    return roots


def _fixed(trace: Any, bsyms: list[Any], roots: dict[str, str], strict: bool) -> dict[str, str]:
    """By its first name, each tensor whose changes have to stay in place, and why."""
    produced = {o.name for b in bsyms if b.sym.id not in _UNPACKING for o in b.flat_proxy_outs}
    shared = shared_names(bsyms, roots)
    reasons = dict.fromkeys(shared & set(roots.values()), SHARES)
    tracked: set[str] = set()
    for bsym in filter(changes_in_place, bsyms):
        root = roots[_target(bsym).name]
        if any(gradflow.requires_grad(trace, o) for o in (_target(bsym), *bsym.flat_proxy_outs)):
            tracked.add(root)
        if root not in produced and (obstacle := _obstacle(trace, bsym)):
            reasons.setdefault(root, obstacle)
    outside = {r for r in roots.values() if r not in produced and (strict or r not in tracked)}
    return {**reasons, **dict.fromkeys(outside, "which comes from outside")}


def _obstacle(trace: Any, bsym: Any) -> str | None:
    """Why an in-place operation cannot be replaced, whatever it changes, or None."""
    if not bsym.subsymbols or bsym.subsymbols[-1].sym.id != prims.PrimIDs.COPY_:
        return "in a way that is not known"
    if cuts_gradient(trace, bsym, _target(bsym)):
        return "with grad mode off, although it requires grad"
    return None


def _changed_symbol(trace: Any, executor: Any) -> Any:
    """What tells PyTorch that a tensor that an opaque call may keep was changed, so that its backward refuses it."""

    def meta(tensor: TensorProxy) -> TensorProxy:
        return TensorProxy(like=tensor, requires_grad=False, tags={ProxyTag.DETACHED_AUTOGRAD_GRAPH})

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.increment_version(tensor)
        return tensor

    name = symbol_name(trace, "changed")
    return make_symbol(executor, name, meta, changed, kind=gradflow.CALL, is_prim=True, keep=True)


def _as(value: Any, like: TensorProxy) -> TensorProxy:
    """The written value in the shape and dtype of the tensor that it is written to."""
    if not isinstance(value, TensorProxy):
        return clang.full(like.shape, value, device=like.device, dtype=like.dtype)
    new = clang.maybe_convert_to_dtype(value, like.dtype)
    if tuple(new.shape) != tuple(like.shape):
        new = clang.expand(new, like.shape)
    return prims.shallow_copy(value) if new is value else new


def _recorded(trace: Any, result: list[Any], operation: Callable[..., Any], *args: Any) -> Any:
    """What an operation returns; its bound symbols are appended."""
    scope: list[Any] = []
    trace.push_scope(scope)
    try:
        with tracectx(trace):
            made = operation(*args)
    finally:
        trace.pop_scope()
    result.extend(scope)
    return made
