"""Composite symbols: a traced call as one bound symbol, its operations beneath it, and its gradient.

The forward's and the backward's operations were recorded by running the providers in the interpreter. Here they
become one symbol, and a gradient transform that puts the backward's operations where thunder differentiates.
"""

from __future__ import annotations

import itertools
import keyword
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import thunder
import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.extend import ImplInfo

from hookkit.call import Call
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.reachability import Reach, WhereUsed
from hookkit.engine.values.wrapping import TensorMetadata
from hookkit.rule import Rule

__all__ = [
    "Composite",
    "Origin",
    "bind",
    "called",
    "clear_tags",
    "export_leaks",
    "feed_undefined",
    "free",
    "fresh",
    "make_symbol",
    "record_constant",
    "renamed",
    "swapped",
    "symbol_name",
    "where_used",
]

_serials = itertools.count(1)
_names: weakref.WeakKeyDictionary[TraceCtx, set[str]] = weakref.WeakKeyDictionary()
_RESERVED = {"torch", "thunder", "ltorch", "prims", "clang", "len", "tuple", "list", "dict"}


def symbol_name(trace: TraceCtx, wanted: str) -> str:
    """A name for a symbol: a Python identifier that nothing else in the trace has, the same in every compilation."""
    base = re.sub(r"\W", "_", wanted) or "call"
    if base[0].isdigit() or keyword.iskeyword(base) or base in _RESERVED:
        base = f"_{base}"
    taken = _names.setdefault(trace, set())
    name, count = base, 0
    while name in taken or trace.has_name(name):
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    trace.add_name(name)
    return name


def make_symbol(
    executor: Any,
    name: str,
    meta: Callable[..., Any],
    function: Callable[..., Any],
    *,
    kind: str,
    is_prim: bool,
    keep: bool = False,
    draws: bool = False,
) -> Symbol:
    """A symbol that prints under its name and, in the printed program, calls a function.

    Args:
        executor: the executor to which it belongs; None for one that is only executed through its subsymbols.
        name: see :func:`symbol_name`.
        meta: takes and returns proxies.
        function: what the name stands for in the compiled program.
        kind: the beginning of its id, see :mod:`hookkit.engine.trace.gradflow`.
        is_prim: whether it is one operator, without operations beneath it.
        keep: whether it is executed even if its result is not used.
        draws: whether it draws random numbers.
    """
    tags = [tag for tag, given in ((prims.OpTags.DONT_DCE, keep), (prims.OpTags.RANDOM_OP, draws)) if given]

    def postprocess(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: function}

    return Symbol(
        name=name,
        id=f"{kind}{name}.{next(_serials)}",
        meta=meta,
        is_prim=is_prim,
        executor=executor,
        tags=tuple(tags) or None,
        _bind_postprocess=postprocess,
    )


def record_constant(tensor: torch.Tensor) -> TensorProxy:
    """Record a tensor that no input of the program leads to (the default of a parameter, say) as an operator.

    It stands before whatever is being recorded, so that everything can use it.
    """
    jit = get_jit_ctx()
    trace = jit.computation_trace
    metadata = TensorMetadata.of(tensor)
    symbol = make_symbol(
        jit.ad_hoc_executor,
        symbol_name(trace, "constant"),
        lambda: metadata.proxy(False),
        lambda: tensor,
        kind=gradflow.CALL,
        is_prim=True,
    )
    jit.ad_hoc_executor._implmap[symbol.id] = ImplInfo(symbol=symbol, grad_transform=symbol)
    with tracectx(trace):
        trace.push_scope(trace.scopes[0])
        try:
            return symbol()
        finally:
            trace.pop_scope()


@attrs.frozen(eq=False)
class Origin:
    """The call that a composite was made of.

    Attributes:
        rule: the rule that took it.
        call: the call.
        returned: what it returned, as a tree of proxies.
        renamed: from proxies to those that have the program's own names, as thunder will write them.
    """

    rule: Rule[..., Any]
    call: Call
    returned: Any
    renamed: Mapping[Any, Proxy]


@attrs.define(eq=False)
class Composite:
    """A traced call: what goes in, what comes out, and the recorded operations between.

    Attributes:
        name: the symbol's name.
        inputs: proxies from outside, each once: tensors that get a gradient first.
        outputs: proxies that the call returns, each once; none of them is an input.
        forward: the bound symbols that make the outputs and the residuals.
        output_gradients: for each output the proxy that stands for its gradient in ``backward``, or None.
        backward: the bound symbols that make the input gradients, or None if thunder differentiates ``forward``.
        input_gradients: for each input its gradient, a proxy of ``backward``, or None.
        explicit: whether the outputs' ``requires_grad`` is stated, or follows from the operations.
        is_node: whether it is one node of PyTorch's graph, as a custom Function is; else each operation is one.
        subject: the Function or rule that is remembered if the call must be opaque after all.
        views: the names of outputs that may share memory with an input.
        used: whether the recorded operations stand in a trace already, under the names that they have.
        wanted_name: the name before it was made unique in the trace.
        reach: to which of the program's outputs it leads, if not to all.
        executor: the executor of the program.
        materializes: whether its backward gets zeros for outputs without a gradient.
        tracked_count: how many of the inputs, the first ones, are edges of the autograd graph.
        is_fed_undefined: whether another call returns None for the gradient of an output.
        undefined: outputs of earlier calls to whose backward this one feeds zeros, see ``feed_undefined``.
        gradient_names: the names in the joint trace of the gradients that it gives.
        origin: the call, for PyTorch to run it again.
        outside: what the forward provider uses besides its arguments, and gives gradients to, by name.
    """

    name: str
    inputs: tuple[Proxy, ...]
    outputs: tuple[Proxy, ...]
    forward: Sequence[BoundSymbol]
    output_gradients: tuple[TensorProxy | None, ...] = ()
    backward: Sequence[BoundSymbol] | None = None
    input_gradients: tuple[Proxy | None, ...] = ()
    explicit: bool = True
    is_node: bool = True
    subject: Any = None
    views: frozenset[str] = frozenset()
    used: bool = False
    wanted_name: str = ""
    reach: Reach | None = None
    executor: Any = None
    materializes: bool = True
    tracked_count: int = 0
    is_fed_undefined: bool = False
    undefined: list[TensorProxy] = attrs.field(factory=list)
    gradient_names: list[str] = attrs.field(factory=list)
    origin: Origin | None = None
    outside: dict[str, TensorProxy] = attrs.field(factory=dict)

    @classmethod
    def of_operations(
        cls, name: str, subject: Any, operations: Sequence[BoundSymbol], outputs: Sequence[Proxy]
    ) -> Composite:
        """One that thunder differentiates by differentiating its operations."""
        inputs = tuple(free(operations))
        return cls(
            name=name, inputs=inputs, outputs=tuple(outputs), forward=operations, explicit=False, subject=subject
        )

    def residual_names(self) -> set[str]:
        """The names of the tensors that the backward reads."""
        return {a.name for b in self.backward or () for a in b.flat_proxy_args}

    def tracked(self, args: Sequence[Any]) -> Sequence[Any]:
        """Those of the symbol's arguments that are edges of the autograd graph."""
        return args[: self.tracked_count]

    def given_gradients(self, args: Sequence[Any]) -> list[Any]:
        """Those of the symbol's arguments that get a gradient."""
        return [a for a, g in zip(args, self.input_gradients, strict=True) if g is not None]

    def __call__(self, *args: Any) -> Any:
        """Record the operations anew in the active trace, or execute them on real tensors."""
        if get_tracectx() is None:
            return self._compiled()(*args)
        self.used = True
        return self._replay(args)[0]

    def gradient_transform(self, *args: Any) -> Any:
        """Record the forward, and what computes the gradients of the inputs from those of the outputs."""
        outputs, env = self._replay(args)
        by_name = dict(zip((o.name for o in self.outputs), outputs, strict=True))
        for output, gradient in zip(self.outputs, self.output_gradients, strict=True):
            if gradient is not None:
                env[variableify(gradient)] = prims.get_grad(by_name[output.name])
        assert self.backward is not None
        _record(self.backward, env, fresh=self.used)
        self.used = True
        for given, gradient in zip(args, self.input_gradients, strict=True):
            if gradient is not None:
                found = self._where_used(swapped(env, gradient))
                self.gradient_names.append(found.name)
                prims.put_grad(given, found)
        feed_undefined(self.undefined)
        return outputs

    def _where_used(self, gradient: Any) -> Any:
        """A gradient, or zeros where eager PyTorch would not have called the backward.

        It is defined if the backward runs, and not only if what it is made from is.
        """
        several = sum(g is not None for g in self.output_gradients) > 1
        if self.reach is None and not several and not self.is_fed_undefined:
            return gradient
        return where_used(self.executor, self.where_used_name, WhereUsed(self.reach))(gradient)

    @property
    def where_used_name(self) -> str:
        """The name of the operator that hands its gradients on."""
        return f"{self.name}_where_used"

    def _replay(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[Any, Any]]:
        env = {variableify(i): a for i, a in zip(self.inputs, args, strict=True) if a is not i}
        _record(self.forward, env, fresh=self.used)
        return tuple(swapped(env, o) for o in self.outputs), env

    def _compiled(self) -> Callable[..., Any]:
        return thunder.jit(lambda *args: self(*args))  # type: ignore[no-any-return]

    def copied(self, env: dict[Any, Proxy]) -> Composite:
        """The same operations with other inputs and new names; ``env`` holds the inputs, and gets the new proxies."""

        def new(proxy: Any) -> Any:
            return swapped(env, proxy)

        forward = renamed(self.forward, env)
        env.update({variableify(g): fresh(g) for g in self.output_gradients if g is not None})
        return attrs.evolve(
            self,
            name=self.wanted_name or self.name,
            inputs=tuple(map(new, self.inputs)),
            outputs=tuple(map(new, self.outputs)),
            forward=forward,
            output_gradients=tuple(map(new, self.output_gradients)),
            backward=None if self.backward is None else renamed(self.backward, env),
            input_gradients=tuple(map(new, self.input_gradients)),
            views=frozenset(new(o).name for o in self.outputs if o.name in self.views),
            used=False,
            undefined=[],
            gradient_names=[],
        )

    def symbol(self, trace: TraceCtx) -> Symbol:
        """The symbol that stands for it in a trace."""
        if self.explicit:
            clear_tags(self)
        self.wanted_name, self.name = self.name, symbol_name(trace, self.name)
        kind = gradflow.CALL if self.explicit else gradflow.TRACED
        symbol = make_symbol(None, self.name, self, self, kind=kind, is_prim=False)
        if self.backward is not None:
            self.executor._implmap[symbol.id] = ImplInfo(
                symbol=symbol, execution_transform=self, grad_transform=self.gradient_transform
            )
        return symbol

    def operations(self, bsym: BoundSymbol) -> Sequence[BoundSymbol]:
        """The operations of its bound symbol in a trace."""
        return list(bsym.subsymbols)

    def beneath(self) -> Sequence[BoundSymbol]:
        """The operations that stand beneath its symbol in a trace."""
        return self.forward


def where_used(executor: Any, name: str, meta: WhereUsed) -> Symbol:
    """The symbol of an operator that hands a gradient on, or zeros where eager PyTorch has none."""
    return make_symbol(executor, name, meta, meta.run, kind=gradflow.WHERE_USED, is_prim=True)


def feed_undefined(tensors: Sequence[TensorProxy]) -> None:
    """Record zeros as the gradients of tensors, as thunder does for a gradient that it reads and does not have."""
    trace = get_tracectx()
    assert trace is not None
    scope = trace.peek_scope()
    assert scope is not None
    for tensor in tensors:
        zeros = TensorProxy(like=tensor, requires_grad=False)
        scope.append(ltorch.zeros.bind(*tensor.shape, device=tensor.device, dtype=tensor.dtype, output=zeros))
        prims.put_grad(tensor, zeros)


def bind(trace: TraceCtx, executor: Any, composite: Composite) -> None:
    """Record a composite as one bound symbol in the trace, and register its gradient with the executor."""
    composite.executor = executor
    symbol = composite.symbol(trace)
    with tracectx(trace):
        bsym = BoundSymbol(
            symbol,
            args=composite.inputs,
            kwargs={},
            output=composite.outputs,
            subsymbols=list(composite.beneath()),
            source_filename=trace._current_source_filename,
            source_positions=trace._current_source_positions,
        )
        symbol._bind_postprocess(bsym)
    scope = trace.peek_scope()
    assert scope is not None
    scope.append(bsym)


def called(bsym: BoundSymbol) -> Any:
    """What a bound symbol of hookkit's stands for: a composite, or the operator of an opaque call; else None."""
    return bsym.sym.meta if isinstance(bsym.sym.meta, Composite) else getattr(bsym.sym.meta, "operator", None)


def clear_tags(composite: Composite) -> None:
    """The operations ran with grad mode off, but it is the composite that says what is differentiable.

    thunder's later names for the tensors (the interpreter's swap map) carry the tag, too.
    """
    renamed = get_jit_ctx()._proxy_swapmap
    kept = {o.name for o in composite.outputs}
    for bsym in composite.forward:
        for out in bsym.flat_proxy_outs:
            if out.name not in kept:
                out.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
                if (later := renamed.get(variableify(out))) is not None:
                    later.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def swapped(env: dict[Any, Any], proxy: Any) -> Any:
    """What a proxy is called now."""
    return env.get(variableify(proxy), proxy) if isinstance(proxy, Proxy) else proxy


def renamed(bsyms: Sequence[BoundSymbol], env: dict[Any, Any]) -> list[BoundSymbol]:
    """Bound symbols with other inputs, and new names for what they make; ``env`` gets the new proxies."""
    result = []
    for bsym in bsyms:
        _rename(bsym, env)
        result.append(bsym.from_bsym_swap_proxies(env))
    return result


def _record(bsyms: Sequence[BoundSymbol], env: dict[Any, Any], *, fresh: bool) -> None:
    """Append bound symbols to the active trace with other inputs and, if ``fresh``, with new names for results."""
    trace = get_tracectx()
    assert trace is not None
    scope = trace.peek_scope()
    assert scope is not None
    for bsym in bsyms:
        if fresh:
            _rename(bsym, env)
        scope.append(bsym.from_bsym_swap_proxies(env) if env else bsym.from_bsym())


def _rename(bsym: BoundSymbol, env: dict[Any, Any]) -> None:
    given = {a.name for a in bsym.flat_proxy_args}
    for out in bsym.flat_proxy_outs:
        if out.name not in given and variableify(out) not in env:
            env[variableify(out)] = fresh(out)
    for sub in bsym.subsymbols:
        _rename(sub, env)


def fresh(proxy: Proxy) -> Proxy:
    """A proxy like another, under a new name."""
    if isinstance(proxy, TensorProxy):
        return TensorProxy(like=proxy, requires_grad=proxy.requires_grad, tags=set(proxy.tags))
    return proxy.replace_name(None)


def free(bsyms: Sequence[Any], known: set[str] = frozenset()) -> list[Proxy]:  # type: ignore[assignment]
    """The proxies that bound symbols read and do not make, each once, in order."""
    made = set(known)
    free: dict[str, Proxy] = {}
    for bsym in bsyms:
        for arg in bsym.flat_proxy_args:
            if arg.name not in made:
                free.setdefault(arg.name, arg)
        made.update(o.name for o in bsym.flat_proxy_outs)
    return list(free.values())


def export_leaks(trace: TraceCtx) -> None:
    """Let composites return what their forward made and the program uses elsewhere.

    A forward can hand a tensor on otherwise than by returning it: in a list that it was given, say.
    """
    made: dict[str, tuple[BoundSymbol, Proxy]] = {}
    defined: set[str] = set()
    for bsym in trace.bound_symbols:
        for arg in bsym.flat_proxy_args:
            if arg.name not in defined and arg.name in made:
                source, proxy = made[arg.name]
                _export(source, proxy)
                defined.add(proxy.name)
        defined.update(o.name for o in bsym.flat_proxy_outs)
        if isinstance(bsym.sym.meta, Composite):
            for inner in bsym.subsymbols:
                for out in inner.flat_proxy_outs:
                    made.setdefault(out.name, (bsym, out))


def _export(bsym: BoundSymbol, proxy: Proxy) -> None:
    composite = bsym.sym.meta
    assert isinstance(composite, Composite)
    composite.outputs = (*composite.outputs, proxy)
    composite.output_gradients = (*composite.output_gradients, None)
    bsym.output = composite.outputs
    for cached in (
        "flat_outs_and_spec",
        "flat_outs",
        "flat_proxy_outs",
        "flat_variableified_proxy_outs",
        "_var_output",
    ):
        bsym.__dict__.pop(cached, None)
    bsym.__dict__.pop("_hash", None)
