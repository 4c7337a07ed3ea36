"""An opaque call: one operator in the trace, run by PyTorch, with the backward that PyTorch recorded.

The operator returns the call's tensors and, where a gradient can be asked for, the state of its autograd graph, which
a second operator takes in the backward. What the operator does is in :mod:`.operator`, how its metadata is found in
:mod:`.metadata`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import tracectx
from thunder.extend import ImplInfo

from hookkit import operators
from hookkit.engine.interpreter.attempt import Raised
from hookkit.engine.interpreter.kept_closures import Kept, as_it_is
from hookkit.engine.interpreter.outside_tensors import OUTSIDE, gets_gradients, parameters_of
from hookkit.engine.interpreter.reasons import in_words
from hookkit.engine.opaque.fast_path import DirectCall
from hookkit.engine.opaque.held import HELD, Held, find_held
from hookkit.engine.opaque.metadata import find_metadata
from hookkit.engine.opaque.operator import Expected, OpaqueCall
from hookkit.engine.pytorch.graph_run import Autocast
from hookkit.engine.pytorch.node_run import set_materialize_grads
from hookkit.engine.pytorch.provider_function import provider_callee
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.composite import called, feed_undefined, make_symbol, symbol_name
from hookkit.engine.trace.recomputation import is_recomputing, record_draws
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.values.captured import Captured, Path, fill, held, paths, wrapped_at
from hookkit.engine.values.python_code import contents
from hookkit.engine.values.wrapping import (
    PLAIN,
    Slot,
    TensorMetadata,
    as_torch_names,
    is_container,
    leaves,
    map_leaves,
    unwrap_arguments,
    wrap_result,
)
from hookkit.errors import (
    HookError,
    MetaError,
    MetaWarning,
    OpaqueFallbackWarning,
    RegistrationError,
    UntraceableError,
    warn_at,
)
from hookkit.logs import FALLBACKS
from hookkit.patch import Patch
from hookkit.targets import signature_of

__all__ = ["PATCHES", "fall_back", "opaque_call", "operator_symbol"]


def opaque_call(invocation: Invocation, pending: BaseException | None) -> Any:
    """Record a call as one operator.

    Args:
        invocation: the call.
        pending: why it could not be traced, if that was tried.

    Returns:
        The wrapped result of the call.

    Raises:
        Raised: with the user's own exception, if the call raises it in eager PyTorch too.
        MetaError: if its metadata cannot be found.
    """
    jit = get_jit_ctx()
    trace = jit.computation_trace
    operator, slots = _operator(invocation)
    operator.expected = expected = find_metadata(invocation, operator, slots, pending)
    if expected.without_data is not None:
        if not _looks_at_values(invocation.call.callable):
            _warn_of_examples(invocation, expected.without_data)
        expected.without_data = None  # its traceback holds what the run made
    if not expected.direct:
        operator.direct = None
    if invocation.rule.writes is not None:
        expected.overwritten = _declared(invocation, invocation.rule.writes, slots) - set(expected.changed)
    # What it changes in place is not as it was when it would run again.
    again = is_recomputing() and not expected.changed
    draws = [record_draws()] if again else []
    symbol = operator_symbol(jit.ad_hoc_executor, symbol_name(trace, invocation.name), operator, slots, again)
    with tracectx(trace):
        results = symbol(*slots, *draws)
    symbol.meta.views = frozenset(results[i].name for i in expected.views)  # in_place_check.check asks
    returned = fill(expected.structure, _write_back(invocation, slots, expected, list(results)))
    return wrap_result(map_leaves(operator.kept.original, returned), invocation.owner, *invocation.args)


def _looks_at_values(callee: Any) -> bool:
    """Whether a callee need not run without data: hookkit.opaque is for such functions, and TorchScript never does."""
    return isinstance(callee, torch.jit.ScriptFunction) or getattr(callee, "calls_its_argument", False)


def _warn_of_examples(invocation: Invocation, without_data: BaseException) -> None:
    warn_at(
        invocation.call.source or invocation.rule.declared_at,
        f"the metadata of {invocation.call} was found by running it on example values, because without data it "
        f"raised {type(without_data).__name__}; declare a meta function to avoid that: rule = "
        "hookkit.rule(target, mode='opaque'), then @rule.meta",
        MetaWarning,
    )


def _declared(invocation: Invocation, writes: Sequence[str], slots: list[Proxy]) -> frozenset[int]:
    """The indices of the arguments that the rule says are overwritten.

    Raises:
        RegistrationError: if it names a parameter that there is not.
    """
    known = _arguments_by_name(invocation)
    unknown = [name for name in writes if name not in known]
    if unknown:
        raise RegistrationError(
            f"the rule {invocation.rule.name}, declared at {invocation.rule.declared_at}, says writes={list(writes)}; "
            f"{invocation.call} has no parameter {unknown[0]!r}, but {', '.join(known)}"
        )
    names = {p.name for name in writes for p in leaves(known[name]) if isinstance(p, TensorProxy)}
    return frozenset(i for i, slot in enumerate(slots) if slot.name in names)


def _arguments_by_name(invocation: Invocation) -> dict[str, Any]:
    """The arguments of a call by the names of its parameters; of a Function's ``apply`` those of its forward."""
    function = invocation.call.function
    signature = signature_of(function.forward) if function is not None else None
    if function is None or signature is None:
        return {**dict.fromkeys(invocation.bound.omitted), **invocation.bound.by_name}
    names = list(signature.parameters)[int(function.setup_context is torch.autograd.Function.setup_context) :]
    return {**dict.fromkeys(names), **dict(zip(names, invocation.call.args, strict=False))}


def operator_symbol(
    executor: Any, name: str, operator: OpaqueCall, slots: list[Any], with_draws: bool = False
) -> Symbol:
    """The symbol of an operator whose metadata is known.

    Args:
        executor: the executor of the program.
        name: its name.
        operator: the operator.
        slots: its arguments.
        with_draws: whether a last argument says which random numbers are to be drawn.
    """
    expected = operator.expected
    assert expected is not None

    def meta(*_: Any) -> tuple[Any, ...]:
        tensors = [*expected.tensors, *(TensorMetadata.of_proxy(slots[i]) for i in expected.changed)]
        outputs: list[Any] = [t.proxy(d) for t, d in zip(tensors, expected.differentiable, strict=True)]
        if operator.returns_state:
            outputs.append(AnyProxy(None, prefix="state"))
        if not operator.has_backward:
            for output in outputs:
                output.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return tuple(outputs)

    meta.operator = operator  # type: ignore[attr-defined]
    run = partial(_with_same_draws, operator.operator()) if with_draws else operator.operator()
    symbol = make_symbol(executor, name, meta, run, kind=gradflow.CALL, is_prim=True, keep=True)
    transform = symbol
    if operator.has_backward:
        transform = _gradient_transform(executor, symbol, name, operator, slots)
    executor._implmap[symbol.id] = ImplInfo(symbol=symbol, grad_transform=transform)
    return symbol


def _with_same_draws(run: Callable[..., Any], *arguments: Any) -> Any:
    *values, draws = arguments
    with draws.same(values):
        return run(*values)


def fall_back(invocation: Invocation, error: BaseException) -> tuple[Any, str]:
    """Make a call opaque that could not be traced, or raise what it raises in eager PyTorch too.

    Args:
        invocation: the call.
        error: why it could not be traced.

    Returns:
        The wrapped result of the call, and the reason in words.

    Raises:
        Raised: with the user's own exception.
        UntraceableError: if the mode does not allow the call to be opaque.
    """
    call = invocation.call
    reason = in_words(error)
    if invocation.mode.mode == "trace":
        operator, slots = _operator(invocation)
        raised = find_metadata(invocation, operator, slots, error).backward_raised
        if type(raised) is type(error) and not isinstance(raised, HookError):
            raise Raised(raised)  # by the backward, in eager PyTorch too
        raise UntraceableError(
            f"{call} cannot be traced: {reason}\n"
            f'Its mode is "trace" by {invocation.mode.said_by}; "auto" lets it run as one opaque operator.'
        ) from error
    result = opaque_call(invocation, error)
    FALLBACKS.info(
        "%s (rule %s) cannot be traced and runs as one opaque operator: %s", call, invocation.rule.name, reason
    )
    warned_of = _warned_of.setdefault(invocation.subject, set())
    if reason not in warned_of:
        warned_of.add(reason)
        place = call.source or invocation.rule.declared_at
        warn_at(place, f"{call} cannot be traced and runs as one opaque operator: {reason}", OpaqueFallbackWarning)
    return result, reason


_warned_of: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _operator(invocation: Invocation) -> tuple[OpaqueCall, list[Proxy]]:
    """The operator of a call, its metadata still to be found, and the proxies that are its arguments."""
    rule, call = invocation.rule, invocation.call
    slots: list[Proxy] = []
    places: dict[str, Slot] = {}
    copies = Kept()

    def lifted(value: Any) -> Any:
        """A value with the tensors that it leads to given to the operator, too."""
        if isinstance(value, PLAIN):
            return value
        kept = as_it_is(value, lambda: _wrapped_leaf(invocation, value), copies)
        if not _lifts(invocation, value):
            _refuse_hidden_proxies(invocation, value)
            return kept
        found = {path: place(proxy) for path, proxy in _captured(invocation, value).items()}
        return Captured(kept, found) if found else kept

    def place(value: Any) -> Any:
        if not isinstance(value, Proxy):
            value = as_torch_names(value)
            return value if rule.captures else lifted(value)
        if value.name not in places:
            places[value.name] = Slot(len(slots))
            slots.append(value)
        return places[value.name]

    arguments = map_leaves(place, (call.args, call.kwargs))
    if invocation.grad_mode and gets_gradients(rule, call) and (besides := parameters_of(invocation)):
        arguments = arguments[0], {**arguments[1], OUTSIDE: {name: place(proxy) for name, proxy in besides.items()}}
    trace = get_jit_ctx().computation_trace
    callee = call.callable if rule.opaque_callee or invocation.itself else provider_callee(rule, call)
    written = operators.written(callee, *arguments)
    if rule.captures:
        callee, arguments = _with_captured(invocation, callee, arguments, place)
    autocasts = tuple(
        Autocast(device, dtypes.to_torch_dtype(dtype), bool(enabled))
        for device, dtype, enabled in get_compile_data().autocast_stack.stack
    )
    needs = tuple(gradflow.requires_grad(trace, p) for p in slots)
    function = call.function if rule.opaque_callee else None
    operator = OpaqueCall(
        description=str(call),
        note=invocation.note,
        callee=callee,
        arguments=arguments,
        needs=needs,
        grad_mode=invocation.grad_mode,
        autocasts=autocasts,
        written=frozenset(s.index for s in leaves(written) if isinstance(s, Slot)),
        direct=None if copies.copies else DirectCall.of(function, arguments, needs),
        kept=copies,
        is_function=function is not None,
    )
    return operator, slots


def _lifts(invocation: Invocation, value: Any) -> bool:
    """Whether the tensors that an argument leads to are given to the operator.

    In eager PyTorch a Function gives no gradient to them, and one that asks for the gradients of what it calls gives
    them by itself; a rule's backward provider is asked by name for those of a module's parameters.
    """
    if invocation.call.function is not None:
        return False
    return not (isinstance(value, torch.nn.Module) and gets_gradients(invocation.rule, invocation.call))


def _captured(invocation: Invocation, value: Any) -> dict[Path, Proxy]:
    """The tensors that an argument of a call leads to, by the way that leads there."""
    found = paths(value)
    if not found:
        return {}
    wrapped = _wrapped_leaf(invocation, value)
    proxies, _ = unwrap_arguments(tuple(wrapped_at(path, wrapped) for path in found), {})
    return dict(zip(found, proxies, strict=True))


def _wrapped_leaf(invocation: Invocation, value: Any) -> Any:
    """An argument of a call, or what a container among them holds, as an interpreter value."""
    pending = [*invocation.args, *invocation.kwargs.values()]
    while pending:
        wrapped = pending.pop()
        if wrapped.value is value:
            return wrapped
        if is_container(wrapped.value):
            pending += [step.of_wrapped(wrapped) for step, _ in held(wrapped.value)]
    raise LookupError(f"{value!r} is no argument of {invocation.call}")


def _with_captured(
    invocation: Invocation, callee: Callable[..., Any], arguments: Any, place: Callable[[Any], Slot]
) -> tuple[Callable[..., Any], Any]:
    """A callee, and its arguments, with what the functions among those capture."""
    captured: dict[str, Any] = {}

    def slot(proxy: Proxy) -> Slot:
        captured.setdefault(proxy.name, place(proxy))
        return Slot(list(captured).index(proxy.name))

    places = find_held((*invocation.args, *invocation.kwargs.values()), slot)
    if not places:
        return callee, arguments
    return Held(callee, places, str(invocation.call)), (
        arguments[0],
        {**arguments[1], HELD: list(captured.values())},
    )


def _refuse_hidden_proxies(invocation: Invocation, value: Any) -> None:
    """An operator gets real tensors for the proxies that it is given; it cannot for those that an object hides."""
    for part in (getattr(value, "__dict__", None), getattr(value, "__self__", None)):
        held = part if isinstance(part, dict) else {"__self__": part}
        for name, item in held.items():
            if isinstance(item, Proxy):
                raise MetaError(
                    f"{invocation.call} cannot run as one opaque operator: its argument {type(value).__name__} holds a "
                    f"tensor in the attribute {name!r}; pass the tensor as an argument of its own"
                )
    for cell in getattr(value, "__closure__", None) or ():
        if any(isinstance(leaf, Proxy) for leaf in leaves(contents(cell))):
            raise MetaError(
                f"{invocation.call} cannot run as one opaque operator: {getattr(value, '__qualname__', value)} closes "
                "over a tensor of the program; pass the tensor as an argument"
            )


def _gradient_transform(
    executor: Any, symbol: Any, name: str, operator: OpaqueCall, slots: list[Any]
) -> Callable[..., Any]:
    expected = operator.expected
    assert expected is not None
    operator.inputs = {i: TensorMetadata.of_proxy(slots[i]) for i in expected.gradients}

    run_backward = operator.backward_operator()

    def transform(*args: Any) -> Any:
        results = symbol(*args)
        *outputs, state = results
        gradients = [prims.get_grad(o) for o, d in zip(outputs, expected.differentiable, strict=True) if d]

        def meta(*_: Any) -> tuple[TensorProxy, ...]:
            return tuple(TensorProxy(like=args[i], requires_grad=False) for i in expected.gradients)

        meta.operator = operator  # type: ignore[attr-defined]
        backward = make_symbol(
            executor, f"{name}_backward", meta, run_backward, kind=gradflow.OPAQUE_BACKWARD, is_prim=True
        )
        backward_results = backward(state, *gradients)
        for index, gradient in zip(expected.gradients, backward_results, strict=True):
            prims.put_grad(args[index], gradient)
        feed_undefined(operator.undefined)
        return results

    return transform


def _write_back(invocation: Invocation, slots: list[Proxy], expected: Expected, results: list[Any]) -> list[Any]:
    """Write what the call changed in place into its arguments, as an operation that thunder knows."""
    count = len(expected.tensors)
    returned = results[:count]
    for place, index in expected.dirty_outputs.items():
        if tuple(returned[place].shape) != tuple(slots[index].shape):
            raise MetaError(
                f"{invocation.call} changes the shape of its argument in place, which a compiled program cannot; use "
                "the operation that returns a new tensor"
            )
    _refuse_new_history(invocation, slots, expected)
    with tracectx(get_jit_ctx().computation_trace):
        for index, new in zip(expected.changed, results[count : count + len(expected.changed)], strict=True):
            same = [i for i in range(count) if expected.dirty_outputs.get(i) == index]
            source = returned[same[0]] if same else new
            written = ltorch.copy_(slots[index], source)
            for i in same:
                returned[i] = written
    return returned


def _refuse_new_history(invocation: Invocation, slots: list[Proxy], expected: Expected) -> None:
    """Refuse to change a tensor from outside that does not require grad to one that does, which stays so outside.

    Raises:
        HookError: if the call does that.
    """
    given = (*invocation.args, *invocation.kwargs.values())
    outside = {getattr(w.value, "name", None) for w in given if not invocation.is_made_by_program(w)}
    trace = get_jit_ctx().computation_trace
    # the same for each argument that is changed; what is returned as dirty is among the outputs
    flags = dict(zip(expected.changed, expected.differentiable[len(expected.tensors) :], strict=False))
    for place, index in expected.dirty_outputs.items():
        flags[index] = flags.get(index, False) or expected.differentiable[place]
    for index, differentiable in flags.items():
        slot: Any = slots[index]
        if differentiable and slot.name in outside and not gradflow.requires_grad(trace, slot):
            raise HookError(
                f"{invocation.call} changes in place a tensor from outside of the program that does not require grad "
                "(a buffer, say) to one that does: in eager PyTorch it requires grad from then on, which a compiled "
                "program cannot do. Call ctx.mark_non_differentiable with it, too, or change it under torch.no_grad(), "
                "or return the new value"
            )


def _runs_functions(trace: Any) -> bool:
    return any(getattr(called(b), "is_function", False) for b in trace.bound_symbols)


PATCHES = [
    Patch(
        "torch.autograd.function:FunctionCtx.set_materialize_grads",
        lambda _: set_materialize_grads,
        "a Function that runs opaque may get zeros for a gradient that is undefined",
        takes=("self, value",),
        concerns=_runs_functions,
    )
]
