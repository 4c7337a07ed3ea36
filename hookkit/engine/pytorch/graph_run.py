"""Running a callee under PyTorch's own autograd, cut out of the graph around it.

This is what an opaque call does at run time, and, on tensors without data, what its metadata is found with. The
inputs enter through one autograd node, so that no storage is kept that eager would not keep, and gradients are taken
where they reach that node; the engine itself materialises, validates and frees.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import attrs
import torch

from hookkit import compat
from hookkit.engine.pytorch import node_run
from hookkit.engine.pytorch.provider_function import no_inputs_kept
from hookkit.engine.values.captured import fill, settled
from hookkit.engine.values.wrapping import TensorMetadata, leaves, map_leaves

__all__ = [
    "Autocast",
    "EagerResult",
    "EagerState",
    "OpaqueState",
    "autocast_regions",
    "is_own_leaf",
    "run_eagerly",
    "saved_by",
]


class _Entry(torch.autograd.Function):
    """The border of an opaque call: hands tensors on, and keeps what arrives for them in the backward."""

    @staticmethod
    def forward(ctx: Any, sink: list[Any], anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.sink[:] = gradients
        return (None, None, *(None for _ in gradients))


@attrs.frozen
class Autocast:
    """One autocast region around a call."""

    device: str
    dtype: torch.dtype
    enabled: bool


def _references(node: Any) -> int:
    return sys.getrefcount(node.variable)


@functools.cache
def _references_to_nothing_held() -> int:
    """How many references there are to a leaf that only the graph holds; versions of torch differ."""
    with torch.enable_grad():
        return _references((torch.zeros((), requires_grad=True) + 1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def _is_held(node: Any) -> bool:
    """Whether somebody beside the graph holds the leaf of a node that accumulates gradients."""
    return _references(node) > _references_to_nothing_held()


def saved_by(node: Any) -> list[Any]:
    """What a node of PyTorch's graph keeps for its backward.

    Raises:
        RuntimeError: if a tensor was changed in place since it was saved.
    """
    return [getattr(node, name) for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]


def is_own_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor that requires grad is one that the program was given: it has a ``grad`` that may be read.

    A view of a leaf that is made with grad mode off is a leaf, too.
    """
    return isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and not tensor._is_view())


def undefined_root(output: torch.Tensor) -> torch.Tensor:
    """A scalar from which PyTorch's engine reaches the node of an output without a gradient for it."""
    with torch.enable_grad():
        undefined: Any = torch._C._functions.UndefinedGrad()(output)
        return undefined.sum()  # type: ignore[no-any-return]


class OpaqueState:
    """What an opaque call keeps for its backward."""

    __slots__ = ("__weakref__",)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradient of each input that needs one, by the input's index; None where there is none."""
        raise NotImplementedError


@attrs.define(eq=False, slots=False)
class EagerState(OpaqueState):
    """What is kept between the forward and the backward of an opaque call.

    It holds edges of the autograd graph, not tensors.

    Attributes:
        edges: for each output that requires grad its place in the graph.
        sink: where the gradients of the inputs arrive.
        entered: the indices of the inputs that came in through the border node.
        leaves: those that were handed on as they are.
        anchor: what makes the border node require grad.
        root: where the backward begins if no output of the call has a gradient; None if it does not run then.
    """

    edges: list[Any]
    sink: list[Any]
    entered: list[int]
    leaves: dict[int, torch.Tensor]
    anchor: torch.Tensor | None
    root: torch.Tensor | None = None

    def nodes(self, is_border: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
        """The nodes of the graph, each once; without those at a border, and what is behind them."""
        waiting = [edge.node for edge in self.edges]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node in seen or is_border(node):
                continue
            seen.add(node)
            yield node
            waiting += [n for n, _ in node.next_functions if n is not None]

    def saved_bytes(self) -> int | None:
        """How much the graph keeps in tensors, each storage once; None if a node does not tell."""
        sizes: dict[int, int] = {}
        for node in self.nodes():
            try:
                saved = saved_by(node)
            except RuntimeError:  # changed in place since it was saved
                return None
            with torch._C.DisableTorchFunction():  # a mode that refuses the storage of tensors without data
                for tensor in leaves(saved):
                    if isinstance(tensor, torch.Tensor):
                        storage = tensor.untyped_storage()._cdata
                        sizes[storage] = max(sizes.get(storage, 0), tensor.numel() * tensor.element_size())
        return sum(sizes.values())

    def hidden_leaves(self) -> list[torch.Tensor]:
        """Leaves that PyTorch would give a gradient and that are no inputs: a parameter of a module, a global tensor.

        A leaf that the callee made for itself, and that nobody else holds, is none of them.
        """
        given = {id(leaf) for leaf in self.leaves.values()}
        own = self.nodes(lambda node: isinstance(node, _Entry._backward_cls))
        variables = (node.variable for node in own if hasattr(node, "variable") and _is_held(node))
        return [variable for variable in variables if id(variable) not in given]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradient of each input that needs one, by the input's index; None where there is none.

        Args:
            gradients: for each output that requires grad its gradient, or None if nothing used it.
        """
        used = [(e, g) for e, g in zip(self.edges, gradients, strict=True) if g is not None]
        if not used and self.root is not None:
            used = [(self.root, torch.ones_like(self.root))]
        found: dict[int, torch.Tensor | None] = dict.fromkeys((*self.entered, *self.leaves))
        if not used:
            return found
        roots, cotangents = zip(*used, strict=True)
        keep = compat.graph_is_kept()
        self.sink.clear()
        if self.leaves:
            self._refuse_where_pytorch_does()
            first = {id(leaf): index for index, leaf in reversed(self.leaves.items())}  # one may be given twice
            inputs = [self.leaves[index] for index in first.values()]
            anchor = [self.anchor] if self.anchor is not None else []
            got = torch.autograd.grad(roots, [*inputs, *anchor], cotangents, retain_graph=keep, allow_unused=True)
            found.update(zip(first.values(), got, strict=False))
        else:
            torch.autograd.backward(roots, cotangents, retain_graph=keep)
        found.update(zip(self.entered, self.sink, strict=False))
        self.sink.clear()
        return found

    def _refuse_where_pytorch_does(self) -> None:
        """Raise what stands in the graph for a derivative that there is not: nothing leads from there to an input.

        A backward that is asked for the gradients of certain tensors does not come by, as ``Tensor.backward`` does.
        """
        for node in self.nodes():
            if node.name() == "torch::autograd::Error":
                node(None)


@attrs.define(eq=False, slots=False)
class FunctionState(EagerState):
    """What is kept of a custom Function all of whose outputs belong to its own node.

    Attributes:
        arguments: what it was applied to, a slot for each tensor.
        inputs: by index the metadata of each input that gets a gradient.
        outputs: the metadata of what it returned; None for what is no tensor.
    """

    arguments: Sequence[Any] = ()
    inputs: dict[int, TensorMetadata] = attrs.field(factory=dict)
    outputs: Sequence[TensorMetadata | None] = ()

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradient of each input that needs one, by the input's index; None where there is none."""
        arrived: list[torch.Tensor | None] = [None] * len(self.outputs)
        for edge, gradient in zip(self.edges, gradients, strict=True):
            if gradient is not None:  # of a tensor that is returned twice there is one edge
                present = arrived[edge.output_nr]
                arrived[edge.output_nr] = gradient if present is None else present + gradient
        if self.root is None and all(g is None for g in arrived):
            return dict.fromkeys(self.inputs)
        node = self.edges[0].node
        return node_run.validated(node, node_run.apply(node, arrived, self.outputs), self.arguments, self.inputs)


@attrs.define(eq=False)
class EagerResult:
    """What a callee returned, and how to differentiate it.

    Attributes:
        output: the callee's output, its tensors cut out of the graph.
        differentiable: for each tensor in the output, in order, whether it requires grad; then for each that was
            changed in place, False if it is in the output.
        changed: the indices of tensors that the callee changed in place, in order, and their new values.
        dirty_outputs: from the place of an output to the index of the changed tensor that it is.
        state: None if nothing requires grad.
    """

    output: Any
    differentiable: list[bool]
    changed: dict[int, torch.Tensor]
    dirty_outputs: dict[int, int]
    state: EagerState | None


def run_eagerly(
    callee: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    values: Sequence[Any],
    needs: Sequence[bool],
    *,
    grad_mode: bool,
    autocasts: Sequence[Autocast] = (),
    copied: Sequence[int] = (),
    with_root: bool = False,
    written: Collection[int] = (),
    is_function: bool = False,
) -> EagerResult:
    """Call a callee as eager PyTorch would at this place of the program.

    Args:
        callee: what is called.
        arguments: positional and keyword arguments, with slots in the places of the values.
        values: the tensors (and other values) of the call.
        needs: for each value whether it requires grad.
        grad_mode: whether grad mode is on around the call.
        autocasts: the autocast regions around the call, outermost first.
        copied: the indices of tensors that the callee changes in place; it gets copies.
        with_root: whether the backward is to run without any gradient, too.
        written: the indices of those that it changes although PyTorch does not count the change.
        is_function: whether the callee is the ``apply`` of a Function.

    Returns:
        The output and how to differentiate it.
    """
    prepared = list(values)
    entered = []
    leaves: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for index, needed in enumerate(needs):
            value = values[index]
            if index in copied:
                if needed and grad_mode and value.requires_grad and value.is_leaf:
                    raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
                prepared[index] = value = value.detach().clone()
            if not needed:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    prepared[index] = value.detach()
            # PyTorch's engine would run the hooks of a leaf, and so will the program's own backward
            elif value.requires_grad and is_own_leaf(value) and (is_function or not value._backward_hooks):
                leaves[index] = value
            else:
                entered.append(index)
        sink: list[Any] = []
        anchor = None
        if entered:
            anchor = torch.empty((), requires_grad=True)
            # detached, or the engine would go on into the graph that the program's inputs come from
            detached = [prepared[i].detach() for i in entered]
            aliases = _Entry.apply(sink, anchor, *detached)  # type: ignore[no-untyped-call]
            for index, alias in zip(entered, aliases, strict=True):
                prepared[index] = alias
    versions = [v._version if _has_version(v) else None for v in prepared]
    before = list(prepared)
    with settled(), torch.set_grad_enabled(grad_mode), autocast_regions(autocasts), no_inputs_kept():
        args, kwargs = fill(arguments, prepared)
        output = callee(*args, **kwargs)
    changed = [i for i, v in enumerate(versions) if v is not None and (i in written or before[i]._version != v)]
    edges: list[Any] = []
    root: torch.Tensor | None = None
    differentiable: list[bool] = []
    changed_arguments = {id(before[i]): i for i in changed}
    dirty_outputs: dict[int, int] = {}
    given = {id(leaf) for leaf in leaves.values()}

    def cut(value: Any) -> Any:
        nonlocal root
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in changed_arguments:
            dirty_outputs[len(differentiable)] = changed_arguments[id(value)]
        # a new leaf's gradient cannot be asked for from outside
        tracked = value.requires_grad and (value.grad_fn is not None or id(value) in given)
        differentiable.append(tracked)
        if tracked:
            edges.append(compat.gradient_edge(value))
            if with_root and root is None:
                root = undefined_root(value)
        return value.detach()

    outputs = output if type(output) is tuple else (output,)
    returned_metadata = [TensorMetadata.of(o) if isinstance(o, torch.Tensor) else None for o in outputs]
    output = map_leaves(cut, output)
    count = len(differentiable)
    returned = set(dirty_outputs.values())
    values_now = {}
    for index in changed:
        if index in returned:
            differentiable.append(False)
            values_now[index] = before[index].detach()
        else:
            values_now[index] = cut(before[index])
    dirty_outputs = {place: index for place, index in dirty_outputs.items() if place < count}
    state = EagerState(edges, sink, entered, leaves, anchor, root=root) if edges else None
    if state is not None and is_function and not kwargs and _is_one_node(edges):
        inputs = {i: TensorMetadata.of(values[i]) for i in (*entered, *leaves)}
        state = FunctionState(
            edges, sink, entered, leaves, anchor, root, arguments=arguments[0], inputs=inputs, outputs=returned_metadata
        )
    return EagerResult(output, differentiable, values_now, dirty_outputs, state)


def _is_one_node(edges: Sequence[Any]) -> bool:
    """Whether edges of the graph lead to one node, which is a custom Function's and none of an argument of it."""
    node = edges[0].node
    own = isinstance(node, torch.autograd.function.BackwardCFunction) and not isinstance(node, _Entry._backward_cls)
    return own and all(edge.node is node for edge in edges)


def _has_version(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


@contextlib.contextmanager
def autocast_regions(regions: Sequence[Autocast]) -> Iterator[None]:
    """The time in which autocast is as it was around a call."""
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(torch.autocast(region.device, region.dtype, enabled=region.enabled))
        yield
