"""Scopes of rules: ``with hookkit.use(...)``."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hookkit.errors import RegistrationError
from hookkit.modes import Mode
from hookkit.modes import scope as mode_scope
from hookkit.registry import registry, rules
from hookkit.rule import Rule

__all__ = ["use"]

Selection = Rule[..., Any] | str | Callable[..., Any]


@contextlib.contextmanager
def use(
    *added: Rule[..., Any], without: Selection | Iterable[Selection] = (), mode: Mode | None = None
) -> Iterator[None]:
    """Put rules in force, or out of force, for the programs that are traced inside a ``with`` block.

    Scopes nest, and belong to the thread or asyncio task that opened them. Rules are bound when a program is traced. A
    program that was compiled under other rules than those in force is compiled anew, and found again when its rules
    are back in force.

    Args:
        *added: rules that win over all others inside the block; they need not be registered.
        without: what is out of force inside the block: rules, names of rules with ``*`` for any part of one
            (``"silu"``, ``"clamp*"``), or targets, such as ``torch.sigmoid``.
        mode: the mode of all calls inside the block that neither their rule nor :func:`hookkit.mode` gives one:
            ``"trace"`` makes a fallback to an opaque operator an error, ``"opaque"`` does not try to trace,
            ``"region"`` compiles what can be traced by itself, see :func:`hookkit.region`.

    Raises:
        RegistrationError: if something given is not a rule, ``without`` means none, or the mode is none.
        ConflictError: if two rules of those added have the same target and priority.

    Example:
        >>> import hookkit, math
        >>> @hookkit.rule(math.sqrt, register=False)
        ... def root(x):
        ...     return x**0.5
        >>> with hookkit.use(root):
        ...     root in hookkit.rules()
        True
        >>> root in hookkit.rules()
        False
    """
    for given in added:
        if not isinstance(given, Rule):
            raise RegistrationError(
                f"hookkit.use(...) takes rules, got {given!r}; a rule is what hookkit.rule(...) returns"
            )
    selections = tuple(without) if isinstance(without, list | tuple | set | frozenset) else (without,)
    left_out = tuple(rule for selection in selections for rule in _meant(selection))
    with registry.scope(added, left_out), mode_scope(mode):
        yield


def _meant(selection: Any) -> list[Rule[..., Any]]:
    """The rules that one item of ``without`` means.

    Raises:
        RegistrationError: if it means none.
    """
    if isinstance(selection, Rule):
        return [selection]
    if not (isinstance(selection, str) or callable(selection)):
        raise RegistrationError(f"hookkit.use(without=...) takes rules, got {selection!r}; or their names or targets")
    found = rules(selection)
    if not found:
        names = [rule.name for rule in rules()]
        near = difflib.get_close_matches(str(selection), names, n=3)
        raise RegistrationError(
            f"hookkit.use(without=[{selection!r}]): no rule in force has this name or target"
            + (f"; nearest: {', '.join(near)}" if near else "")
            + ". hookkit.rules() lists them."
        )
    return found
