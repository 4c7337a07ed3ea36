"""Registry: which rules there are, which of them are in force, and which one a call is given to.

Registering and looking up are safe with threads: what a look-up reads is replaced, never changed in place. Scopes are
kept in a context variable, so that threads and asyncio tasks do not see each other's.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.metadata
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs

from hookkit import modes
from hookkit.answers import Decline
from hookkit.call import Call, Source
from hookkit.entry_points import ENTRY_POINT_GROUP, entry_points
from hookkit.errors import ConflictError, PluginWarning, RegistrationError, warn_user
from hookkit.notebook import RuleList
from hookkit.patch import versions
from hookkit.targets import (
    CallableTarget,
    FunctionTarget,
    NameTarget,
    PredicateTarget,
    is_asked_about,
    is_lambda,
    make_target,
    place_of,
)

if TYPE_CHECKING:
    from hookkit.declare import Declaration
    from hookkit.rule import Rule

__all__ = ["SHIPPED", "Candidate", "Registry", "registry", "rules"]

# The packages of the rules that ship.
SHIPPED = ("hookkit.rules", "hookkit.mends.rules")


@attrs.frozen
class Candidate:
    """A rule that a call could be given to, or the reason why it declined."""

    rule: Rule[..., Any]
    declined: str | None = None


# A rule, the target by which it may match, and their rank: the depth of the scope that added the rule, its priority,
# and how narrow the target is.
Entry = tuple[tuple[int, int, int], "Rule[..., Any]", Any]


@attrs.define(eq=False)
class Tables:
    """Rules, arranged for looking up.

    Attributes:
        rules: the rules, in the order in which equals are asked.
        by_callable: for each callable the rules that mean it.
        by_function: the same for each autograd Function class.
        predicates: the rules that are asked about every call, best first.
        names: lazy names that stand for nothing yet.
        fingerprint: a string that two tables share only if they hold the same rules.
        modules_seen: how far the program's imports had got when the names were last looked up.
    """

    rules: tuple[Rule[..., Any], ...]
    by_callable: dict[Any, tuple[Entry, ...]]
    by_function: dict[type[Any], tuple[Entry, ...]]
    predicates: list[Entry]
    names: tuple[NameTarget, ...]
    fingerprint: str
    modules_seen: object = None

    @classmethod
    def of(cls, rules: tuple[Rule[..., Any], ...], scope: Scope | None = None) -> Tables:
        """Arrange rules; lazy names that resolve by now are entered under what they stand for."""
        by_callable: dict[Any, tuple[Entry, ...]] = {}
        by_function: dict[type[Any], tuple[Entry, ...]] = {}
        predicates: list[Entry] = []
        names: list[NameTarget] = []
        for rule, target in ((r, t) for r in rules for t in r.targets):
            found = target.resolve() if isinstance(target, NameTarget) else target
            if found is None:
                assert isinstance(target, NameTarget)
                names.append(target)
                continue
            depth = scope.depth_of(rule) if scope is not None else 0
            entry = ((depth, rule.priority, found.specificity * 1000), rule, found)
            match found:
                case PredicateTarget():
                    predicates.append(entry)
                case FunctionTarget():
                    by_function[found.function] = (*by_function.get(found.function, ()), entry)
                case CallableTarget():
                    for key in found.callables:
                        by_callable[key] = (*by_callable.get(key, ()), entry)
        predicates.sort(key=_rank, reverse=True)
        return cls(rules, by_callable, by_function, predicates, tuple(names), _fingerprint(rules))

    def are_stale(self) -> bool:
        """Whether a lazy name resolves by now; warns of those that never will."""
        if not self.names:
            return False
        modules = (len(sys.modules), next(reversed(sys.modules)))
        if self.modules_seen == modules:
            return False
        if any(name.resolve() is not None for name in self.names):
            return True
        self.warn_of_missing_names()
        if not any(name.is_being_imported() for name in self.names):
            self.modules_seen = modules
        return False

    def warn_of_missing_names(self) -> None:
        """Warn, once, of each lazy name whose module is there and has no such name."""
        for rule in self.rules:
            for target in rule.targets:
                if isinstance(target, NameTarget):
                    target.warn_if_missing(rule.name, rule.declared_at)


def _rank(entry: Entry) -> tuple[int, int, int]:
    return entry[0]


def _fingerprint(rules: tuple[Rule[..., Any], ...]) -> str:
    return ",".join(str(rule.serial) for rule in rules)


@attrs.define(eq=False)
class Scope:
    """What one ``with hookkit.use(...)`` adds and leaves out, inside the scope around it."""

    outer: Scope | None
    added: tuple[Rule[..., Any], ...]
    without: frozenset[Rule[..., Any]]
    depth: int
    _known: tuple[Tables, Tables] | None = None

    def in_force(self, registered: tuple[Rule[..., Any], ...]) -> tuple[Rule[..., Any], ...]:
        """The rules in force where those given are registered."""
        around = self.outer.in_force(registered) if self.outer is not None else registered
        return (*(r for r in around if r not in self.without and r not in self.added), *self.added)

    def tables(self, registered: Tables) -> Tables:
        """The tables in force where those given are registered; kept until those are others."""
        known = self._known
        if known is None or known[0] is not registered or known[1].are_stale():
            known = self._known = (registered, Tables.of(self.in_force(registered.rules), self))
        return known[1]

    def depth_of(self, rule: Rule[..., Any]) -> int:
        """The depth of the innermost scope that adds a rule; 0 if none does."""
        if rule in self.added:
            return self.depth
        return self.outer.depth_of(rule) if self.outer is not None else 0


_scope: ContextVar[Scope | None] = ContextVar("hookkit_scope", default=None)


class Registry:
    """The rules of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rules: tuple[Rule[..., Any], ...] = ()
        self._tables = Tables.of(())
        self._outdated = False
        self._claims: dict[tuple[object, int], Rule[..., Any]] = {}
        self._unresolved: list[NameTarget] = []
        self._lambdas: dict[Source, tuple[Rule[..., Any], object]] = {}
        self._loading = False
        self._loaded = False
        self._mends = os.environ.get("HOOKKIT_MENDS") != "0"
        self.unfinished: weakref.WeakSet[Declaration] = weakref.WeakSet()

    @property
    def rules(self) -> tuple[Rule[..., Any], ...]:
        """The registered rules, in the order of their registration."""
        return self._rules

    @property
    def mends(self) -> bool:
        """Whether the rules that mend single operations of thunder are in force."""
        return self._mends

    def mend(self, wanted: bool) -> None:
        """Put the rules that mend single operations of thunder in force, or out of force."""
        with self._lock:
            self._outdated |= wanted != self._mends
            self._mends = wanted

    def add(self, rule: Rule[..., Any]) -> None:
        """Register a rule; one that is the same declaration, run again, is replaced.

        Raises:
            ConflictError: if a registered rule has the same target and priority.
            RegistrationError: if a target is a lambda, and another one of the same line is a target, too.
        """
        with self._lock:
            if any(name.resolve() is not None for name in self._unresolved):
                self._claims = {claim: r for r in self._rules for claim in _claims_of(r)}
                self._unresolved = [name for name in self._unresolved if name.resolve() is None]
            for earlier in self._rules:
                if earlier.is_declared_again_by(rule):
                    self.remove(earlier)
            for claim in _claims_of(rule):
                if claim in self._claims:
                    raise _conflict(self._claims[claim], rule)
            lambdas = self._lambdas_of(rule)
            self._lambdas.update(lambdas)
            self._claims.update(dict.fromkeys(_claims_of(rule), rule))
            self._unresolved += [t for t in rule.targets if isinstance(t, NameTarget) and t.resolve() is None]
            self._rules = (*self._rules, rule)
            self._outdated = True
        for target in rule.targets:
            if isinstance(target, NameTarget):
                target.warn_if_missing(rule.name, rule.declared_at)

    def remove(self, rule: Rule[..., Any]) -> None:
        """Unregister a rule.

        Raises:
            RegistrationError: if it is not registered (any more).
        """
        with self._lock:
            if rule not in self._rules:
                raise RegistrationError(
                    f"the rule {rule.name}, declared at {rule.declared_at}, is not registered: it was unregistered "
                    "or declared again before, or declared with register=False"
                )
            self._rules = tuple(r for r in self._rules if r is not rule)
            self._claims = {claim: r for claim, r in self._claims.items() if r is not rule}
            self._lambdas = {place: entry for place, entry in self._lambdas.items() if entry[0] is not rule}
            self._outdated = True

    def changed(self) -> None:
        """Note that a rule has got another provider: what was compiled with it before is compiled again."""
        with self._lock:
            self._outdated = True

    def _lambdas_of(self, rule: Rule[..., Any]) -> dict[Source, tuple[Rule[..., Any], object]]:
        """The lambdas among a rule's targets, by line; refused where a line has two."""
        found: dict[Source, tuple[Rule[..., Any], object]] = {}
        for target in rule.targets:
            if not (isinstance(target, CallableTarget) and is_lambda(target.callable)):
                continue
            place = place_of(target.callable)
            assert place is not None
            other, twin = found.get(place) or self._lambdas.get(place) or (rule, target.callable)
            if twin is not target.callable:
                raise RegistrationError(
                    f"two lambdas at {place} are targets, one of the rule {other.name} (declared at "
                    f"{other.declared_at}), one of {rule.name} (declared at {rule.declared_at}); no message could tell "
                    "them apart. Define each with def, under a name of its own."
                )
            found[place] = (rule, target.callable)
        return found

    @contextlib.contextmanager
    def scope(self, added: tuple[Rule[..., Any], ...], without: tuple[Rule[..., Any], ...]) -> Iterator[None]:
        """Put rules in force, or out of force, in this context, until the block is left.

        Raises:
            ConflictError: if two rules of those added have the same target and priority.
        """
        claims: dict[tuple[object, int], Rule[..., Any]] = {}
        for rule in added:
            for claim in _claims_of(rule):
                if claims.setdefault(claim, rule) is not rule:
                    raise _conflict(claims[claim], rule)
        outer = _scope.get()
        token = _scope.set(Scope(outer, added, frozenset(without), outer.depth + 1 if outer is not None else 1))
        try:
            yield
        finally:
            _scope.reset(token)

    def load(self) -> None:
        """Load the shipped rules and those of installed packages (entry points ``hookkit.rules``), once."""
        if self._loaded:
            return
        with self._lock:
            if self._loading:
                return
            self._loading = True
            try:
                for package in SHIPPED:
                    importlib.import_module(package)
            except Exception as error:
                self._loading = False
                raise RegistrationError(
                    f"the rules that ship with hookkit cannot be declared ({type(error).__name__}: {error}) with "
                    f"{versions()}, and no program is right without them. hookkit.disable() runs thunder alone."
                ) from error
            self._warn_of_misfits()
            for point, left_out in entry_points():
                if not left_out:
                    self._load_entry_point(point)
            self._loaded = True

    def _warn_of_misfits(self) -> None:
        misfits = "\n".join(f"  the rule {r.name}: {m}" for r in self._rules for m in r.misfits)
        if misfits:
            warn_user(
                f"calls of these targets are refused, which with {versions()} have other signatures than hookkit's "
                f"rules for them were written for:\n{misfits}",
                PluginWarning,
            )

    def _load_entry_point(self, point: importlib.metadata.EntryPoint) -> None:
        before = self._rules
        try:
            point.load()()
        except Exception as error:
            # Other threads cannot register meanwhile: this one holds the lock.
            for rule in self._rules:
                if rule not in before:
                    self.remove(rule)
            for rule in before:
                if rule not in self._rules:  # the same declaration, which was run again
                    self.add(rule)
            distribution = point.dist.name if point.dist is not None else "unknown"
            warn_user(
                f"the rules of the distribution {distribution} are not registered: its entry point {point.name!r} "
                f"(group {ENTRY_POINT_GROUP!r}, {point.value}) raised {type(error).__name__}: {error}. "
                f"HOOKKIT_DISABLE_PLUGINS={point.name} leaves it out.",
                PluginWarning,
            )

    def current(self) -> Tables:
        """The tables of the rules that are in force in this context."""
        tables = self._tables
        if self._outdated or tables.are_stale():
            with self._lock:
                if self._outdated or self._tables.are_stale():
                    self._outdated = False
                    self._tables = Tables.of(tuple(r for r in self._rules if self._mends or not r.is_mend))
                tables = self._tables
        scope = _scope.get()
        return tables if scope is None else scope.tables(tables)

    def fingerprint(self) -> str:
        """A string that differs between contexts in which different rules, or modes, are in force."""
        self.load()
        if self.unfinished:  # asked at each step, where going through a WeakSet costs more than all the rest
            for declaration in list(self.unfinished):
                self.unfinished.discard(declaration)
                declaration.warn()
        return f"{self.current().fingerprint};{modes.fingerprint()}"

    def matching(self, callable_: Callable[..., Any], function: type[Any] | None) -> bool:
        """Whether any rule could take a call, judged by what is called alone; quick."""
        tables = self.current()
        if function is not None:
            if any(base in tables.by_function for base in function.__mro__):
                return True
        else:
            try:
                if callable_ in tables.by_callable:
                    return True
            except TypeError:
                pass  # an unhashable callable is not in the table
        return bool(tables.predicates) and is_asked_about(callable_)

    def named(self, callable_: Any) -> list[Rule[..., Any]]:
        """The rules that have a callable itself for a target, whether or not they would take a call of it."""
        self.load()  # Dynamo's graphs are split before anything is traced
        try:
            return [rule for _, rule, _ in self.current().by_callable.get(callable_, ())]
        except TypeError:  # an unhashable callable is not in the table
            return []

    def candidates(self, call: Call) -> Iterator[Candidate]:
        """The rules that a call could be given to, best first; those that decline say why.

        Precedence: the innermost scope's rules, then priority, then specificity (exact class over base class, callable
        over predicate). Predicates that tie are asked in the order of their registration.

        Raises:
            ConflictError: if two rules tie that did not when they were registered, because a lazy name resolved since.
            RegistrationError: if a rule's provider does not fit what a lazy name stands for.
            HookError: if a predicate raises.
        """
        tables = self.current()
        exact: list[Entry] = []
        if call.function is not None:
            for distance, base in enumerate(call.function.__mro__):
                for (depth, priority, narrow), rule, target in tables.by_function.get(base, ()):
                    exact.append(((depth, priority, narrow - distance), rule, target))
        else:
            with contextlib.suppress(TypeError):  # an unhashable callable is not in the table
                exact.extend(tables.by_callable.get(call.callable, ()))
        exact.sort(key=_rank, reverse=True)
        for (rank, rule, target), (next_rank, next_rule, next_target) in itertools.pairwise(exact):
            if rank == next_rank and rule is not next_rule and target.key == next_target.key:
                raise _conflict(rule, next_rule)
        predicates = tables.predicates if is_asked_about(call.callable) else []
        if exact and predicates:
            yield from _ask(call, sorted([*exact, *predicates], key=_rank, reverse=True))
        else:
            yield from _ask(call, exact or predicates)


def _ask(call: Call, entries: list[Entry]) -> Iterator[Candidate]:
    seen = set()
    for _, rule, target in entries:
        answer = target.matches(call)
        if (not answer and not isinstance(answer, Decline)) or rule in seen:
            continue
        seen.add(rule)
        if answer:
            rule.check_names()
            answer = rule.accepts(call)
        if answer:
            yield Candidate(rule)
        else:
            yield Candidate(rule, answer.reason if isinstance(answer, Decline) else f"its .when returned {answer!r}")


def _claims_of(rule: Rule[..., Any]) -> list[tuple[object, int]]:
    """What no other rule may claim: each target at the rule's priority."""
    return [(target.key, rule.priority) for target in rule.targets]


def _conflict(first: Rule[..., Any], second: Rule[..., Any]) -> ConflictError:
    keys = {t.key for t in first.targets}
    shared = ", ".join(str(t) for t in second.targets if t.key in keys)
    return ConflictError(
        f"two rules for {shared} at priority {second.priority}:\n"
        f"  {first.name}, declared at {first.declared_at}\n"
        f"  {second.name}, declared at {second.declared_at}\n"
        "Give one of them another priority=, or unregister() one."
    )


registry = Registry()


def rules(wanted: str | Callable[..., Any] | None = None) -> list[Rule[..., Any]]:
    """The rules in force here: name, target, priority and where each was declared.

    Args:
        wanted: only some rules: those of a name, in which ``*`` stands for anything, or else those of which a target
            has that name, short or whole (``"sigmoid"``, ``"torch.sigmoid"``); or those for a target, such as
            ``torch.sigmoid``.

    Returns:
        The rules, in the order of their registration, those of open scopes last; each prints as one line.

    Example:
        >>> import hookkit
        >>> any(rule.name == "autograd_function" for rule in hookkit.rules())
        True
    """
    registry.load()
    found = registry.current().rules
    if wanted is None:
        return RuleList(found)
    if isinstance(wanted, str) and ":" not in wanted:
        named = [rule for rule in found if fnmatch.fnmatchcase(rule.name, wanted)]
        return RuleList(named or [r for r in found if any(_is_called(wanted, target) for target in r.targets)])
    key = make_target(wanted).key
    return RuleList(rule for rule in found if any(target.key == key for target in rule.targets))


def _is_called(pattern: str, target: Any) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (target.name, str(target)))
