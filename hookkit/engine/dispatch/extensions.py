"""Where what is no rule takes part in interpreting a program: answers, questions, and what is around a traced program.

Empty in the framework alone. ``hookkit/install.py`` puts the extensions of mends here when it installs them, and takes
them out again when hookkit is disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import attrs

__all__ = [
    "Extension",
    "add",
    "after_rules",
    "answer",
    "around_tracing",
    "before_rules",
    "finish",
    "remove",
]

# Given what the program calls, and the wrapped arguments: what the interpreter calls instead, or None.
Lookaside = Callable[[Any, tuple[Any, ...]], Callable[..., Any] | None]


@attrs.frozen(eq=False)
class Extension:
    """What a mend adds to what the interpreter does.

    Attributes:
        answers: what is called, with the wrapped arguments, in the place of a callable, whatever the rules say.
        before_rules: asked about each call before the rules are.
        after_rules: asked about each call that no rule takes.
        around: makes the context in which a program is traced; gets the program.
        finished: told of the computation trace of each program.
    """

    answers: Mapping[Any, Callable[..., Any]] = attrs.field(factory=dict)
    before_rules: Lookaside | None = None
    after_rules: Lookaside | None = None
    around: Callable[[Any], AbstractContextManager[None]] | None = None
    finished: Callable[[Any], None] | None = None


_in_force: list[Extension] = []
_answers: dict[Any, Callable[..., Any]] = {}


def add(extension: Extension) -> None:
    """Put an extension in force."""
    twice = _answers.keys() & extension.answers.keys()
    assert not twice, f"two extensions answer for {twice}"
    _in_force.append(extension)
    _answers.update(extension.answers)


def remove(extension: Extension) -> None:
    """Put an extension out of force."""
    _in_force.remove(extension)
    for callee in extension.answers:
        del _answers[callee]


def answer(function: Any) -> Callable[..., Any] | None:
    """What is called in the place of a callable.

    Raises:
        TypeError: if it cannot be hashed.
    """
    return _answers.get(function)


def before_rules(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What is done instead of a call about which the rules are not asked."""
    for extension in _in_force:
        if (ask := extension.before_rules) is not None and (found := ask(function, args)) is not None:
            return found
    return None


def after_rules(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What is done instead of a call that no rule takes."""
    for extension in _in_force:
        if (ask := extension.after_rules) is not None and (found := ask(function, args)) is not None:
            return found
    return None


@contextmanager
def around_tracing(program: Any) -> Iterator[None]:
    """The time in which a program is traced."""
    with ExitStack() as stack:
        for extension in _in_force:
            if extension.around is not None:
                stack.enter_context(extension.around(program))
        yield


def finish(trace: Any) -> None:
    """Tell the extensions of a trace that is finished."""
    for extension in _in_force:
        if extension.finished is not None:
            extension.finished(trace)
