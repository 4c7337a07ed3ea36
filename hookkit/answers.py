"""What a condition or a predicate answers: true, false, or a reason."""

from __future__ import annotations

import types
from typing import Any

import attrs

from hookkit.errors import RegistrationError

__all__ = ["Decline", "check_answer", "decline"]


@attrs.frozen
class Decline:
    """A rule's or predicate's reason for not taking a call, made by :func:`decline`; false in a condition.

    Attributes:
        reason: why the rule is not for the call.

    Example:
        >>> import hookkit
        >>> hookkit.decline("x is a scalar").reason
        'x is a scalar'
    """

    reason: str

    def __bool__(self) -> bool:
        return False


def decline(reason: str) -> Decline:
    """Decline a call, with a reason.

    Return it from a ``.when`` provider or from a predicate; ``hookkit.explain`` shows the reason.

    Args:
        reason: why the rule is not for this call.

    Returns:
        A value that is false in a condition.

    Raises:
        RegistrationError: if the reason is no text.

    Example:
        >>> import hookkit
        >>> bool(hookkit.decline("x is a scalar"))
        False
    """
    if not isinstance(reason, str):
        raise RegistrationError(f"hookkit.decline({reason!r}); expected the reason, a string")
    return Decline(reason)


def check_answer(answer: Any) -> None:
    """Refuse what a condition or predicate returned by mistake, and what would count as true.

    Raises:
        TypeError: if it is a text, a function, a generator or a coroutine.
    """
    mistaken: Any = str | bytes | types.GeneratorType | types.CoroutineType | types.NotImplementedType
    if isinstance(answer, mistaken) or (callable(answer) and not isinstance(answer, int)):
        raise TypeError(f"it returned {answer!r} ({type(answer).__name__}), which is neither true nor false")
