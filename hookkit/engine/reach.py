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

from hookkit.engine.gradflow import changes_in_place

__all__ = ["metadata_of", "none_used", "reach_of_calls", "running", "undefined_outputs", "used_or_zeros"]

Reach = frozenset[int]


class _Running(threading.local):
    undefined: Sequence[bool] = ()


_running = _Running()


def reach_of_calls(
    trace: Any, outputs: Sequence[Any], tracked: Callable[[Any], Sequence[Any]]
) -> tuple[dict[int, list[Reach]], list[Reach]]:
    """For each bound symbol of a trace, and for each argument of the trace, to which outputs it leads.

    Args:
        trace: the computation trace.
        outputs: the outputs that require grad; others do not count.
        tracked: gives those of a bound symbol's arguments that lead to its results.

    Returns:
        By index of the bound symbol for each of its results, and by argument; empty where nothing needs to be told
        apart, or cannot be.
    """
    if len(outputs) < 2 or any(map(changes_in_place, trace.bound_symbols)):
        return {}, []
    leads: dict[str, set[int]] = {}
    for index, output in enumerate(outputs):
        leads.setdefault(output.name, set()).add(index)
    calls: dict[int, list[Reach]] = {}
    for place in reversed(range(len(trace.bound_symbols) - 1)):
        bsym = trace.bound_symbols[place]
        calls[place] = [frozenset(leads.get(o.name, ())) for o in bsym.flat_proxy_outs]
        reached = frozenset().union(*calls[place])
        if not reached:
            continue
        for argument in tracked(bsym):
            leads.setdefault(argument.name, set()).update(reached)
    arguments = [frozenset(leads.get(a.name, ())) if isinstance(a, Proxy) else frozenset() for a in trace.args]
    return calls, arguments


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
