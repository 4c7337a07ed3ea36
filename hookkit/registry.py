"""Registry: which rules there are, which of them are in force, and which one a call is given to.

Registering and looking up are safe with threads: the tables are replaced, never changed in place. Scopes are kept
in a context variable, so that threads and asyncio tasks do not see each other's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs

from hookkit.call import Call
from hookkit.errors import ConflictError, PluginWarning, RegistrationError
from hookkit.targets import CallableTarget, Decline, FunctionTarget, NameTarget, PredicateTarget, Target

if TYPE_CHECKING:
    from hookkit.rule import Rule

__all__ = ["Candidate", "Registry", "registry", "rules", "use"]

ENTRY_POINT_GROUP = "hookkit.rules"


@attrs.frozen
class Candidate:
    """A rule that a call could be given to, or the reason why it declined."""

    rule: Rule
    declined: str | None = None


@attrs.frozen
class Scope:
    """What one ``with hookkit.use(...)`` adds and leaves out."""

    added: tuple[Rule, ...] = ()
    without: frozenset[Rule] = frozenset()


_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("hookkit_scopes", default=())


@attrs.frozen
class Tables:
    """The registered rules, arranged for looking up."""

    rules: tuple[Rule, ...] = ()
    by_callable: dict[Any, tuple[tuple[Rule, Target], ...]] = attrs.field(factory=dict)
    by_function: dict[type[Any], tuple[tuple[Rule, Target], ...]] = attrs.field(factory=dict)
    names: tuple[tuple[Rule, NameTarget], ...] = ()
    predicates: tuple[tuple[Rule, PredicateTarget], ...] = ()

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Tables:
        """Arrange rules; lazy names that resolve by now are entered under what they stand for."""
        rules = tuple(rules)
        by_callable: dict[Any, list[tuple[Rule, Target]]] = {}
        by_function: dict[type[Any], list[tuple[Rule, Target]]] = {}
        names: list[tuple[Rule, NameTarget]] = []
        predicates: list[tuple[Rule, PredicateTarget]] = []
        for rule in rules:
            for target in rule.targets:
                found = target
                if isinstance(target, NameTarget):
                    resolved = target.resolve()
                    if resolved is None:
                        names.append((rule, target))
                        continue
                    found = resolved
                if isinstance(found, PredicateTarget):
                    predicates.append((rule, found))
                elif isinstance(found, FunctionTarget):
                    by_function.setdefault(found.function, []).append((rule, found))
                else:
                    assert isinstance(found, CallableTarget)
                    by_callable.setdefault(found.callable, []).append((rule, found))
        return cls(
            rules,
            {k: tuple(v) for k, v in by_callable.items()},
            {k: tuple(v) for k, v in by_function.items()},
            tuple(names),
            tuple(predicates),
        )


class Registry:
    """The rules of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tables = Tables()
        self._loaded = False
        self._modules_seen = 0

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The registered rules, in the order of their declaration."""
        return self._tables.rules

    def add(self, rule: Rule) -> None:
        """Register a rule.

        Raises:
            ConflictError: if a registered rule has the same target and priority.
        """
        with self._lock:
            for other in self._tables.rules:
                if other.priority == rule.priority:
                    shared = {t.key for t in other.targets} & {t.key for t in rule.targets}
                    if shared:
                        raise ConflictError(
                            f"two rules for {_some(rule, shared)} at priority {rule.priority}:\n"
                            f"  {other.name}, declared at {other.declared_at}\n"
                            f"  {rule.name}, declared at {rule.declared_at}\n"
                            "Give one of them another priority=, or unregister() the first."
                        )
            self._tables = Tables.of((*self._tables.rules, rule))

    def remove(self, rule: Rule) -> None:
        """Unregister a rule.

        Raises:
            RegistrationError: if it is not registered (any more).
        """
        with self._lock:
            if rule not in self._tables.rules:
                raise RegistrationError(
                    f"the rule {rule.name}, declared at {rule.declared_at}, is not registered; "
                    "it was unregistered before"
                )
            self._tables = Tables.of(r for r in self._tables.rules if r is not rule)

    def load(self) -> None:
        """Load the shipped rules and, once, those of installed packages (entry points ``hookkit.rules``)."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            importlib.import_module("hookkit.rules")
            left_out = {n.strip() for n in os.environ.get("HOOKKIT_DISABLE_PLUGINS", "").split(",")}
            for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
                if point.name in left_out or (point.dist is not None and point.dist.name in left_out):
                    continue
                self._load_entry_point(point)

    @staticmethod
    def _load_entry_point(point: importlib.metadata.EntryPoint) -> None:
        distribution = point.dist.name if point.dist is not None else "an unknown distribution"
        try:
            point.load()()
        except Exception as error:
            warnings.warn(
                f"the entry point {point.name!r} of {distribution} (group {ENTRY_POINT_GROUP!r}, {point.value}) failed "
                f"with {type(error).__name__}: {error}; its rules are not registered. Set "
                f"HOOKKIT_DISABLE_PLUGINS={point.name} to leave it out.",
                PluginWarning,
                stacklevel=4,
            )

    def in_force(self) -> tuple[Rule, ...]:
        """The rules that are in force in this context: registered ones and those of open scopes."""
        result = list(self._tables.rules)
        for scope in _scopes.get():
            result = [r for r in result if r not in scope.without]
            result.extend(r for r in scope.added if r not in result)
        return tuple(result)

    def fingerprint(self) -> int:
        """A number that differs between contexts in which different rules are in force."""
        return hash(tuple(rule.serial for rule in self.in_force()))

    def matching(self, callable_: Callable[..., Any], function: type[Any] | None) -> bool:
        """Whether any rule could take a call, judged by what is called alone; quick."""
        tables = self._current_tables()
        if tables.predicates:
            return True
        if function is not None:
            return any(base in tables.by_function for base in function.__mro__)
        try:
            return callable_ in tables.by_callable
        except TypeError:
            return False

    def candidates(self, call: Call) -> Iterator[Candidate]:
        """The rules that a call could be given to, best first; those that decline say why.

        Precedence: rules of the innermost scope, then priority, then specificity (exact class over base class,
        callable over predicate).
        """
        tables = self._current_tables()
        found: list[tuple[tuple[int, int, int], Rule, Target]] = []
        scopes = _scopes.get()

        def note(rule: Rule, target: Target, distance: int = 0) -> None:
            depth = max((i + 1 for i, s in enumerate(scopes) if rule in s.added), default=0)
            found.append(((depth, rule.priority, target.specificity * 1000 - distance), rule, target))

        if call.function is not None:
            for distance, base in enumerate(call.function.__mro__):
                for rule, target in tables.by_function.get(base, ()):
                    if distance == 0 or (isinstance(target, FunctionTarget) and target.subclasses):
                        note(rule, target, distance)
        try:
            for rule, target in tables.by_callable.get(call.callable, ()):
                note(rule, target)
        except TypeError:
            pass  # an unhashable callable is not in the table
        for rule, predicate in tables.predicates:
            note(rule, predicate)
        for _, rule, target in sorted(found, key=lambda item: item[0], reverse=True):
            answer = target.matches(call) if isinstance(target, PredicateTarget) else True
            if answer:
                answer = rule.accepts(call)
            if answer:
                yield Candidate(rule)
            elif not isinstance(target, PredicateTarget) or isinstance(answer, Decline):
                yield Candidate(rule, answer.reason if isinstance(answer, Decline) else "its .when returned false")

    def _current_tables(self) -> Tables:
        tables = self._tables
        if tables.names:
            import sys

            if len(sys.modules) != self._modules_seen:
                with self._lock:
                    self._modules_seen = len(sys.modules)
                    if any(name.resolve() is not None for _, name in self._tables.names):
                        self._tables = Tables.of(self._tables.rules)
                    tables = self._tables
        if not _scopes.get():
            return tables
        return _scoped_tables(self.in_force())


_scoped_cache: dict[tuple[int, ...], Tables] = {}


def _scoped_tables(rules_in_force: tuple[Rule, ...]) -> Tables:
    key = tuple(rule.serial for rule in rules_in_force)
    tables = _scoped_cache.get(key)
    if tables is None or tables.names:
        if len(_scoped_cache) > 64:
            _scoped_cache.clear()
        tables = _scoped_cache[key] = Tables.of(rules_in_force)
    return tables


def _some(rule: Rule, keys: set[object]) -> str:
    return ", ".join(str(t) for t in rule.targets if t.key in keys)


registry = Registry()


def rules() -> list[Rule]:
    """The rules in force here: name, target, priority and where each was declared.

    Returns:
        The rules, shipped ones first; each prints as one line.

    Example:
        >>> import hookkit
        >>> any(rule.name == "autograd_function" for rule in hookkit.rules())
        True
    """
    registry.load()
    return list(registry.in_force())


@contextlib.contextmanager
def use(*added: Rule, without: Iterable[Rule] = ()) -> Iterator[None]:
    """Put rules in force, or out of force, for the programs that are traced inside a ``with`` block.

    Scopes nest, and belong to the thread or asyncio task that opened them. Rules are bound when a program is
    traced: a program that is compiled inside and called outside the block is traced again.

    Args:
        *added: rules that win over all others inside the block; they need not be registered.
        without: rules that are out of force inside the block.

    Raises:
        RegistrationError: if something given is not a rule.

    Example:
        >>> import hookkit, math
        >>> @hookkit.rule(math.sqrt, register=False)
        ... def root(x):
        ...     return x ** 0.5
        >>> with hookkit.use(root):
        ...     root in hookkit.rules()
        True
        >>> root in hookkit.rules()
        False
    """
    from hookkit.rule import Rule as RuleClass

    out = tuple(without)
    for given in (*added, *out):
        if not isinstance(given, RuleClass):
            raise RegistrationError(f"hookkit.use(...) takes rules, got {given!r}; a rule is what @hookkit.rule returns")
    token = _scopes.set((*_scopes.get(), Scope(tuple(added), frozenset(out))))
    try:
        yield
    finally:
        _scopes.reset(token)
