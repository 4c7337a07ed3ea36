"""What became of each call while a program was traced: written by the engine, read by ``hookkit.reporting``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
from thunder.core.compile_data import _compile_data
from thunder.core.trace import TraceCtx

from hookkit.call import Call, Source
from hookkit.forms import other_forms
from hookkit.logs import RULES
from hookkit.registry import Candidate, registry
from hookkit.rule import Rule
from hookkit.targets import CallableTarget, describe_callable

__all__ = [
    "CallRecord",
    "MissedForm",
    "Tracing",
    "all_candidates_wanted",
    "counter",
    "inside_a_call",
    "note",
    "note_form",
    "note_outcome",
    "tracings_of",
    "want_all_candidates",
]


@attrs.define(eq=False)
class CallRecord:
    """One call that at least one rule could take.

    Attributes:
        name: what was called.
        source: where in the user's program.
        rule: the rule that took the call, or None.
        candidates: the rules that were asked, in the order of precedence; all of them only where all were wanted.
        outcome: ``"traced"``, ``"region"``, ``"opaque"``, ``"raised"``, or ``"not taken"``.
        reason: why the call is opaque, or what it raised.
        region: the region that it is a call of.
        no_region: why it is none, although it was to be.
        symbols: the bound symbols that stand for the call.
        inside: calls that were made while this one was traced.
        replays: how often the operations of an earlier call were used again.
    """

    name: str
    source: Source | None
    rule: Rule[..., Any] | None
    candidates: Sequence[Candidate]
    outcome: str = "not taken"
    reason: str | None = None
    symbols: list[Any] = attrs.Factory(list)
    inside: list[CallRecord] = attrs.Factory(list)
    replays: int = 0
    region: Any = None
    no_region: str | None = None

    @contextmanager
    def running(self, trace: TraceCtx) -> Iterator[None]:
        """The time in which the call is taken over: what is recorded meanwhile stands for it."""
        token = _running.set(self)
        scope = trace.peek_scope()
        assert scope is not None
        start = len(scope)
        try:
            yield
        except Exception as error:
            self.outcome, self.reason = "raised", f"{type(error).__name__}: {error}"
            raise
        finally:
            _running.reset(token)
            self.symbols = [b for b in scope[start:] if str(b.sym.id).startswith("hookkit.")]

    def became(self, outcome: str, reason: str | None = None) -> None:
        """Note whether the call is traced or opaque, and why."""
        self.outcome, self.reason = outcome, reason
        if outcome == "opaque":
            self.inside.clear()  # of an attempt to trace it


@attrs.define(eq=False)
class Tracing:
    """The calls of one acquisition of a program.

    ``names`` is the set of names of the trace; thunder hands this very object on to every trace that it makes of it
    (``from_trace`` in thunder/core/trace.py).
    """

    names: set[str]
    calls: list[CallRecord] = attrs.Factory(list)


_tracings: weakref.WeakKeyDictionary[Any, list[Tracing]] = weakref.WeakKeyDictionary()
_running: ContextVar[CallRecord | None] = ContextVar("hookkit_running_call", default=None)
_missed: ContextVar[Any] = ContextVar("hookkit_missed_forms", default=None)
_all_wanted: ContextVar[bool] = ContextVar("hookkit_all_candidates_wanted", default=False)


def all_candidates_wanted() -> bool:
    """Whether the rules after the one that takes a call are asked, too."""
    return _all_wanted.get()


def inside_a_call() -> bool:
    """Whether a call is being taken over."""
    return _running.get() is not None


@contextmanager
def want_all_candidates() -> Iterator[list[MissedForm]]:
    """Have all rules asked about each call; gives the list in which forms are noted that no rule matches."""
    missed: list[MissedForm] = []
    token, forms_token = _all_wanted.set(True), _missed.set((_forms_not_meant(), missed))
    try:
        yield missed
    finally:
        _all_wanted.reset(token)
        _missed.reset(forms_token)


@attrs.frozen
class MissedForm:
    """A call of an operation, in a form that a rule for another form of it does not match."""

    rule: Rule[..., Any]
    target: str
    form: str
    source: Source | None

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.form}{where} is a form of {self.target} that the rule does not match; hookkit.forms gives all"


def note_form(callee: Any, source: Callable[[], Source | None]) -> None:
    """Note a call of an operation of torch, if a rule is for another form of it alone."""
    wanted = _missed.get()
    if wanted is None:
        return
    try:
        found = wanted[0].get(callee, ())
    except TypeError:  # it is not hashable
        return
    for rule, target in found:
        wanted[1].append(MissedForm(rule, target, describe_callable(callee), source()))


def _forms_not_meant() -> dict[Any, list[tuple[Rule[..., Any], str]]]:
    """For each form of an operation that rules stand for, users' rules that do not match it."""
    found: dict[Any, list[tuple[Rule[..., Any], str]]] = {}
    for rule in registry.current().rules:
        given = [t.callable for t in rule.targets if isinstance(t, CallableTarget) and not rule.ships]
        forms = {form: str(CallableTarget(c)) for c in given for form in other_forms(c) if form not in given}
        for form, target in forms.items():
            found.setdefault(form, []).append((rule, target))
    return found


def note(call: Call, candidates: Sequence[Candidate], trace: TraceCtx) -> CallRecord:
    """Begin the record of a call in the program that is being traced."""
    rule = next((c.rule for c in candidates if c.declined is None), None)
    name = rule.name if rule is not None and rule.inlines else call.name  # of a module's class, and not "forward"
    record = CallRecord(name, call.source, rule, candidates)
    outer = _running.get()
    if outer is not None:
        outer.inside.append(record)
    else:
        _tracing(trace).calls.append(record)
    return record


def note_outcome(record: CallRecord) -> None:
    """Tell the log what became of a call."""
    if not RULES.isEnabledFor(logging.INFO):
        return
    where = f" at {record.source}" if record.source else ""
    reason = f": {record.reason}" if record.reason else ""
    if record.rule is not None:
        how = "replayed" if record.replays else record.outcome
        RULES.info("%s()%s is taken by %s, %s%s", record.name, where, record.rule.name, how, reason)
    for candidate in record.candidates:
        if candidate.declined is not None:
            RULES.debug("%s()%s is declined by %s: %s", record.name, where, candidate.rule.name, candidate.declined)
    if record.rule is None:
        RULES.debug("%s()%s is left to thunder", record.name, where)


def _tracing(trace: TraceCtx) -> Tracing:
    stats = _compile_data.get()[1]
    tracings = _tracings.setdefault(stats, [])
    if not tracings or tracings[-1].names is not trace.names:
        tracings.append(Tracing(trace.names))
    return tracings[-1]


def counter() -> Callable[[], int]:
    """What gives, in any thread, the number of calls that were noted so far of the program that is being traced."""
    stats = _compile_data.get()[1]

    def count() -> int:
        tracings = _tracings.get(stats)
        return len(tracings[-1].calls) if tracings else 0

    return count


def tracings_of(stats: Any) -> list[Tracing]:
    """What was noted for a compiled program's statistics, oldest first."""
    return _tracings.get(stats, [])
