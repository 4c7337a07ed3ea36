"""Interpret once, replay: a call like an earlier one of the same program gets that one's operations, with new names.

A call is like another if it has the same rule and Function, arguments with the same metadata, and the same constants,
under the same modes. It may be replayed if interpreting the earlier one changed nothing in Python, and what that one's
code can reach is as it was. In doubt it is interpreted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import unwrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.trace import TraceCtx, tracectx

from hookkit.engine.interpreter.side_effects import State
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.composite import Composite, fresh
from hookkit.engine.trace.recomputation import is_recomputing
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.values.wrapping import PLAIN, is_container, leaves, map_leaves

__all__ = ["constants_of", "find", "instantiate", "is_same", "key_of", "remember", "written"]


@attrs.define(eq=False)
class Specialisation:
    """A call that was interpreted, for others like it.

    Attributes:
        arguments: the proxies among its arguments, in order.
        composite: its operations.
        returned: what it returned.
        state: the Python state that its code can reach.
        constants: what the key names by identity, kept alive.
        written: the attributes of objects that the program had set by then, which thunder sets when it has run.
    """

    arguments: list[Proxy]
    composite: Composite
    returned: Any
    state: State
    constants: list[Any]
    written: list[dict[str, Any]]


_known: weakref.WeakKeyDictionary[TraceCtx, dict[Any, Specialisation]] = weakref.WeakKeyDictionary()


def key_of(invocation: Invocation) -> tuple[Any, ...]:
    """What a call has in common with those that it can be replayed for."""
    trace = get_jit_ctx().computation_trace
    places: dict[str, int] = {}

    def key(value: Any, made: bool) -> Any:
        if isinstance(value, TensorProxy):
            place = places.setdefault(value.name, len(places))
            needs = gradflow.requires_grad(trace, value)
            return ("tensor", place, tuple(value.shape), value.dtype, str(value.device), needs)
        if isinstance(value, NumberProxy) or not isinstance(value, Proxy | list | tuple | dict):
            if isinstance(value, Proxy):
                return ("number", value.name)
            if isinstance(value, PLAIN):
                return (type(value), value, str(value))  # str: -0.0 and 0.0, True and 1 differ
            return ("object", id(value))
        if isinstance(value, Proxy):
            return ("proxy", value.name)
        if not made and is_container(value):
            return ("container", id(value))
        if isinstance(value, dict):
            return (type(value), tuple((repr(k), key(v, made)) for k, v in value.items()))
        return (type(value), tuple(key(v, made) for v in value))

    data = get_compile_data()
    arguments = tuple(
        (w.python_typ is torch.nn.Parameter, key(w.value, invocation.is_made_by_program(w)))
        for w in (*invocation.args, *invocation.kwargs.values())
    )
    return (
        invocation.rule.serial,
        id(invocation.call.function),
        id(invocation.call.callable) if invocation.call.function is None else None,
        tuple(invocation.kwargs),
        arguments,
        invocation.call.needs,
        invocation.grad_mode,
        tuple(map(str, data.autocast_stack.stack)),
        is_recomputing(),
    )


def remember(
    trace: TraceCtx, key: tuple[Any, ...], invocation: Invocation, composite: Composite, returned: Any, state: State
) -> None:
    """Keep an interpreted call, if another like it may be replayed."""
    if not composite.explicit or not all(isinstance(v, (Proxy, *PLAIN)) for v in leaves(returned)):
        return
    if any(isinstance(v, Proxy) and v.name not in {o.name for o in composite.outputs} for v in leaves(returned)):
        return
    arguments = _argument_proxies(invocation)
    if not all(isinstance(a, TensorProxy) for a in arguments):
        return
    # The pattern has names of its own: those of the trace come back as arguments of later calls.
    env: dict[Any, Proxy] = {}
    with tracectx(trace):
        placeholders: list[Proxy] = [fresh(a) for a in arguments]
        env.update({variableify(a): p for a, p in zip(arguments, placeholders, strict=True)})
        pattern, returned = _copy(composite, returned, env)
    _known.setdefault(trace, {})[key] = Specialisation(
        placeholders, pattern, returned, state, constants_of(invocation), written()
    )


def written() -> list[dict[str, Any]]:
    """The attributes, as the program sees them, of the objects of which it has set some."""
    return [dict(unwrap(attributes)) for attributes in get_jit_ctx()._additional_outputs]


def is_same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether the program has set no attributes meanwhile."""
    return len(before) == len(now) and all(
        b.keys() == n.keys() and all(b[k] is n[k] for k in b) for b, n in zip(before, now, strict=True)
    )


def constants_of(invocation: Invocation) -> list[Any]:
    """What the key of a call names by identity."""
    call = invocation.call
    held = [*call.args, *call.kwargs.values(), *leaves((call.args, call.kwargs))]
    return [call.function, call.callable, *(v for v in held if not isinstance(v, Proxy) and not isinstance(v, PLAIN))]


def find(trace: TraceCtx, key: tuple[Any, ...]) -> Specialisation | None:
    """An earlier call that may be replayed, or None."""
    found = _known.get(trace, {}).get(key)
    if found is None or not is_same(found.written, written()) or found.state.changed():
        return None
    return found


def instantiate(specialisation: Specialisation, invocation: Invocation) -> tuple[Composite, Any]:
    """The operations of an earlier call, with this call's arguments and new names, and what the call returns."""
    arguments = _argument_proxies(invocation)
    env: dict[Any, Proxy] = {
        variableify(old): new for old, new in zip(specialisation.arguments, arguments, strict=True)
    }
    with tracectx(get_jit_ctx().computation_trace):
        return _copy(specialisation.composite, specialisation.returned, env)


def _copy(composite: Composite, returned: Any, env: dict[Any, Proxy]) -> tuple[Composite, Any]:
    """A composite with other inputs and new names, and what its call returns."""
    copied = composite.copied(env)
    return copied, map_leaves(lambda p: env.get(variableify(p), p) if isinstance(p, Proxy) else p, returned)


def _argument_proxies(invocation: Invocation) -> list[Proxy]:
    return list({p.name: p for p in _proxies(invocation)}.values())


def _proxies(invocation: Invocation) -> Sequence[Proxy]:
    return [p for p in leaves((invocation.call.args, invocation.call.kwargs)) if isinstance(p, Proxy)]
