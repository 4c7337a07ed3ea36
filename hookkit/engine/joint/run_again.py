"""A program run again by PyTorch, operation by operation: for second derivatives, which thunder does not have.

thunder differentiates a program once. Where gradients are to have a graph (``create_graph=True``), or are asked for
many at once (``is_grads_batched=True``), the program's trace as it was before that runs under PyTorch's own autograd,
each call that a rule took as its Function, or its providers, on the inputs and with the random numbers of the first
run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, variableify
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.trace import from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as pytorch

from hookkit import compat
from hookkit.engine.interpreter.outside_tensors import OUTSIDE
from hookkit.engine.interpreter.side_effects import Generators, State
from hookkit.engine.pytorch.dynamo_graphs import as_function
from hookkit.engine.pytorch.graph_run import autocast_regions
from hookkit.engine.pytorch.provider_function import provider_callee, split_tensors
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import Sharing, note_sharing
from hookkit.engine.trace.composite import Composite, called, make_symbol, symbol_name
from hookkit.engine.trace.recomputation import draws
from hookkit.engine.values.binding import Bound
from hookkit.engine.values.captured import fill
from hookkit.engine.values.wrapping import Slot, as_torch_names, leaves, map_leaves

__all__ = [
    "Again",
    "Builder",
    "GeneratorStates",
    "Kept",
    "NotAgain",
    "Program",
    "may_draw",
    "may_draw_again",
    "record_generators",
]


class NotAgain(Exception):
    """A program cannot be run again; the text says why."""


class GeneratorStates:
    """The state of torch's generators when a program began to run."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        started = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if started else []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The time in which the generators begin where they began then; afterwards they are as they were before."""
        with torch.random.fork_rng(devices=range(len(self._cuda))):
            torch.set_rng_state(self._cpu)
            for device, state in enumerate(self._cuda):
                torch.cuda.set_rng_state(state, device)
            yield

    def have_moved(self) -> bool:
        """Whether a number has been drawn since."""
        states = torch.cuda.get_rng_state_all() if self._cuda else []
        moved = any(not torch.equal(*both) for both in zip(states, self._cuda, strict=True))
        return moved or not torch.equal(torch.get_rng_state(), self._cpu)


def may_draw(trace: Any) -> bool:
    """Whether a program may draw random numbers."""
    return any(map(_may_draw, trace.bound_symbols))


def record_generators(trace: Any) -> AnyProxy:
    """Record, at the beginning of a trace, what keeps the state of torch's generators."""
    with tracectx(trace):
        state = AnyProxy(None, prefix="generators")
    executor = get_compile_data().executors_list[0]  # the program's own
    name = symbol_name(trace, "generators")
    symbol = make_symbol(executor, name, lambda: state, GeneratorStates, kind=gradflow.DRAWS, is_prim=True)
    unpacks = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)
    place = next(i for i, b in enumerate(trace.bound_symbols) if b.sym.id not in unpacks)
    trace.bound_symbols.insert(place, symbol.bind(output=state))
    return state


def may_draw_again(bsym: Any) -> bool:
    """Whether a call may draw random numbers when it is run again."""
    return called(bsym) is not None


def _may_draw(bsym: Any) -> bool:
    call = called(bsym) if gradflow.is_explicit(bsym) and bsym.sym.is_prim else None
    return (call is not None and not isinstance(call, Composite)) or draws(bsym)


@attrs.define(eq=False)
class Program:
    """A compiled program, as it was before thunder differentiated it.

    Attributes:
        trace: its computation trace.
        differentiable: for each of its outputs whether it requires grad.
    """

    trace: Any
    differentiable: Sequence[bool]
    _built: Again | NotAgain | None = attrs.field(init=False, default=None)

    def built(self) -> Again:
        """The program as a function that PyTorch differentiates, made when it is first asked for.

        Raises:
            NotAgain: if it cannot be run again.
        """
        if self._built is None:
            try:
                self._built = Builder(self.trace).build(self.differentiable)
            except NotAgain as error:
                self._built = error
        if isinstance(self._built, NotAgain):
            raise self._built
        return self._built


@attrs.frozen
class Again:
    """A program as a function that PyTorch differentiates.

    Attributes:
        run: takes what the program's computation takes, returns those of its outputs that require grad.
        read: for each argument whether it is read.
        written: the places of arguments that the program changes in place.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    read: Sequence[bool]
    written: frozenset[int]


class Kept:
    """What one run of a program keeps to be run again: references to its inputs, and how often they were changed."""

    __slots__ = ("_why_released", "draws", "inputs", "program", "versions")

    def __init__(self, program: Any, inputs: Sequence[Any], draws: GeneratorStates | None) -> None:
        """Begin.

        Args:
            program: what has run: a `Program`, or what like it has ``built``.
            inputs: its inputs.
            draws: the state that torch's generators had, if it may draw random numbers.
        """
        self.program = program
        self.inputs: Sequence[Any] | None = inputs
        self.versions = _versions(inputs)
        self.draws = draws
        self._why_released = ""

    @property
    def count(self) -> int:
        """How many inputs the program takes."""
        return len(self.versions)

    def changed(self) -> int | None:
        """The place of an input that has been changed in place since the program began to run."""
        if self.inputs is None or (now := _versions(self.inputs)) == self.versions:
            return None
        return next(i for i, (a, b) in enumerate(zip(now, self.versions, strict=True)) if a != b)

    def release(self, why: str = "its graph has been freed (retain_graph=True keeps it)") -> None:
        """Let go of the inputs."""
        if self.inputs is not None:
            self.inputs, self._why_released = None, why

    def check(self) -> None:
        """See whether the program can be run again.

        Raises:
            NotAgain: if it cannot.
        """
        if self.inputs is None:
            raise NotAgain(self._why_released)
        built = self.program.built()
        for place, (value, version, read) in enumerate(zip(self.inputs, self.versions, built.read, strict=True)):
            if not read or not isinstance(value, torch.Tensor):
                continue
            shown = f"its input number {place}, a tensor of shape {list(value.shape)},"
            if place in built.written:
                raise NotAgain(f"{shown} is changed in place by the program itself; return a new tensor instead")
            if not value.is_inference() and value._version != version:
                raise NotAgain(
                    f"{shown} has been changed in place since the program ran (by an optimizer's step, say); take the "
                    "second derivative before that, or give the program a clone"
                )

    def gradients(
        self, needed: Sequence[bool], cotangents: Sequence[torch.Tensor], undefined: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs, with a graph if grad mode is on.

        Args:
            needed: for each input whether its gradient is asked for.
            cotangents: for each output that requires grad its gradient.
            undefined: which of those nothing has used; may be empty.

        Raises:
            NotAgain: if the program cannot be run again; see `check`.
        """
        self.check()
        assert self.inputs is not None
        with compat.outside_of_transforms(), self._as_then():
            # Aliases: one input may have been computed from another.
            values = [v.view_as(v) if n else v for v, n in zip(self.inputs, needed, strict=True)]
            outputs = self.program.built().run(*values)
        given = undefined or [False] * len(outputs)
        used = [(o, g) for o, g, without in zip(outputs, cotangents, given, strict=True) if not without]
        if any(not o.requires_grad for o, _ in used):
            raise NotAgain("when it is run again by PyTorch, an output does not require grad that did before")
        found: list[torch.Tensor | None] = [None] * len(values)
        wanted = [i for i, n in enumerate(needed) if n]
        if used and wanted:
            roots, grads = zip(*used, strict=True)
            got = torch.autograd.grad(
                roots, [values[i] for i in wanted], grads, create_graph=torch.is_grad_enabled(), allow_unused=True
            )
            for place, gradient in zip(wanted, got, strict=True):
                found[place] = gradient
        return found

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.draws is not None:
                stack.enter_context(self.draws.restored())
            yield


def _versions(values: Sequence[Any]) -> list[int]:
    return [t._version if isinstance(t, torch.Tensor) and not t.is_inference() else 0 for t in values]


class Builder:
    """Makes of a trace one that PyTorch's executor runs, and whose every operation PyTorch differentiates."""

    def __init__(self, trace: Any, states: Mapping[int, Proxy] | None = None) -> None:
        """Begin.

        Args:
            trace: the trace.
            states: by the identity of a call in it what keeps the state that the generators had before that.
        """
        self._states = states or {}
        self._trace = from_trace(trace)
        self._trace.names = set(trace.names)
        self._source = trace
        self._symbols: list[Any] = []
        self._now: dict[Any, Proxy] = {}  # from a tensor that was changed in place to what it is now
        self._sharing = Sharing()
        self._stale: set[str] = set()  # views of tensors that were changed
        self._written: set[str] = set()
        self._has_written = False
        self._known = {a.name for a in trace.args if isinstance(a, Proxy)}

    def build(self, differentiable: Sequence[bool]) -> Again:
        """The program as a function.

        Raises:
            NotAgain: if it does what cannot be done again.
        """
        *body, returned = self._source.bound_symbols
        for bsym in body:
            self._add(bsym)
        outputs, _ = tree_flatten_with_dataclass(returned.args[0]["output"])
        wanted = tuple(self._swapped(o) for o, d in zip(outputs, differentiable, strict=True) if d)
        self._trace.bound_symbols = [*self._symbols, returned.from_bsym(args=(wanted,))]
        trace = dce(self._trace)
        unpacks = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)
        read = {a.name for b in trace.bound_symbols if b.sym.id not in unpacks for a in b.flat_proxy_args}
        run = transform_for_execution(trace, [pytorch]).python_callable(include_decorators=False)
        names = [getattr(a, "name", None) for a in self._source.args]
        return Again(run, [n in read for n in names], frozenset(i for i, n in enumerate(names) if n in self._written))

    def _swapped(self, proxy: Any) -> Any:
        return self._now.get(variableify(proxy), proxy) if isinstance(proxy, Proxy) else proxy

    def _add(self, bsym: Any) -> None:
        bsym = bsym.from_bsym_swap_proxies(self._now, skip_output=True) if self._now else bsym
        stale = [a.name for a in bsym.flat_proxy_args if a.name in self._stale]
        if stale:
            raise NotAgain(f"it changes a tensor in place of which {stale[0]} is a view, in {bsym.sym.name}")
        call = called(bsym)
        if bsym.sym.id == prims.PrimIDs.COPY_:
            self._write(bsym)
        elif bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            self._name_anew(bsym)
        elif isinstance(call, Composite) and call.backward is not None and call.is_node:
            self._put(bsym, call.name, self._composite(call, bsym))
        elif call is not None and not isinstance(call, Composite):
            self._put(bsym, bsym.sym.name, _Opaque(call))
        elif bsym.sym.name in ("detach", "detach_"):
            self._put(bsym, "detach", torch.Tensor.detach)
        elif isinstance(call, Composite):
            with tracectx(self._trace):
                operations = call.operations(bsym)
            for inner in operations:
                self._add(inner)
        elif _writes(bsym):
            for inner in bsym.subsymbols:
                self._add(inner)
        else:
            self._keep(bsym)
        self._known.update(o.name for o in bsym.flat_proxy_outs)

    def _name_anew(self, bsym: Any) -> None:
        """New names that thunder gives to tensors which share memory, before and after a change in place."""
        (tensors,) = bsym.args
        if len(tensors) > 1 and self._has_written:
            raise NotAgain("it changes one of several tensors in place that share memory")
        self._now.update({variableify(o): t for o, t in zip(bsym.output, tensors, strict=True)})

    def _write(self, bsym: Any) -> None:
        """A change in place: what is read afterwards is the new value."""
        new, old = bsym.args[:2]
        self._has_written = True
        if any(old.name == getattr(a, "name", None) for a in self._source.args):
            self._written.add(old.name)
        self._stale.update(self._sharing.group(old.name) - {old.name})
        for name in (old, bsym.output):
            self._now[variableify(name)] = new
        self._now.update({k: new for k, v in self._now.items() if v.name == old.name})

    def _keep(self, bsym: Any) -> None:
        own = isinstance(bsym.sym.id, str) and bsym.sym.id.startswith("hookkit")
        if bsym.sym.executor is not None and not own:
            raise NotAgain(f"{bsym.sym.name} is an operator of the executor {bsym.sym.executor.name}, not PyTorch's")
        if type(bsym.sym.id).__module__ == "thunder.distributed.prims":
            raise NotAgain(f"{bsym.sym.name} communicates between processes")
        note_sharing(self._sharing, bsym)
        self._append(bsym)

    def _put(self, bsym: Any, name: str, function: Callable[..., Any]) -> None:
        """Call a function in the place of an operation."""
        note_sharing(self._sharing, bsym)
        args = function.arguments if isinstance(function, _Call) else bsym.flat_proxy_args
        if (state := self._states.get(id(bsym))) is not None:
            function, args = _Redrawn(function), (state, *args)
        symbol = self._symbol(name, function)
        self._append(symbol.bind(*args, output=bsym.output))

    def _symbol(self, name: str, function: Callable[..., Any], *, keep: bool = False) -> Any:
        name = symbol_name(self._trace, name)
        return make_symbol(pytorch, name, lambda *_: None, function, kind="hookkit.again.", is_prim=True, keep=keep)

    def _append(self, bsym: Any) -> None:
        """Add an operation, under no_grad if the program was."""
        detached = any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in bsym.flat_proxy_outs)
        if not detached:
            self._symbols.append(bsym)
            return
        switch = self._symbol("set_grad_enabled", torch._C._set_grad_enabled, keep=True)
        self._symbols += [switch.bind(False, output=None), bsym, switch.bind(True, output=None)]

    def _composite(self, composite: Composite, bsym: Any) -> _Call:
        """What runs a traced call: the Function, or the rule's providers, with what the program called it with."""
        origin = composite.origin
        assert origin is not None
        current = {i.name: a for i, a in zip(composite.inputs, bsym.args, strict=True)}
        proxies: list[Any] = []

        def place(value: Any) -> Any:
            if not isinstance(value, Proxy):
                return as_torch_names(value)
            proxy = current.get(value.name)
            if proxy is None:  # nothing reads it, and thunder has renamed what is read
                proxy = self._swapped(origin.renamed.get(variableify(value), value))
            if proxy.name not in self._known:
                raise NotAgain(f"{origin.call} takes an argument that it does not read, and that is not computed")
            proxies.append(proxy)
            return Slot(len(proxies) - 1)

        args, kwargs = map_leaves(place, (origin.call.args, origin.call.kwargs))
        if composite.outside:
            named = Bound.of(origin.rule, origin.call).by_name
            for name in composite.outside:
                root, _, path = name.partition(".")
                if path not in dict(getattr(named.get(root), "named_parameters", dict)()):
                    raise NotAgain(f"{origin.call} uses {name}, which is none of its arguments: pass it as one")
            kwargs = {**kwargs, OUTSIDE: {name: place(proxy) for name, proxy in composite.outside.items()}}
        if len(args) > 1 and all(isinstance(a, torch.fx.GraphModule) for a in args[:2]):
            args = (*as_function(*args[:2]), *args[2:])
        callee = origin.call.callable if origin.rule.opaque_callee else provider_callee(origin.rule, origin.call)
        names = [getattr(leaf, "name", None) for leaf in leaves(origin.returned)]
        wanted = [o.name for o in composite.outputs]
        if not set(wanted) <= set(names):
            raise NotAgain(f"{origin.call} hands a tensor on otherwise than by returning it")
        return _Call(callee, (args, kwargs), proxies, [names.index(n) for n in wanted])


def _writes(bsym: Any) -> bool:
    return any(b.sym.id == prims.PrimIDs.COPY_ or _writes(b) for b in bsym.subsymbols)


@attrs.frozen(eq=False)
class _Redrawn:
    """A call that begins with the random numbers with which it began first."""

    function: Callable[..., Any]

    def __call__(self, state: GeneratorStates, *values: Any) -> Any:
        if not isinstance(state, GeneratorStates):  # nothing is drawn while the call is tried out
            return self.function(*values)
        with state.restored():
            return self.function(*values)


@attrs.define(eq=False)
class _Call:
    """A traced call, run by PyTorch.

    Attributes:
        callee: what is called.
        tree: its positional and keyword arguments, with a slot for each proxy.
        arguments: the proxies.
        places: for each of the call's outputs its place among what the callee returns.
    """

    callee: Callable[..., Any]
    tree: Any
    arguments: list[Any]
    places: list[int]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        args, kwargs = fill(self.tree, values)
        returned = list(leaves(self.callee(*args, **kwargs)))
        return tuple(returned[place] for place in self.places)


@attrs.define(eq=False)
class _Opaque:
    """An opaque call, run by PyTorch without being cut out of the graph; Python state stays as it was."""

    operator: Any

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        operator = self.operator
        expected = operator.expected
        values = tuple(
            v.detach() if isinstance(v, torch.Tensor) and not n else v
            for v, n in zip(values, operator.needs, strict=False)
        )
        prepared = [v.clone() if i in expected.changed else v for i, v in enumerate(values)]
        args, kwargs = fill(operator.arguments, prepared)
        state = State.reachable_from(
            [compat.function_owner(operator.callee) or operator.callee, *args, *kwargs.values()]
        )
        generators = Generators.now()
        with torch.set_grad_enabled(operator.grad_mode), autocast_regions(operator.autocasts):
            output = operator.callee(*args, **kwargs)
        state.restore()
        if generators.drawn_elsewhere():
            raise NotAgain(
                f"{operator.description} draws random numbers that are not torch's, which cannot be drawn again"
            )
        tensors, _ = split_tensors(output)
        results = (*tensors, *(prepared[i] for i in expected.changed))
        return (*results, None) if operator.returns_state else results
