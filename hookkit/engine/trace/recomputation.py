"""Recomputing: what a part of a program computes is not kept for the backward, which computes it again.

thunder does that for bound symbols that are marked (``grad_transform_on_trace`` in thunder/transforms/autodiff.py), and
draws other random numbers then. Here a part is marked, all but what must not be done twice: random operations that
thunder knows, and changes in place, are done once, and their results kept. An operator that PyTorch runs is done
twice, as under ``torch.utils.checkpoint``, with torch's generators as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import tracectx
from thunder.extend import ImplInfo
from torch.utils.checkpoint import get_device_states, set_device_states

from hookkit.engine.trace import gradflow
from hookkit.engine.trace.aliasing import changes_in_place
from hookkit.engine.trace.composite import make_symbol, symbol_name
from hookkit.engine.values.wrapping import Tag, proxies_in
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "Draws", "is_recomputed", "is_recomputing", "recompute", "record_draws"]

KEPT = Tag("hookkit.KEPT")
DRAWS = Tag("hookkit.DRAWS")

_recomputing: ContextVar[bool] = ContextVar("hookkit_recomputing", default=False)


def recompute(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret a call of wrapped values, and mark what it records; see :func:`hookkit.recompute`."""
    if is_recomputing() or not get_compile_data().is_grad_enabled:
        return _interpret_call(function, *args, **kwargs)
    scope = get_jit_ctx().computation_trace.peek_scope()
    assert scope is not None
    start = len(scope)
    token = _recomputing.set(True)
    try:
        result = _interpret_call(function, *args, **kwargs)
    finally:
        _recomputing.reset(token)
    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        for proxy in proxies_in(unwrap(result)):
            proxy.tags.add(KEPT)
    for bsym in scope[start:]:
        bsym.tags.add(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
    return result


def is_recomputing() -> bool:
    """Whether what is interpreted is to be recomputed."""
    return _recomputing.get()


def is_recomputed(stock: Callable[..., bool], bsym: Any) -> bool:
    """Whether the backward does an operation again.

    Args:
        stock: ``thunder.transforms.autodiff._should_recompute_bsym_in_backward``.
        bsym: the operation, before or after it was differentiated.
    """
    if any(KEPT in o.tags or DRAWS in o.tags for o in bsym.flat_proxy_outs) or changes_in_place(bsym) or draws(bsym):
        return False
    if gradflow.is_explicit(bsym) and bsym.sym.is_prim and not any(DRAWS in a.tags for a in bsym.flat_proxy_args):
        return False
    return stock(bsym)


def draws(bsym: Any) -> bool:
    """Whether an operation, or one beneath it, draws random numbers."""
    tagged = bsym.sym.tags and prims.OpTags.RANDOM_OP in bsym.sym.tags
    # thunder 0.2.6 has forgotten the tag of this one; delete the comparison when it has it.
    return bool(tagged) or bsym.sym.id == prims.PrimIDs.RANDN or any(map(draws, bsym.subsymbols))


class Draws:
    """The state of torch's generators before an operator drew from them; when it runs again it gets the same numbers.

    One is made for each run of a compiled program's forward, before the operator runs first.
    """

    def __init__(self) -> None:
        self._has_run = False
        self._states: tuple[torch.Tensor, Any] | None = None  # None: it draws nothing

    @contextlib.contextmanager
    def same(self, values: Sequence[Any]) -> Iterator[None]:
        """The time in which the operator runs; ``values`` say which devices it may draw on."""
        if not self._has_run:
            before = torch.get_rng_state(), get_device_states(*values)
            yield
            self._has_run = True
            after = torch.get_rng_state(), get_device_states(*values)
            if any(not torch.equal(b, a) for b, a in zip(_flat(before), _flat(after), strict=True)):
                self._states = before
        elif self._states is None:
            yield
        else:
            cpu, (devices, states) = self._states
            with torch.random.fork_rng(devices):
                torch.set_rng_state(cpu)
                set_device_states(devices, states)
                yield


def _flat(states: Any) -> list[torch.Tensor]:
    return [states[0], *states[1][1]]


def record_draws() -> AnyProxy:
    """Record, before an operator that is recomputed, what makes its :class:`Draws`."""
    jit = get_jit_ctx()
    trace = jit.computation_trace

    def meta() -> AnyProxy:
        made = AnyProxy(None, prefix="draws")
        made.tags.add(DRAWS)
        return made

    name = symbol_name(trace, "draws")
    symbol = make_symbol(jit.ad_hoc_executor, name, meta, Draws, kind=gradflow.DRAWS, is_prim=True)
    jit.ad_hoc_executor._implmap[symbol.id] = ImplInfo(symbol=symbol, grad_transform=symbol)
    with tracectx(trace):
        return symbol()


PATCHES = [
    Patch(
        "thunder.transforms.autodiff:_should_recompute_bsym_in_backward",
        around(is_recomputed),
        "what a checkpoint computes may be kept for the backward, instead of being computed again",
        takes=("bsym",),
    )
]
