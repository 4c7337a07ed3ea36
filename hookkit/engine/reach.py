"""Which of a program's outputs a call leads to.

A program is one node of PyTorch's autograd. Where only some of its outputs are used, thunder runs the whole backward,
with zeros for the others; eager PyTorch would not call the backward of a Function that leads to those others alone,
and what such a backward makes of zeros need not be zeros. What it returns is therefore dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from thunder.core.proxies import Proxy, TensorProxy

from hookkit.engine.gradflow import requires_grad
from hookkit.engine.sharing import changes_in_place

__all__ = [
    "metadata_of",
    "none_used",
    "reach_of_calls",
    "running",
    "undefined_outputs",
    "unreached_arguments",
    "used_or_zeros",
]

Reach = frozenset[int]


class _Running(threading.local):
    undefined: Sequence[bool] = ()


_running = _Running()


def reach_of_calls(
    trace: Any, outputs: Sequence[Any], edges: Callable[[Any], tuple[Sequence[Any], Sequence[Any] | None]]
) -> tuple[dict[int, Reach], dict[int, list[Reach]], list[Reach]]:
    """To which outputs of a trace its bound symbols, their results, and its arguments lead.

    Args:
        trace: the computation trace.
        outputs: the outputs that require grad; others do not count.
        edges: gives those of a bound symbol's arguments that lead to its results, and, for a call that has a backward
            of its own, those of them to which that gives a gradient; else None.

    Returns:
        By index of the bound symbol from which outputs its backward is reached; by index for each of its results, and
        for each argument, from which it gets a gradient. Empty where nothing needs to be told apart, or cannot be.
    """
    if len(outputs) < 2 or any(map(changes_in_place, trace.bound_symbols)):
        return {}, {}, []
    leads: dict[str, set[int]] = {}
    gives: dict[str, set[int]] = {}
    for index, output in enumerate(outputs):
        leads.setdefault(output.name, set()).add(index)
        gives.setdefault(output.name, set()).add(index)
    calls: dict[int, Reach] = {}
    results: dict[int, list[Reach]] = {}
    for place in reversed(range(len(trace.bound_symbols) - 1)):
        bsym = trace.bound_symbols[place]
        reached = frozenset[int]().union(*(leads.get(o.name, ()) for o in bsym.flat_proxy_outs))
        if not reached:
            continue
        calls[place], results[place] = reached, [frozenset(gives.get(o.name, ())) for o in bsym.flat_proxy_outs]
        tracked, given = edges(bsym)
        for argument in tracked:
            leads.setdefault(argument.name, set()).update(reached)
        for argument in tracked if given is None else given:
            gives.setdefault(argument.name, set()).update(*results[place] if given is None else (reached,))
    arguments = [frozenset(gives.get(a.name, ())) if isinstance(a, Proxy) else frozenset() for a in trace.args]
    return calls, results, arguments


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
        if any(o.name in leads and requires_grad(trace, o) for o in bsym.flat_proxy_outs):
            leads.update(a.name for a in bsym.flat_proxy_args)
    return {a.name for a in trace.args if isinstance(a, TensorProxy) and a.requires_grad} - leads


@contextmanager
def running(undefined: Sequence[bool]) -> Iterator[None]:
    """The time in which the backward of a program runs, some of whose outputs have no gradient."""
    before, _running.undefined = _running.undefined, undefined if any(undefined) else ()
    try:
        yield
    finally:
        _running.undefined = before


def undefined_outputs() -> Sequence[bool]:
    """For each of the program's outputs whether it has no gradient in the backward that runs; empty if all have one."""
    return _running.undefined


def none_used(reach: Reach | None) -> bool:
    """Whether none of the outputs has a gradient in the backward that runs."""
    undefined = _running.undefined
    return bool(undefined) and reach is not None and all(undefined[i] for i in reach)


def used_or_zeros(reach: Reach, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, or zeros if the call from which it comes leads only to outputs that have none."""
    return torch.zeros_like(gradient) if none_used(reach) else gradient


def metadata_of(gradient: TensorProxy) -> TensorProxy:
    """The metadata of :func:`used_or_zeros`."""
    return TensorProxy(like=gradient, requires_grad=False)
