"""What a program has computed so far, as a function that PyTorch runs and differentiates.

``torch.autograd.grad`` in a program asks for the derivative of what is recorded in the trace. The operations that lead
from the inputs to the outputs are run again, under PyTorch's autograd, by one operator that takes what else they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.trace import from_trace, tracectx

from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.interpreter.reasons import user_source
from hookkit.engine.joint.run_again import Builder, GeneratorStates, NotAgain, may_draw_again
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place
from hookkit.engine.trace.composite import Composite, called, make_symbol, symbol_name
from hookkit.engine.trace.recomputation import draws
from hookkit.engine.values.wrapping import leaves, proxies_in, unwrap_arguments, wrap_result
from hookkit.errors import HookError

__all__ = ["Recorded", "record"]


@attrs.frozen(eq=False)
class Recorded:
    """A part of a program that leads from some tensors to others.

    Attributes:
        run: takes the inputs and the operands; returns the outputs, then those of the inputs that it computes.
        computed: the places of inputs that are computed from others.
        made_leaves: the places of inputs that the program has made leaves of the graph.
        count: how many outputs there are.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    computed: Sequence[int]
    made_leaves: frozenset[int]
    count: int

    def __call__(
        self, inputs: Sequence[torch.Tensor], operands: Sequence[Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run it.

        Returns:
            The outputs, and the inputs as they stand in their graph.
        """
        given = [t.detach().requires_grad_() if i in self.made_leaves else t for i, t in enumerate(inputs)]
        results = self.run(*given, *operands)
        for place, value in zip(self.computed, results[self.count :], strict=True):
            given[place] = value
        return list(results[: self.count]), given


def record(outputs: Any, inputs: Any) -> Any:
    """The part of the program between tensors that it has computed, and what that reads besides; wrapped.

    Args:
        outputs: a tensor, or a sequence of tensors, as an interpreter value.
        inputs: the same, or a dict.
    """
    unwrap_arguments((outputs, inputs), {})
    roots = [p for p in leaves(unwrap(outputs)) if isinstance(p, TensorProxy)]
    sources = [p for p in leaves(unwrap(inputs)) if isinstance(p, TensorProxy)]
    try:
        return wrap_result(_Slice(roots, sources).recorded(), outputs, inputs)
    except NotAgain as error:
        return raise_in_program(
            HookError(
                f"torch.autograd.grad() at {user_source()} cannot be part of a compiled program: PyTorch runs again "
                f"what leads from the inputs to the outputs, and {error}"
            )
        )


class _Slice:
    """The operations that lead from some proxies of the trace to others."""

    def __init__(self, roots: Sequence[TensorProxy], sources: Sequence[TensorProxy]) -> None:
        self._trace = get_jit_ctx().computation_trace
        self._roots, self._sources = roots, sources
        self._dependent = {p.name for p in sources}
        self._needed = {p.name for p in roots}
        self._states: dict[int, Proxy] = {}

    def recorded(self) -> tuple[Recorded, tuple[Proxy, ...]]:
        """The function, and the operands that it takes besides the inputs."""
        body = self._body()
        made = {o.name for b in body for o in b.flat_proxy_outs}
        names = [p.name for p in self._sources]
        operands = {p.name: p for b in body for p in _read(b) if p.name not in made and p.name not in names}
        operands.update({p.name: p for p in self._roots if p.name not in made and p.name not in names})
        operands.update({p.name: p for p in self._states.values()})
        computed = [i for i, p in enumerate(self._sources) if p.name in made]
        trace = from_trace(self._trace)
        # an input that is computed has its name there: as an argument it needs another
        with tracectx(trace):
            arguments = [TensorProxy(like=p) if p.name in made else p for p in self._sources]
            wanted = (*self._roots, *(self._sources[i] for i in computed))
            unpacks = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in (*arguments, *operands.values())]
            returned = prims.python_return.bind({"output": wanted}, output=None)
        unique = {a.name: a for a in arguments}
        if len(unique) < len(arguments):
            raise NotAgain("one tensor is given as two inputs")
        trace.args = (*arguments, *operands.values())
        trace._siginfo = SigInfo.from_name_and_args("recorded", trace.args)
        trace.bound_symbols = [*unpacks, *body, returned]
        built = Builder(trace, self._states).build([True] * len(wanted))
        leaves_made = frozenset(i for i, p in enumerate(self._sources) if gradflow.is_made_leaf(self._trace, p))
        return Recorded(built.run, computed, leaves_made, len(self._roots)), tuple(operands.values())

    def _body(self) -> list[Any]:
        """The operations between, in order; those that draw random numbers will draw the same ones."""
        symbols = self._symbols()
        for _, bsym in symbols:
            if any(p.name in self._dependent for p in _read(bsym)):
                self._dependent.update(o.name for o in bsym.flat_proxy_outs)
        self._needed.update(p.name for p in self._sources)
        body = []
        for scope, bsym in reversed(symbols):
            read = {p.name for p in _read(bsym)}
            if self._needed.isdisjoint(o.name for o in bsym.flat_proxy_outs) or read.isdisjoint(self._dependent):
                continue
            self._needed.update(read & self._dependent)
            body.append(bsym)
            if may_draw_again(bsym):
                self._states[id(bsym)] = self._with_state(scope, bsym)
        body.reverse()
        self._refuse_changes(symbols, body)
        return body

    def _symbols(self) -> list[tuple[list[Any], Any]]:
        """All operations that are recorded, each with its scope; those that draw as the ones beneath them."""
        found: list[tuple[list[Any], Any]] = []
        for scope in self._trace.scopes:
            if scope is None:
                continue
            flat: list[Any] = []
            for bsym in scope:
                flat += _without_draws(bsym)
            scope[:] = flat
            found += [(scope, b) for b in scope]
        return found

    def _with_state(self, scope: list[Any], bsym: Any) -> Proxy:
        """Record, before an operation, what keeps the state of torch's generators."""
        with tracectx(self._trace):
            state = AnyProxy(None, prefix="generators")
        executor = get_compile_data().executors_list[0]
        name = symbol_name(self._trace, "generators")
        symbol = make_symbol(executor, name, lambda: state, GeneratorStates, kind=gradflow.DRAWS, is_prim=True)
        place = next(i for i, b in enumerate(scope) if b is bsym)
        scope.insert(place, symbol.bind(output=state))
        return state

    def _refuse_changes(self, symbols: Sequence[tuple[list[Any], Any]], body: Sequence[Any]) -> None:
        names = {p.name for b in body for p in (*_read(b), *b.flat_proxy_outs)}
        for _, bsym in symbols:
            touched = {p.name for p in (*_read(bsym), *bsym.flat_proxy_outs)}
            if changes_in_place(bsym) and names & touched:
                raise NotAgain(f"{bsym.sym.name} changes a tensor in place; use the operation that makes a new one")


def _read(bsym: Any) -> list[Proxy]:
    """What an operation reads; a call is run again with all its arguments."""
    call = called(bsym)
    origin = call.origin if isinstance(call, Composite) else None
    besides = proxies_in((origin.call.args, origin.call.kwargs)) if origin is not None else []
    return list({p.name: p for p in (*bsym.flat_proxy_args, *besides)}.values())


def _without_draws(bsym: Any) -> list[Any]:
    """An operation, or those beneath it where one draws random numbers, which stands by itself then."""
    if called(bsym) is not None or not bsym.subsymbols or not draws(bsym):
        return [bsym]
    return [inner for b in bsym.subsymbols for inner in _without_draws(b)]
