"""What follows for a program from a call that overwrites what it was given, without PyTorch's counting it.

Such a call runs as in eager PyTorch: it writes into the very tensor. Who reads that tensor afterwards then matters.
thunder's derivatives keep other tensors than PyTorch's do (of ``clamp`` the result, PyTorch the argument), and so may
read what was overwritten where eager PyTorch does not, or the other way round. So the operations around are given to
PyTorch, too, with its own derivatives. And the gradient of a leaf is final, in eager PyTorch, before the backward of
an earlier call can overwrite it.

What comes after one of Dynamo's graphs may be such a call, too: of its results thunder keeps clones where PyTorch keeps
something else.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import tracectx
from torch._subclasses.fake_tensor import FakeTensorMode

from hookkit import compat
from hookkit.engine.interpreter.side_effects import WritesUndone
from hookkit.engine.joint import differentiation
from hookkit.engine.opaque.metadata import example, probe
from hookkit.engine.opaque.opaque_calls import operator_symbol
from hookkit.engine.opaque.operator import OpaqueCall
from hookkit.engine.opaque.unseen_writes import kept_tensors, share_memory
from hookkit.engine.pytorch.provider_function import split_tensors
from hookkit.engine.trace import gradflow, reachability
from hookkit.engine.trace.aliasing import Sharing, changes_in_place, may_view, note_sharing, overwritten_names
from hookkit.engine.trace.composite import Composite, called, make_symbol, symbol_name
from hookkit.engine.trace.in_place_check import place
from hookkit.engine.values.wrapping import Slot, TensorMetadata, as_torch_names, map_leaves
from hookkit.errors import HookError
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "differentiate", "split"]

# Of their results neither thunder nor PyTorch keeps anything; they are what stands before most kernels.
_MATRICES = ("linear", "matmul", "bmm", "baddbmm", "addmm", "mm", "conv1d", "conv2d", "conv3d", "embedding")
_COPIES = ("add", "sub", "cat", "stack", "sum", "mean", "to", "clone", "contiguous", "float", "half", "bfloat16")
_KEEP_NO_RESULT = frozenset((*_MATRICES, *_COPIES))


def differentiate(stock: Callable[..., Any], trace: Any) -> Any:
    """Run thunder's gradient transform on a trace in which PyTorch's derivatives stand where they matter."""
    leave_to_pytorch(trace)
    _note_what_is_complete(trace)
    note_graph(trace)
    return differentiation.differentiate(stock, trace)


def split(stock: Callable[..., Any], joint: Any) -> tuple[Any, Any]:
    """Split a joint trace; the gradients of leaves are not overwritten."""
    forward, backward = differentiation.split(stock, joint)
    if backward is not None:
        keep_for_leaves(backward, forward.bound_symbols[-1].args[0]["flat_args"])
        keep_results(forward)
    return forward, backward


def leave_to_pytorch(trace: Any) -> None:
    """Have PyTorch run the operations of a trace that touch what a call overwrites, with its own derivatives.

    Args:
        trace: the computation trace, before it is differentiated; it is changed.

    Raises:
        HookError: if PyTorch cannot run one of them.
    """
    names = overwritten_names(trace.bound_symbols)
    if not names:
        return
    executor = next(b.sym.executor for b in trace.bound_symbols if isinstance(called(b), OpaqueCall))
    equal = Counter(b.rhs for b in trace.bound_symbols if not gradflow.is_explicit(b))
    for index, bsym in enumerate(trace.bound_symbols):
        if not _is_operation(bsym) or not names & _tensor_names(bsym):
            continue
        # thunder makes one of two that are equal: both would be overwritten, or what one reads is overwritten between
        is_merged = equal[bsym.rhs] > 1
        is_differentiable = any(gradflow.requires_grad(trace, o) for o in bsym.flat_proxy_outs)
        if not (is_merged or is_differentiable):
            continue
        operator, slots = _operator(trace, bsym)
        if is_merged or bsym.sym.name not in _KEEP_NO_RESULT or _keeps(operator, slots, bsym, names):
            trace.bound_symbols[index] = _by_pytorch(trace, executor, bsym, operator, slots)


def _is_operation(bsym: Any) -> bool:
    """Whether a bound symbol is an operation of torch that makes something new."""
    ours = called(bsym) is not None or gradflow.is_explicit(bsym)
    return isinstance(bsym.sym.id, str) and not (ours or may_view(bsym) or changes_in_place(bsym))


def _tensor_names(bsym: Any) -> set[str]:
    return {p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy)}


def _operator(trace: Any, bsym: Any) -> tuple[OpaqueCall, list[Any]]:
    """The operator that an operation becomes, and the proxies that are its arguments."""
    slots: dict[str, Any] = {}

    def slot(value: Any) -> Any:
        if not isinstance(value, Proxy):
            return as_torch_names(value)
        slots.setdefault(value.name, value)
        return Slot(list(slots).index(value.name))

    # thunder records parameters that are left out, and some that PyTorch's functions lack, as None
    given_by_name = {k: v for k, v in bsym.kwargs.items() if v is not None}
    arguments = map_leaves(slot, (tuple(bsym.args), given_by_name))
    given = list(slots.values())
    operator = OpaqueCall(
        description=f"{bsym.sym.name}() at {place(bsym)}",
        note=f"raised in {bsym.sym.name}() at {place(bsym)}, of whose tensors one is overwritten by another call",
        callee=_torch_function(bsym),
        arguments=arguments,
        needs=tuple(gradflow.requires_grad(trace, p) for p in given),
        grad_mode=any(gradflow.requires_grad(trace, o) for o in bsym.flat_proxy_outs),
        autocasts=(),
    )
    return operator, given


def _torch_function(bsym: Any) -> Callable[..., Any]:
    """The function of torch that thunder recorded as a symbol; its id is the function's name."""
    first, *path = bsym.sym.id.split(".")
    named: Any = torch
    for name in path:
        named = getattr(named, name, None)
    # thunder calls some "torch.hardswish" that are elsewhere
    elsewhere = [getattr(home, path[-1], None) for home in (torch.nn.functional, torch.Tensor, torch.special)]
    found = next((f for f in (named, *elsewhere) if callable(f)), None)
    if first != "torch" or found is None:
        raise _cannot(bsym, "thunder does not say which function of PyTorch it stands for")
    return found  # type: ignore[no-any-return]


def _cannot(bsym: Any, why: str) -> HookError:
    return HookError(
        f"{bsym.sym.name}() at {place(bsym)} makes or reads a tensor that another call overwrites in place without "
        f"telling PyTorch, and cannot be run by PyTorch itself: {why}. Give that call a clone of the tensor."
    )


def _keeps(operator: OpaqueCall, slots: list[Any], bsym: Any, names: set[str]) -> bool:
    """Whether PyTorch keeps for the backward of an operation something of what is overwritten."""
    with FakeTensorMode(allow_non_fake_inputs=True), compat.addresses_refused():
        values = [example(p, None) for p in slots]
        result = operator.run(values)
        made, _ = split_tensors(result.output)
        touched = [v for p, v in zip(slots, values, strict=True) if p.name in names]
        touched += [m for p, m in zip(bsym.flat_proxy_outs, made, strict=False) if p.name in names]
        return any(share_memory(t, kept) for kept in kept_tensors(result.state) for t in touched)


def _by_pytorch(trace: Any, executor: Any, bsym: Any, operator: OpaqueCall, slots: list[Any]) -> Any:
    """The bound symbol of the operator that stands for an operation, with the results that that has."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), compat.addresses_refused(), WritesUndone() as operations:
            expected = probe(operator, [example(p, None) for p in slots], operations)
    except Exception as error:
        raise _cannot(bsym, f"{type(error).__name__}: {error}") from error
    outputs = [o for o in bsym.flat_outs if isinstance(o, TensorProxy)]
    if [TensorMetadata.of_proxy(o) for o in outputs] != expected.tensors or expected.changed:
        raise _cannot(bsym, f"it returns {[str(t) for t in expected.tensors]} there")
    operator.expected = expected
    symbol = operator_symbol(executor, symbol_name(trace, bsym.sym.name), operator, slots)
    recorded = _recorded(trace, lambda: symbol(*slots))
    state = recorded.output[len(outputs) :]
    return recorded.from_bsym(
        output=(*outputs, *state),
        source_filename=bsym.source_filename,
        source_positions=bsym.source_positions,
    )


def _recorded(trace: Any, record: Callable[[], Any]) -> BoundSymbol:
    """The bound symbol that something records, which is not put into the trace."""
    scope: list[BoundSymbol] = []
    with tracectx(trace):
        trace.push_scope(scope)
        try:
            record()
        finally:
            trace.pop_scope()
    gradflow.forget(trace, scope)
    return scope[-1]


def _note_what_is_complete(trace: Any) -> None:
    """Note for each call that overwrites gradients which arguments have theirs by then: all that use them come later.

    PyTorch's engine runs the nodes of a graph in the order in which they were made, backwards.
    """
    later = {a.name for a in trace.args if isinstance(a, TensorProxy)}
    for bsym in trace.bound_symbols:
        operator = called(bsym)
        if any(gradflow.requires_grad(trace, o) for o in bsym.flat_proxy_outs) and bsym.sym.id not in _UNPACKING:
            later.difference_update(a.name for a in bsym.flat_proxy_args)
        if isinstance(operator, OpaqueCall) and operator.expected is not None and operator.expected.spoiled:
            operator.complete_before = frozenset(later)


_UNPACKING = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE)


def keep_for_leaves(backward: Any, arguments: Any) -> None:
    """Keep the gradients of leaves from being overwritten by the backward of a call.

    PyTorch's engine adds a gradient to a leaf's ``grad`` as soon as it is complete, before any other node runs, and
    copies it if somebody else holds it. In ``torch.autograd.grad`` it does not.

    Args:
        backward: the backward trace of a program, split off; it is changed.
        arguments: those of the program, in order.
    """
    places = list(_spoiled_gradients(backward, arguments))
    for index, edge, position, gradient in reversed(places):
        with tracectx(backward):
            kept = TensorProxy(like=gradient, requires_grad=False)
        symbol = make_symbol(
            backward.bound_symbols[index].sym.executor,
            symbol_name(backward, "kept_for_leaf"),
            partial(_like, kept),
            partial(_kept, edge),
            kind=gradflow.WHERE_USED,
            is_prim=True,
        )
        returned = backward.bound_symbols[-1]
        values = list(returned.args[0])
        values[position] = kept
        backward.bound_symbols[-1] = returned.from_bsym(args=(tuple(values), *returned.args[1:]))
        backward.bound_symbols.insert(index, _recorded(backward, partial(symbol, gradient)))


def _spoiled_gradients(backward: Any, arguments: Any) -> Iterator[tuple[int, int, int, TensorProxy]]:
    """For each gradient that is complete when a call overwrites it where that is, its edge, its place, and itself."""
    edges: dict[int, int] = {}
    for i, argument in enumerate(arguments):
        if isinstance(argument, TensorProxy):
            edges[i] = len(edges)
    returned = backward.bound_symbols[-1].args[0]
    pending = {i: g for i, g in enumerate(returned) if isinstance(g, TensorProxy)}
    sharing, known = Sharing(), set[str]()
    for index, bsym in enumerate(backward.bound_symbols):
        operator = called(bsym) if gradflow.is_opaque_backward(bsym) else None
        spoiled = operator.expected.spoiled if operator is not None else ()
        names = {n for i in spoiled if isinstance(g := bsym.args[1 + i], Proxy) for n in sharing.group(g.name)}
        complete = operator.complete_before if operator is not None else ()
        for position, gradient in list(pending.items()):
            if gradient.name in names & known and arguments[position].name in complete:
                del pending[position]
                yield index, edges[position], position, gradient
        known.update(o.name for o in bsym.flat_proxy_outs)
        if _may_share(bsym):
            note_sharing(sharing, bsym)
            for out in bsym.flat_proxy_outs:
                sharing.join(next(a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)), out.name)


_RESHAPED = ("reshape", "view", "transpose", "permute", "t", "movedim", "flatten", "unflatten", "squeeze", "unsqueeze")
_MAY_VIEW = ("broadcast_in_dim", "contiguous", "detach", "expand", "getitem", "select", "shallow_copy", "slice", "to")
_VIEWS = frozenset((*_RESHAPED, *_MAY_VIEW))


def _may_share(bsym: Any) -> bool:
    """Whether the result of an executor's operation may share memory with its first tensor."""
    name = (
        bsym.sym.name.removeprefix("torch_").removeprefix("prims_").removesuffix("_impl")
    )  # as thunder's executor has
    return name in _VIEWS and any(isinstance(a, TensorProxy) for a in bsym.flat_proxy_args)


def _like(proxy: TensorProxy, _: Any) -> TensorProxy:
    return proxy


def _kept(edge: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a program's argument, or a copy if it is added to a leaf's ``grad``."""
    node = reachability.running_node()
    leaf = node.next_functions[edge][0] if node is not None else None
    if gradient is None or leaf is None or not hasattr(leaf, "variable") or not compat.accumulates(leaf):
        return gradient
    return gradient.clone()


# by compilation: the trace of one of Dynamo's graphs, before it is differentiated
_graphs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def note_graph(trace: Any) -> None:
    """Note the trace of one of Dynamo's graphs, before it is differentiated."""
    if isinstance(get_compile_data().fn, torch.fx.GraphModule):
        _graphs[get_compile_data()] = trace


def keep_results(forward: Any) -> None:
    """Keep what thunder saves of a graph's results from being overwritten, where PyTorch saves something else.

    Dynamo leaves to eager PyTorch what comes after the graph; that may launch a kernel that writes into its argument.

    Args:
        forward: the forward trace of a program, split off; it is changed.
    """
    graph = _graphs.pop(get_compile_data(), None)
    returned = forward.bound_symbols[-1]
    values, (tensors, others) = returned.args
    sharing = _sharing(forward)
    names = [getattr(o, "name", None) for o in values["flat_output"]]
    exposed = {n: i for i, name in enumerate(names) if name is not None for n in sharing.group(name)}
    saved = {t.name: t for t in tensors if isinstance(t, TensorProxy) and t.name in exposed}
    if graph is None or not saved:
        return
    results, _ = tree_flatten_with_dataclass(graph.bound_symbols[-1].args[0]["output"])
    in_graph = _sharing(graph)
    clones: dict[str, TensorProxy] = {}
    for name, tensor in saved.items():
        if not _is_kept(graph, in_graph.group(results[exposed[name]].name)):
            clones[name] = _clone_at_end(forward, tensor)
    tensors = tuple(clones.get(getattr(t, "name", ""), t) for t in tensors)
    forward.bound_symbols[-1] = returned.from_bsym(args=(values, (tensors, others)))


def _stands_for_operation(call: Any) -> bool:
    """Whether a call is an operation that keeps no result of its own, with a derivative that hookkit has mended."""
    origin = call.origin if isinstance(call, Composite) else None
    return origin is not None and origin.rule.is_mend and origin.rule.name not in _KEEP_RESULT


# Of those for which a rule ships.
_KEEP_RESULT = ("exp", "expm1", "log_softmax", "reciprocal", "rsqrt", "sigmoid", "softmax", "sqrt", "tanh")


def _clone_at_end(forward: Any, tensor: TensorProxy) -> TensorProxy:
    """A clone of a tensor, made when everything else in a trace is."""
    with tracectx(forward):
        clone = TensorProxy(like=tensor, requires_grad=False)
    symbol = make_symbol(
        next(b.sym.executor for b in forward.bound_symbols if b.sym.executor is not None),
        symbol_name(forward, "kept_for_backward"),
        partial(_like, clone),
        torch.clone,
        kind=gradflow.WHERE_USED,
        is_prim=True,
    )
    forward.bound_symbols.insert(-1, _recorded(forward, partial(symbol, tensor)))
    return clone


def _sharing(trace: Any) -> Sharing:
    sharing = Sharing()
    for bsym in trace.bound_symbols:
        note_sharing(sharing, bsym)
        if _may_share(bsym):
            first = next(a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy))
            for out in bsym.flat_proxy_outs:
                sharing.join(first, out.name)
    return sharing


def _is_kept(graph: Any, names: set[str]) -> bool:
    """Whether PyTorch keeps one of some tensors for the backward of a graph."""
    arguments = {a.name for a in graph.args if isinstance(a, TensorProxy)}
    if names & arguments:  # nor is it a result
        return True
    for bsym in graph.bound_symbols:
        if not names & _tensor_names(bsym):
            continue
        if (call := called(bsym)) is not None and not _stands_for_operation(call):
            return True  # it keeps what it does in eager PyTorch
        if _is_operation(bsym) and any(gradflow.requires_grad(graph, o) for o in bsym.flat_proxy_outs):
            try:
                operator, slots = _operator(graph, bsym)
            except HookError:  # thunder does not say which of PyTorch's it is
                continue
            if _keeps(operator, slots, bsym, names):
                return True
    return False


PATCHES = [
    Patch(
        "thunder.transforms.autodiff:grad_transform_on_trace",
        around(differentiate),
        "calls that rules take have no gradient",
        takes=("trace, *args, **kwargs",),
        needed=True,
    ),
    Patch(
        "thunder.transforms.autodiff:split_into_forward_and_backward",
        around(split),
        "what calls keep for the backward is lost",
        takes=("joint_trace",),
        needed=True,
    ),
]
