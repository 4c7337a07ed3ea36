"""Everything that hookkit raises or warns with.

One class per kind of mistake, so that a program can tell them apart. Exceptions that a user's own forward or
backward raises are not here: they reach the user as they are.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = [
    "ConflictError",
    "GradientError",
    "HookError",
    "MetaError",
    "MetaWarning",
    "OpaqueFallbackWarning",
    "PluginWarning",
    "RegistrationError",
    "RegistrationWarning",
    "TargetWarning",
    "TransformWarning",
    "UntraceableError",
]


class HookError(RuntimeError):
    """The base of every error that hookkit itself raises.

    A program that wants to catch all of hookkit's refusals, and none of its own exceptions, catches this class.
    """


class RegistrationError(HookError):
    """A rule was declared in a way that cannot work.

    Raised by the decorators, at the line of the declaration: a target that is not callable, a provider whose
    signature cannot take the target's arguments, a second backward provider, a rule that is unregistered twice.
    """


class ConflictError(RegistrationError):
    """Two rules claim one target at one priority; both declarations are quoted."""


class UntraceableError(HookError):
    """A call cannot be traced, and its mode (``"trace"``) does not allow it to run opaque."""


class GradientError(HookError):
    """A backward provider returned gradients that do not fit the inputs: count, names, shape, type."""


class MetaError(HookError):
    """The metadata of an opaque call is not known, or differs from what the call returned at run time."""


class OpaqueFallbackWarning(UserWarning):
    """A call could not be traced and runs as one opaque operator; given once per callable and reason."""


class MetaWarning(UserWarning):
    """The metadata of an opaque call was found by running it on example values; a meta function avoids that."""


class TargetWarning(UserWarning):
    """A lazy target's module is imported and has no such name; given once, with the nearest names."""


class RegistrationWarning(UserWarning):
    """A rule was declared and never finished, so that it registers nothing: no forward provider was decorated."""


class TransformWarning(UserWarning):
    """A compiled program runs in eager PyTorch, because a transform of ``torch.func`` or forward-mode AD is active."""


class PluginWarning(UserWarning):
    """Something is left out, and the rest is not touched.

    A package's entry point for hookkit that failed, or a part of hookkit that does not fit the installed torch or
    thunder.
    """


_warned: dict[Any, int] = {}


def warn_at(place: Any, message: str, category: type[Warning]) -> None:
    """Warn of a place in the user's program, or in a rule's module.

    Args:
        place: a ``Source``, or None where it is not known.
        message: the warning.
        category: its class.
    """
    file, line = (place.file, place.line) if place is not None else ("<unknown>", 1)
    warnings.warn_explicit(message, category, file, line, registry=_warned)
