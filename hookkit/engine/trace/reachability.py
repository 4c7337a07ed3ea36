"""Which gradients are undefined in eager PyTorch, and which backwards run at all.

A program is one node of PyTorch's autograd. Where only some of its outputs are used, thunder runs the whole backward,
with zeros for the others; eager PyTorch would not call the backward of a Function that leads to those others alone,
and what such a backward makes of zeros need not be zeros. What it returns is therefore dropped. And the backward of an
opaque call may return None where it has returned a gradient before; thunder computes with zeros instead.

So for each gradient of a program its *sources* are known: the program's outputs, by their places, and the gradients
that opaque calls return, by their names in the trace. A gradient all of whose sources are undefined is undefined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbolTag

from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place

__all__ = [
    "Reach",
    "WhereUsed",
    "anything_undefined",
    "none_defined",
    "note_undefined",
    "reach_of_calls",
    "running",
    "running_node",
    "sources_of_gradients",
    "unreached_arguments",
    "where_added",
]

Reach = frozenset[int | str]


class _Running(threading.local):
    def __init__(self) -> None:
        self.undefined: set[int | str] = set()
        self.node: Any = None


_running = _Running()


def reach_of_calls(
    trace: Any, outputs: Sequence[Any], edges: Callable[[Any], tuple[Sequence[Any], Sequence[Any] | None]]
) -> dict[int, Reach]:
    """To which outputs of a trace its bound symbols lead, by their index: from those their backwards are reached.

    Args:
        trace: the computation trace.
        outputs: the outputs that require grad; others do not count.
        edges: gives those of a bound symbol's arguments that lead to its results, and something else.

    Returns:
        Empty where nothing needs to be told apart, or cannot be.
    """
    if len(outputs) < 2 or any(map(changes_in_place, trace.bound_symbols)):
        return {}
    leads: dict[str, set[int | str]] = {}
    for index, output in enumerate(outputs):
        leads.setdefault(output.name, set()).add(index)
    calls: dict[int, Reach] = {}
    for place in reversed(range(len(trace.bound_symbols) - 1)):
        bsym = trace.bound_symbols[place]
        reached: Reach = frozenset().union(*(leads.get(o.name, ()) for o in bsym.flat_proxy_outs))
        if reached:
            calls[place] = reached
            for argument in edges(bsym)[0]:
                leads.setdefault(argument.name, set()).update(reached)
    return calls


@attrs.frozen
class WhereUsed:
    """The metadata of an operator that hands a gradient on, or zeros where eager PyTorch has none; and its function.

    Attributes:
        sources: the sources of what it returns; None if it is always defined.
    """

    sources: Reach | None

    def __call__(self, gradient: TensorProxy) -> TensorProxy:
        return TensorProxy(like=gradient, requires_grad=False)

    def run(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the operator does at run time."""
        return torch.zeros_like(gradient) if none_defined(self.sources) else gradient


def sources_of_gradients(joint: Any, outputs: Sequence[Any], given: dict[str, Reach | None]) -> dict[str, Reach]:
    """What the gradients in a joint trace are made from, by their names.

    Args:
        joint: the trace of forward and backward.
        outputs: the outputs that require grad.
        given: what is known of gradients that traced calls give: whether their backwards run; None if always.
    """
    places: dict[str, int] = {o.name: i for i, o in enumerate(outputs)}
    always: Reach = frozenset(places.values())
    sources: dict[str, Reach] = {}
    for bsym in joint.bound_symbols:
        if BoundSymbolTag.BACKWARD not in bsym.tags:
            continue
        names = [o.name for o in bsym.flat_proxy_outs if o.name not in sources]
        if bsym.sym == prims.get_grad:
            place = places.get(bsym.args[0].name)
            sources.update((n, frozenset([place])) for n in names if place is not None)
        elif gradflow.is_opaque_backward(bsym):
            sources.update((n, frozenset([n])) for n in names)
        else:
            made: Reach = frozenset().union(*(sources.get(a.name, ()) for a in bsym.flat_proxy_args))
            if isinstance(bsym.sym.meta, WhereUsed):
                made = always if bsym.sym.meta.sources is None else bsym.sym.meta.sources
            for name in names:
                known = given.get(name, made)
                sources[name] = always if known is None else known
    return {name: found for name, found in sources.items() if found}


def where_added(joint: Any, count: int, sources: dict[str, Reach], operator: Callable[[WhereUsed, Any], Any]) -> None:
    """Where a gradient that may be undefined meets others, have zeros in its place if it is.

    thunder computes with zeros for what an opaque call does not give. What it makes of them need not be zeros: nan,
    where the derivative is infinite.

    Args:
        joint: the trace of forward and backward.
        count: how many outputs require grad.
        sources: see :func:`sources_of_gradients`.
        operator: makes the bound symbol of the operator for a gradient.
    """
    direct = {
        o.name
        for b in joint.bound_symbols
        if b.sym == prims.get_grad or gradflow.is_opaque_backward(b) or isinstance(b.sym.meta, WhereUsed)
        for o in b.flat_proxy_outs
    }
    always = frozenset(range(count))
    symbols: list[Any] = []
    for bsym in joint.bound_symbols:
        gradients = {a.name: a for a in bsym.flat_proxy_args if a.name in sources}
        together: Reach = frozenset().union(*(sources[n] for n in gradients))
        swap = {}
        if BoundSymbolTag.BACKWARD in bsym.tags and not gradflow.is_opaque_backward(bsym):
            for name, gradient in gradients.items():
                own = sources[name]
                is_certain = always <= own or not any(isinstance(s, str) for s in own)
                if own != together and not is_certain and name not in direct:
                    symbols.append(operator(WhereUsed(own), gradient))
                    swap[variableify(gradient)] = symbols[-1].output
        symbols.append(bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym)
    joint.bound_symbols = symbols


def unreached_arguments(trace: Any, outputs: Sequence[Any]) -> set[str]:
    """The names of a trace's arguments that require grad and lead to none of its outputs; none if that is not known.

    Args:
        trace: the computation trace.
        outputs: the outputs that require grad; others do not count.
    """
    if any(map(changes_in_place, trace.bound_symbols)):
        return set()
    leads = {o.name for o in outputs}
    for bsym in reversed(trace.bound_symbols[:-1]):
        if any(o.name in leads and gradflow.requires_grad(trace, o) for o in bsym.flat_proxy_outs):
            leads.update(a.name for a in bsym.flat_proxy_args)
    return {a.name for a in trace.args if isinstance(a, TensorProxy) and a.requires_grad} - leads


class running:
    """The time in which the backward of a program runs, some of whose outputs have no gradient.

    Each step enters one, so that it is a class: a generator's context manager costs several times as much.

    Args:
        undefined: for each output whether it has none.
        node: the program's node in PyTorch's autograd graph.
    """

    __slots__ = ("_before", "_now")

    def __init__(self, undefined: Sequence[bool], node: Any) -> None:
        found: set[int | str] = {i for i, u in enumerate(undefined) if u}
        self._now = found, node

    def __enter__(self) -> None:
        self._before = _running.undefined, _running.node
        _running.undefined, _running.node = self._now

    def __exit__(self, *_: object) -> None:
        _running.undefined, _running.node = self._before


def running_node() -> Any:
    """The node of the program whose backward runs, or None."""
    return _running.node


def anything_undefined() -> bool:
    """Whether some source is known to be undefined in the backward that runs."""
    return bool(_running.undefined)


def note_undefined(name: str) -> None:
    """An opaque call returns None for the gradient that has this name."""
    _running.undefined.add(name)


def none_defined(sources: Reach | None) -> bool:
    """Whether none of the sources of a gradient is defined in the backward that runs."""
    return bool(sources) and sources <= _running.undefined  # type: ignore[operator]
