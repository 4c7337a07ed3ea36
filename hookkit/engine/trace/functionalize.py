"""In-place operations on temporaries of a Function or of a program, written as operations that make new tensors.

In a program, what is written to a view is put into the tensor of which it is one, and the other views are made anew. In
a Function, what would need to know which tensors share memory (views, arguments) is refused, and so becomes opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import thunder
import torch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.trace import from_trace, tracectx

from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place, keeps_order, viewed
from hookkit.engine.trace.composite import Composite, called, make_symbol, symbol_name
from hookkit.engine.trace.in_place_check import cuts_gradient, place, refuse_changed_views, shared_names
from hookkit.errors import HookError, UntraceableError
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "functionalise", "functionalise_program"]


def functionalise_program(stock: Callable[..., Any], trace: Any, aliases: list[list[int]], *options: Any) -> Any:
    """Write a program's in-place operations on its own temporaries as operations that make new tensors.

    thunder executes them in place: what it keeps of such a tensor for the backward is overwritten, and operations that
    it puts in another order read the wrong value. An input that requires grad gets its new value at the end of the
    program: through an operation that changes it thunder gives it no gradient. Other inputs, and what shares memory in
    another way than as a view, stay thunder's; where that would lose a gradient, the program is refused.

    Args:
        stock: ``thunder.core.update_aliases.insert_alias_updates``.
        trace: the computation trace.
        aliases: which of its arguments share memory, by their indices.
        *options: its other arguments.

    Raises:
        HookError: if a gradient would be lost.
    """
    # thunder goes by their addresses, and all tensors without elements have the same
    arguments, _ = tree_flatten((trace.args, trace.kwargs))
    aliases = [[i for i in group if i >= len(arguments) or 0 not in arguments[i].shape] for group in aliases]
    aliases = [group for group in aliases if len(group) > 1]
    aliases = _changed_groups(trace, arguments, aliases)
    if any(changes_in_place(b) for b in trace.bound_symbols):
        bsyms, values = functionalise(trace, trace.bound_symbols, strict=False)
        inputs = {o.name: o for b in bsyms if b.sym.id in _UNPACKING for o in b.flat_proxy_outs}
        changed = {i.name: values[variableify(i)] for i in inputs.values() if variableify(i) in values}
        if changed:
            _refuse_aliases(
                trace, {arguments[i].name for group in aliases for i in group if i < len(arguments)}, changed
            )
            bsyms[-1:] = _write_inputs(trace, bsyms[-1], inputs, changed)
        functional = from_trace(trace)
        functional.bound_symbols = bsyms
        functional.scopes = [functional.bound_symbols]
        refuse_changed_views(trace, bsyms)
        trace = functional
    return stock(trace, aliases, *options)


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
    storages = roots if strict else _storages(bsyms, roots)
    made = {o.name for b in bsyms if b.sym.id not in _UNPACKING for o in b.flat_proxy_outs}
    fixed = _fixed(trace, bsyms, roots, storages, strict)
    # by the name of its memory, each tensor that an opaque call may keep for its backward, with that call's executor
    watched: dict[str, dict[str, tuple[Any, Any]]] = {}
    current: dict[Any, Proxy] = {}
    result: list[Any] = []
    views = _Views(trace, roots, storages, current, result)
    for original in bsyms:
        for argument in original.flat_proxy_args:
            views.renew(argument)
        bsym = original.from_bsym_swap_proxies(current, skip_output=True) if current else original
        if not changes_in_place(original):
            result.append(bsym)
            for proxy in (*original.flat_proxy_args, *original.flat_proxy_outs):
                storage = storages.get(proxy.name, proxy.name)
                if called(original) and not isinstance(original.sym.meta, Composite):
                    kept = current.get(variableify(proxy), proxy)
                    watched.setdefault(storage, {})[kept.name] = (original.sym.executor, kept)
                elif original.sym.id in _UNPACKING and proxy.name in storages and proxy.name not in fixed:
                    current[variableify(proxy)] = _recorded(trace, result, prims.clone, proxy)
            views.note(original, fixed)
            continue
        target = _target(original)
        root, storage = roots[target.name], storages[target.name]
        obstacle = fixed.get(storage) or _obstacle(trace, original)
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
                    f"which there is a view ({place(original)}); thunder loses its gradient, eager PyTorch "
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
        is_read = any(a.name == target.name for b in computation for a in b.flat_proxy_args)
        if not strict and not is_read and gradflow.requires_grad(trace, target):
            new = _recorded(trace, result, _instead, current.get(variableify(target), target), new)
        for out in original.flat_proxy_outs:
            if isinstance(out, TensorProxy):
                current[variableify(out)] = new
        for executor, kept in watched.pop(storage, {}).values():
            _recorded(trace, result, _changed_symbol(trace, executor), kept)
        views.write(original, new)
    return result, current


@attrs.define(eq=False)
class _Views:
    """The views of tensors that are changed in place, in the order in which they are made.

    Attributes:
        trace: the trace in which names are made.
        roots: from each name that a changed tensor has to its first.
        storages: from the name of each tensor to the first name of what owns its memory.
        current: what stands for which tensor.
        result: where new bound symbols are appended.
        made: from the first name of a view to the operation that made it, and the tensor of which it is one.
        stale: the views whose memory has changed since they were last made.
    """

    trace: Any
    roots: dict[str, str]
    storages: dict[str, str]
    current: dict[Any, Proxy]
    result: list[Any]
    made: dict[str, tuple[Any, TensorProxy]] = attrs.field(factory=dict)
    stale: set[str] = attrs.field(factory=set)

    def note(self, bsym: Any, fixed: dict[str, str]) -> None:
        """Note a view that an operation makes, of memory whose changes do not stay in place."""
        for out in bsym.flat_proxy_outs:
            storage = self.storages.get(out.name, out.name)
            if storage != out.name and storage not in fixed:
                base = viewed(bsym)
                assert base is not None
                self.made[out.name] = (bsym, base)

    def write(self, change: Any, new: Proxy) -> None:
        """Let a new value stand for a tensor, and for its part of what it is a view of; other views of that are stale.

        Args:
            change: the operation that changes the tensor in place.
            new: its new value.

        Raises:
            HookError: if several elements of the tensor share one place in memory.
        """
        target = _target(change)
        self._replace(target, new)
        name, up_to_date = self._name(target), set()
        up_to_date.add(name)
        while name in self.made:
            bsym, base = self.made[name]
            if new.numel > base.numel:
                raise HookError(
                    f"{change.sym.name} changes a tensor in place of which {bsym.sym.name} put several elements into "
                    f"one place in memory ({place(change)}); eager PyTorch refuses that. Clone the tensor before."
                )
            new = _recorded(self.trace, self.result, _put, bsym, base, self.current.get(variableify(base), base), new)
            self._replace(base, new)
            name = self._name(base)
            up_to_date.add(name)
        self.stale |= {v for v in self.made if self.storages[v] == name}
        self.stale -= up_to_date

    def renew(self, tensor: Proxy) -> None:
        """Make a view again if its memory has changed."""
        name = self._name(tensor)
        if name not in self.stale:
            return
        self.stale.discard(name)
        bsym, base = self.made[name]
        self.renew(base)
        again = bsym.from_bsym_swap_proxies(self.current, skip_output=True)
        self._replace(
            bsym.flat_proxy_outs[0], _recorded(self.trace, self.result, bsym.sym, *again.args, **again.kwargs)
        )

    def _name(self, tensor: Proxy) -> str:
        return self.roots.get(tensor.name) or str(tensor.name)

    def _replace(self, tensor: Proxy, new: Proxy) -> None:
        """Whatever stood for the old value of a tensor stands for the new one."""
        before = self.current.get(variableify(tensor), tensor)
        self.current.update({name: new for name, held in self.current.items() if held.name == before.name})
        self.current[variableify(tensor)] = new


def _put(bsym: Any, base: TensorProxy, value: TensorProxy, part: TensorProxy) -> Any:
    """A value of a tensor, with a part of it in the place of what a view shows.

    Args:
        bsym: the operation that made the view.
        base: the tensor of which it is a view.
        value: the value of that.
        part: the value of the view.
    """
    if keeps_order(bsym):
        return clang.reshape(part, value.shape)
    numbers = clang.arange(start=0, step=1, stop=value.numel, device=value.device, dtype=dtypes.int64)
    numbered = bsym.from_bsym_swap_proxies({variableify(base): clang.reshape(numbers, value.shape)}, skip_output=True)
    places = clang.reshape(bsym.sym(*numbered.args, **numbered.kwargs), (part.numel,))
    flat = clang.reshape(value, (value.numel,))
    return clang.reshape(prims.scatter(flat, places, clang.reshape(part, (part.numel,)), 0), value.shape)


# Under this name thunder's record of what a program depends on (``cache_info``) holds what :func:`layouts` says.
LAYOUTS = "hookkit_layouts"


def layouts(info: dict[str, Any], args: Any, kwargs: Any) -> str:
    """Where the arguments of a program lie that share memory; empty if those that do have the same places in order.

    Args:
        info: thunder's record; it says which arguments share memory, not which parts of it.
        args: the arguments.
        kwargs: those with names.
    """
    flat, _ = tree_flatten((args, kwargs))
    groups = [[int(i) for i in group.split(",")] for group in info["alias_tensor_indices"].split("-") if group]
    found = []
    for group in groups:
        tensors = [flat[i] for i in group if i < len(flat) and isinstance(flat[i], torch.Tensor)]
        places = [(t.storage_offset(), t.is_contiguous() or (t.shape, t.stride())) for t in tensors]
        if any(p != places[0] for p in places):
            found.append(f"{group}: {[(t.storage_offset(), tuple(t.shape), t.stride()) for t in tensors]}")
    return "; ".join(found)


def _changed_groups(trace: Any, arguments: list[Any], groups: list[list[int]]) -> list[list[int]]:
    """Of the groups of arguments that share memory those into which something is written.

    thunder takes the arguments of a group for one. Where nothing is written to them that is only harm: one that is
    detached takes the gradient of the other.

    Raises:
        HookError: if what is written would be lost, or a gradient.
    """
    written = _written(trace.bound_symbols) if groups else {}
    found = []
    for group in groups:
        members = [arguments[i] for i in group if i < len(arguments)]
        writer = next((written[m.name] for m in members if m.name in written), None)
        if writer is None:
            continue
        is_one = thunder._get_cache_info().get(LAYOUTS, "") == ""
        if not is_one or len({(m.numel, m.requires_grad) for m in members}) > 1:
            raise HookError(
                f"{writer.sym.name} changes an input of the compiled program in place that shares memory with another "
                f"one ({place(writer)}), which has another size or other places in that memory, or gets a "
                "gradient where the other gets none; thunder takes the two for one, eager PyTorch does not. Clone one "
                "of the two."
            )
        found.append(group)
    return found


def _written(bsyms: list[Any]) -> dict[str, Any]:
    """The tensors into which something is written, and those that they are views of, by name; and what writes."""
    bases = {o.name: base.name for b in bsyms if (base := viewed(b)) is not None for o in b.flat_proxy_outs}
    bases |= {o.name: _target(b).name for b in bsyms if changes_in_place(b) for o in b.flat_proxy_outs}
    found: dict[str, Any] = {}
    for bsym in bsyms:
        for target in _targets(bsym):
            name: str | None = target.name
            while name is not None and name not in found:
                found[name] = bsym
                name = bases.get(name)
    return found


def _targets(bsym: Any) -> Iterator[TensorProxy]:
    if bsym.sym.id == prims.PrimIDs.COPY_:
        yield bsym.args[1]
    elif changes_in_place(bsym):
        yield _target(bsym)
    for inner in bsym.subsymbols:
        yield from _targets(inner)


def _refuse_aliases(trace: Any, shared: set[str], changed: dict[str, Proxy]) -> None:
    """Refuse to change an input that shares memory with another one."""
    storages = _storages(trace.bound_symbols, _changed_tensors(trace.bound_symbols))
    for bsym in filter(changes_in_place, trace.bound_symbols):
        if storages[_target(bsym).name] in shared & changed.keys():
            raise HookError(
                f"{bsym.sym.name} changes an input of the compiled program in place that requires grad and shares "
                f"memory with another one ({place(bsym)}); thunder loses its gradient, eager PyTorch does not. Clone "
                "one of the two."
            )


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


def _storages(bsyms: list[Any], roots: dict[str, str]) -> dict[str, str]:
    """From each name of a tensor that is changed in place, is a view or has one to that of what owns its memory."""
    storages: dict[str, str] = {}
    for bsym in bsyms:
        base = _target(bsym) if changes_in_place(bsym) else viewed(bsym)
        if base is not None:
            storage = storages.setdefault(base.name, base.name)
            storages.update((o.name, storage) for o in bsym.flat_proxy_outs)
    changed = {storages[name] for name in roots}
    return {name: storage for name, storage in storages.items() if storage in changed}


def _fixed(
    trace: Any, bsyms: list[Any], roots: dict[str, str], storages: dict[str, str], strict: bool
) -> dict[str, str]:
    """By the name of what owns its memory, each tensor whose changes have to stay in place, and why."""
    produced = {o.name for b in bsyms if b.sym.id not in _UNPACKING for o in b.flat_proxy_outs}
    reasons = dict.fromkeys(shared_names(bsyms, storages), SHARES)
    tracked: set[str] = set()
    for bsym in filter(changes_in_place, bsyms):
        storage = storages[_target(bsym).name]
        if any(gradflow.requires_grad(trace, o) for o in (_target(bsym), *bsym.flat_proxy_outs)):
            tracked.add(storage)
        is_shared = len({roots.get(n, n) for n, s in storages.items() if s == storage}) > 1
        if (is_shared or storage not in produced) and (obstacle := _obstacle(trace, bsym)):
            reasons.setdefault(storage, obstacle)
    for name, storage in storages.items():
        if storage not in tracked and roots.get(name, name) != storage:
            reasons.setdefault(storage, SHARES)
    outside = {s for s in storages.values() if s not in produced and (strict or s not in tracked)}
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


def _instead(old: TensorProxy, new: TensorProxy) -> Any:
    """A new value that nothing of the old one is in; the gradient of that is zeros, and not None."""
    return clang.where(clang.full(old.shape, False, device=old.device, dtype=dtypes.bool8), old, new)


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


PATCHES = [
    Patch(
        "thunder:insert_alias_updates",
        around(functionalise_program),
        "gradients of what is changed in place are lost",
        takes=("computation_trace, alias_tensor_indices",),
        needed=True,
    )
]
