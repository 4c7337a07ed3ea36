"""The life of a call: whether a rule takes it, and how: traced, or opaque where it cannot be traced."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import attrs
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, InterpreterError, _interpret_call, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx

from hookkit.call import Call
from hookkit.engine.dispatch import extensions
from hookkit.engine.interpreter import cache_guards, call_log, progress, prologue_guards, recompilations
from hookkit.engine.interpreter.attempt import Aside, Raised, add_note, raise_in_program
from hookkit.engine.interpreter.call_view import shows
from hookkit.engine.interpreter.reasons import is_called_by_user, of_silent_failure, user_source
from hookkit.engine.interpreter.side_effects import Generators, State, following
from hookkit.engine.opaque import opaque_calls
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.composite import Composite
from hookkit.engine.trace.in_place_check import OVERWRITTEN, NoRegion, Retrace
from hookkit.engine.traced import regions, replay
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.traced.traced_call import bind_call, record_call, trace_call
from hookkit.engine.values.binding import Bound
from hookkit.engine.values.wrapping import unwrap_arguments
from hookkit.errors import DataDependencyError, HookError, UntraceableError
from hookkit.logs import RECOMPILES, RULES
from hookkit.modes import ModeInForce, mode_in_force
from hookkit.patch import Patch, around
from hookkit.registry import registry
from hookkit.rule import Rule
from hookkit.standard import is_pythons_own
from hookkit.targets import signature_of

__all__ = ["PATCHES", "lookaside_for", "trace_program"]

# What cannot be traced in the program that is being traced, and why: callables (a Function, say) and single calls, by
# their keys in ``hookkit.engine.traced.replay``.
_untraceable: ContextVar[dict[Any, str]] = ContextVar("hookkit_untraceable")
# The same of what is traced and cannot be a region.
_no_regions: ContextVar[dict[Any, str]] = ContextVar("hookkit_no_regions")
# What the backwards of traced calls close over, as it was when they were interpreted, with the calls.
_closed_over: ContextVar[list[tuple[State, Call]]] = ContextVar("hookkit_closed_over")
_running: ContextVar[tuple[tuple[Rule[..., Any], Any], ...]] = ContextVar("hookkit_running_rules", default=())


def lookaside_for(
    callee: Callable[..., Any],
    owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    unsupported: str | None = None,
) -> Callable[..., Any] | None:
    """What the interpreter calls instead of a callable, or None if no rule takes the call.

    Args:
        callee: what the program calls.
        owner: the wrapped Function class, if ``callee`` is its ``apply``.
        args: wrapped positional arguments (without the owner).
        kwargs: wrapped keyword arguments.
        unsupported: why thunder cannot do the call itself, if that is known.
    """
    function = unwrap(owner) if owner is not None else None
    if call_log.all_candidates_wanted():
        call_log.note_form(callee, user_source)
    if not registry.matching(callee, function) or (is_pythons_own(callee) and not is_called_by_user()):
        return None
    trace = get_jit_ctx().computation_trace

    def details(call: Call) -> Any:  # an argument: a closure would hold, in a cycle, what the program was given
        nonlocal args, kwargs
        if function is not None:
            args, kwargs = _positional(owner, args, kwargs)
        elif call.operator is not None and call.operator.is_python:
            args, kwargs = call.operator.arrange(args, kwargs, wrap_const)
        uargs, ukwargs = unwrap_arguments(args, kwargs)
        return uargs, ukwargs, tuple(gradflow.requires_grad(trace, a) for a in uargs), user_source()

    call = Call.pending(callee, function, details, unsupported, shows(trace))
    candidates = []
    try:
        for candidate in registry.candidates(call):
            if (candidate.rule, callee) not in _running.get():
                candidates.append(candidate)
                if candidate.declined is None and not call_log.all_candidates_wanted():
                    break
    except HookError as error:
        return partial(lambda error, /, *_, **__: raise_in_program(error), error)
    if not any(c.declined is None for c in candidates):
        # that a correction does not concern a call says nothing
        if call_log.all_candidates_wanted() and any(not c.rule.is_conditional_correction for c in candidates):
            call_log.note(call, candidates, trace)
        if RULES.isEnabledFor(logging.DEBUG) and any(not c.rule.is_conditional_correction for c in candidates):
            call_log.note_outcome(call_log.CallRecord(call.name, call.source, None, candidates))
        return None
    record = call_log.note(call, candidates, trace)
    return partial(_take_over, record, call, owner, args, kwargs)


def trace_program(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace a program, again if a call that was traced turns out to have to be opaque.

    Args:
        stock: ``thunder.core.jit_ext.thunder_general_jit``.
        *args: its arguments.
        **kwargs: its options.
    """
    untraceable: dict[Any, str] = {}
    no_regions: dict[Any, str] = {}
    recompilations.note(*args[:3])
    progress.watch(call_log.counter())
    _forget_autocast(get_compile_data().autocast_stack)
    while True:
        token, other = _untraceable.set(untraceable), _no_regions.set(no_regions)
        closed_over = _closed_over.set([])
        try:
            with extensions.around_tracing(args[0]), cache_guards.tracing(*args[:3]):
                traced = stock(*args, **kwargs)
            _refuse_later_changes()
            return traced
        except InterpreterError as error:
            cause = error.__cause__
            if isinstance(cause, RecursionError):
                add_note(cause, _RECURSION)
            elif isinstance(cause, Exception) and not isinstance(cause, HookError):
                _say_where(error)
                raise
            # thunder makes an Exception of what ends a program: KeyboardInterrupt, SystemExit
            raise error.__cause__ or error  # noqa: B904
        except NoRegion as again:
            if again.subject in no_regions:
                raise HookError(f"{_in_words(again.subject)}: {again.reason}") from None
            no_regions[again.subject] = again.reason
        except Retrace as again:
            subject, reason = again.subject, again.reason
            mode = _mode(subject, None) if isinstance(subject, Rule) else mode_in_force(_function(subject))
            if mode.mode == "trace":
                raise UntraceableError(
                    f'{_in_words(subject)} cannot be traced: {reason}\nIts mode is "trace" by {mode.said_by}.'
                ) from None
            if subject in untraceable:
                raise HookError(f"{_in_words(subject)}: {reason}") from None
            untraceable[subject] = reason
            RECOMPILES.info("the program is traced again: %s has to be opaque: %s", _in_words(subject), reason)
        except Exception as error:
            _say_where(error)
            raise
        finally:
            _untraceable.reset(token)
            _no_regions.reset(other)
            _closed_over.reset(closed_over)


def _note_closed_over(invocation: Invocation, composite: Composite) -> None:
    """Note what the backward of a traced call closes over."""
    backward = getattr(invocation.call.function, "backward", None)
    if composite.backward is not None and getattr(backward, "__closure__", None):
        _closed_over.get().append((State.reachable_from([backward]), invocation.call))


def _refuse_later_changes() -> None:
    """Refuse a program that changes, after a call, what the backward of that closes over.

    Raises:
        HookError: if there is one: in eager PyTorch the backward runs later, and sees the change.
    """
    for state, call in _closed_over.get():
        if (changed := state.changed_here()) is not None:
            raise HookError(
                f"the program changes {changed} after {call}, and the backward of that, which was interpreted with "
                "what it was before, closes over it; in eager PyTorch the backward runs later, and sees the change. "
                "Hand the value to apply as an argument, and keep it on ctx"
            )


_RECURSION = (
    "thunder's interpreter makes several calls of Python's for one of the program's; where the program runs in eager "
    "PyTorch, sys.setrecursionlimit with ten times the number lets thunder trace it"
)


def _say_where(error: Exception) -> None:
    """Note what an exception without a text does not say."""
    if (note := of_silent_failure(error)) is not None:
        add_note(error, note)


def _forget_autocast(noted: Any) -> None:
    """Forget under which autocasts a program was called before.

    thunder notes one at each call, in ``populate_cache_info`` of thunder/__init__.py, and never takes it back.
    """
    is_on = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    noted.stack = deque(list(noted.stack)[-1:] if is_on else ())


def _mode(rule: Rule[..., Any], function: type[Any] | None) -> ModeInForce:
    """The mode of a call that a rule takes."""
    if rule.mode != "auto":
        return ModeInForce(rule.mode, f"the rule {rule.name} (declared at {rule.declared_at})")
    found = mode_in_force(function)
    # a correction of one operation is a part of what is around it
    is_operation = rule.ships and function is None and not rule.opaque_callee
    return attrs.evolve(found, mode="auto") if found.mode == "region" and is_operation else found


def _function(subject: Any) -> type[Any] | None:
    return subject if isinstance(subject, type) else None


def _in_words(subject: Any) -> str:
    if isinstance(subject, Rule):
        return f"the rule {subject.name}"
    return getattr(subject, "__qualname__", None) or getattr(subject, "co_qualname", None) or str(subject)


def _positional(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``Function.apply`` by position, as torch passes them on.

    With ``setup_context`` defaults are filled in (torch/autograd/function.py, ``Function.apply``); without it keywords
    are put in their places. What does not fit stays by keyword: torch refuses it, in its own words.
    """
    base = torch.autograd.Function
    function = unwrap(owner)
    signature = signature_of(function.forward)
    split = function.setup_context is not base.setup_context
    if signature is None or not (kwargs or split):
        return args, kwargs
    parameters = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][0 if split else 1 :]
    positional, rest = list(args), dict(kwargs)
    for parameter in parameters[len(args) :]:
        if parameter.name in rest:
            positional.append(rest.pop(parameter.name))
        elif split and parameter.default is not parameter.empty:
            names = [p.name for p in parameters if p.default is not p.empty]
            index = wrap_const(names.index(parameter.name))
            forward = _interpret_call(getattr, owner, wrap_const("forward"))
            positional.append(_interpret_call(lambda f, i: f.__defaults__[i], forward, index))
        else:
            break
    return (args, kwargs) if rest else (tuple(positional), {})


def _take_over(
    record: call_log.CallRecord,
    call: Call,
    owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    /,
    *_: Any,
    **__: Any,
) -> Any:
    rule = record.rule
    assert rule is not None
    try:
        call, args, kwargs = _as_the_rule_knows_it(rule, call, args, kwargs)
        mode = _mode(rule, call.function)
    except HookError as error:
        return raise_in_program(error)
    invocation = Invocation(
        rule=rule,
        call=call,
        bound=Bound.of(rule, call),
        owner=owner,
        args=args,
        kwargs=kwargs,
        grad_mode=bool(get_compile_data().is_grad_enabled),
        mode=mode,
    )
    misfit = _misfit(call)
    if misfit is not None:
        return raise_in_program(misfit)
    # A rule's own provider may call what it stands for; a Function may apply itself to something else, and what runs
    # inline is the program's own code.
    is_own = call.function is None and rule.mode != "inline"
    token = _running.set((*_running.get(), (rule, call.callable)) if is_own else _running.get())
    cache_guards.note_call(invocation.subject if call.function is not None else rule.forward)
    for part in invocation.operator_parts:
        cache_guards.note_call(part, guarded=False)
    try:
        with record.running(get_jit_ctx().computation_trace):
            return _run(invocation, record)
    except Raised as raised:
        add_note(raised.error, invocation.note)
        return raise_in_program(raised.error)
    except HookError as error:
        return raise_in_program(error)
    except Exception as error:
        add_note(error, f"a fault of hookkit's, not of the program's: {invocation.note}")
        raise
    finally:
        _running.reset(token)
        call_log.note_outcome(record)


def _as_the_rule_knows_it(
    rule: Rule[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """A call, and its wrapped arguments, without parameters that its target has only in newer versions."""
    known, options = rule.known_arguments(call, args, kwargs, unwrap)
    if known is args:
        return call, args, kwargs
    needs = {id(a): n for a, n in zip(call.args, call.needs, strict=True)}
    values = tuple(unwrap(a) for a in known)
    plain = {name: unwrap(value) for name, value in options.items()}
    needed = tuple(needs.get(id(v), False) for v in values)
    return attrs.evolve(call, args=values, kwargs=plain, needs=needed), known, options


def _misfit(call: Call) -> TypeError | None:
    """What Python raises for arguments that what is called cannot take, or None."""
    signature = signature_of(call.callable) if call.function is None and inspect.isfunction(call.callable) else None
    if signature is None:
        return None
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        return TypeError(f"{call.name}() {error}")
    return None


def _run(invocation: Invocation, record: call_log.CallRecord) -> Any:
    rule, call = invocation.rule, invocation.call
    if rule.mode == "inline":
        record.became("traced")
        return _interpret_call(rule.forward, *invocation.provider_arguments(), **invocation.kwargs)
    trace = get_jit_ctx().computation_trace
    key = replay.key_of(invocation)
    if rule.inlines:
        return _region_or_inline(invocation, record, key)
    reason = _why_opaque(invocation, key)
    if reason is not None:
        record.became("opaque", reason)
        itself = reason == OVERWRITTEN and invocation.stands_for_pytorch
        return opaque_calls.opaque_call(attrs.evolve(invocation, itself=itself), None)
    earlier = replay.find(trace, key)
    if earlier is not None:
        return _replay(invocation, record, earlier)
    everything, outside = _reachable(invocation)
    generators = Generators.now()
    guarded = invocation.guarded = prologue_guards.mark()
    noted = cache_guards.mark()
    error: BaseException
    try:
        if call.function is not None and call.kwargs:
            raise UntraceableError(f"keyword arguments {sorted(call.kwargs)} have no place in forward")
        with following(everything, outside):
            composite, returned = trace_call(invocation, outside)
        cache_guards.note_traced(outside)
        if invocation.mode.mode == "region":
            reason = _no_regions.get().get(invocation.subject) or regions.obstacle(composite, returned)
            if reason is None and everything.changed():
                reason = "it changes Python state of the program"
            if reason is None:
                composite, returned = regions.as_region(composite, returned)
            record.no_region = reason
        _note(record, composite)
        _note_closed_over(invocation, composite)
        if not everything.changed():
            replay.remember(trace, key, invocation, composite, returned, everything)
        return bind_call(invocation, composite, returned)
    except Raised as raised:
        is_refusal = isinstance(raised.error, HookError) and not isinstance(raised.error, DataDependencyError)
        if (invocation.mode.mode == "trace" and is_refusal) or getattr(raised.error, "is_final", False):
            raise
        error = raised.error
    except HookError as refused:
        if not (rule.opaque_callee or isinstance(refused, UntraceableError)):
            raise
        error = refused
    prologue_guards.drop_changed(guarded, cache_guards.traced_program())
    outside.restore()
    generators.restore()
    prologue_guards.drop_uncheckable(guarded)
    cache_guards.drop(noted)
    result, reason = opaque_calls.fall_back(invocation, error)
    _untraceable.get()[key] = reason
    record.became("opaque", reason)
    return result


def _note(record: call_log.CallRecord, composite: Composite) -> None:
    """Note whether a call is one of a region, or traced."""
    record.region = getattr(composite, "region", None)
    record.became("traced" if record.region is None else "region")


def _replay(invocation: Invocation, record: call_log.CallRecord, earlier: Any) -> Any:
    composite, returned = replay.instantiate(earlier, invocation)
    _note(record, composite)
    record.replays = 1
    return bind_call(invocation, composite, returned)


def _region_or_inline(invocation: Invocation, record: call_log.CallRecord, key: Any) -> Any:
    """Make a call one of a region, or go on in it as if there were no rule."""
    trace = get_jit_ctx().computation_trace
    earlier = replay.find(trace, key)
    if earlier is not None:
        return _replay(invocation, record, earlier)
    reason = _no_regions.get().get(invocation.subject)
    everything, outside = _reachable(invocation)
    generators, unwritten = Generators.now(), replay.written()
    call: Any = None
    with following(everything, outside), Aside() as aside:
        result = _interpret_call(invocation.rule.forward, *invocation.provider_arguments(), **invocation.kwargs)
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            if everything.changed() or not replay.is_same(unwritten, replay.written()):
                reason = reason or "it changes Python state of the program"
            found = reason or aside.obstacle() or regions.recorded(invocation, aside.operations(), unwrap(result))
            if isinstance(found, str):
                reason = found
            else:
                call = found
                aside.bound_symbols.clear()
    if call is None:
        record.became("traced")
        record.no_region = reason
        return result
    record_call(invocation, call, unwrap(result))
    _note(record, call)
    if not generators.drawn_from():
        replay.remember(trace, key, invocation, call, unwrap(result), everything)
    return result


def _why_opaque(invocation: Invocation, key: Any) -> str | None:
    """Why a call is made opaque without trying to trace it, or None."""
    mode = invocation.mode.mode
    if mode == "opaque":
        return 'mode="opaque"'
    if mode in ("auto", "region"):
        untraceable = _untraceable.get()
        reason = untraceable.get(invocation.subject) or untraceable.get(key)
        if reason is not None:
            return reason
        if invocation.rule.opaque_callee and get_compile_data().autocast_stack.stack:
            # thunder casts fewer operations than PyTorch, and custom_fwd and custom_bwd ask PyTorch for its state
            return "autocast is on"
    return None


def _reachable(invocation: Invocation) -> tuple[State, State]:
    """What a call's code can reach: all of it, and what is not made by the program while it is traced."""
    given = [g for g in (invocation.owner, *invocation.args, *invocation.kwargs.values()) if g is not None]
    rule = invocation.rule
    # Where the callee runs itself the providers are hookkit's own, and the Function is among what is given.
    itself = rule.opaque_callee and invocation.call.function is not None
    providers = [] if itself else [rule.forward, rule.backward_provider, *invocation.operator_parts]
    outside = [g for g in given if not invocation.is_made_by_program(g)]
    everything = State.reachable_from([*map(unwrap, given), *providers])
    if len(outside) == len(given):
        return everything, everything
    return everything, State.reachable_from([*map(unwrap, outside), *providers])


PATCHES = [
    Patch(
        "thunder:thunder_general_jit",
        around(trace_program),
        "a program is not traced again where a call turns out to be opaque",
        takes=("fn, args, kwargs, sharp_edges, ad_hoc_executor",),
        needed=True,
    )
]
