"""Modes: whether a call is traced, opaque, or either, where its rule leaves that open.

A rule with ``mode="auto"`` leaves it open. A mode can then be declared for one Function, for what is traced inside a
``with`` block, or for the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, get_args

import attrs
import torch

from hookkit.errors import RegistrationError

__all__ = ["Mode", "ModeInForce", "RuleMode", "check_mode", "fingerprint", "mode", "mode_in_force", "scope"]

Mode = Literal["auto", "trace", "opaque", "region"]
RuleMode = Literal["auto", "trace", "opaque", "region", "inline"]
MODES = get_args(Mode)
FunctionClass = TypeVar("FunctionClass", bound=type[Any])
VARIABLE = "HOOKKIT_MODE"

_of_functions: weakref.WeakKeyDictionary[type[Any], Mode] = weakref.WeakKeyDictionary()
_serials = itertools.count(1)
_declarations = 0
_scope: ContextVar[Mode | None] = ContextVar("hookkit_mode", default=None)


@attrs.frozen
class ModeInForce:
    """A mode, and who says so, for messages."""

    mode: RuleMode
    said_by: str


def check_mode(value: Any, *others: str) -> None:
    """Refuse what is no mode, and none of the others that are allowed here.

    Raises:
        RegistrationError: if it is none.
    """
    allowed = (*MODES, *others)
    if value not in allowed:
        raise RegistrationError(f"mode={value!r}; expected one of {', '.join(allowed)}")


def mode(value: Mode) -> Callable[[FunctionClass], FunctionClass]:
    """Declare how calls of a ``torch.autograd.Function`` are taken over: traced, opaque, either, or as a region.

    It counts for the class and its subclasses, under every rule with ``mode="auto"``, the shipped ones included, and
    wins over ``hookkit.use(mode=...)`` and the environment variable ``HOOKKIT_MODE``. Programs that were compiled
    before are compiled anew.

    Args:
        value: ``"trace"``: a call that cannot be traced is an :class:`hookkit.UntraceableError`; ``"opaque"``: tracing
            is not tried; ``"auto"``: what cannot be traced is opaque; ``"region"``: the same, and what can be traced is
            compiled by itself, once for all calls that are alike, see :func:`hookkit.region`.

    Returns:
        A decorator for the class. For somebody else's class call it, ``hookkit.mode("trace")(TheirFunction)``.

    Raises:
        RegistrationError: if the mode is none, or what is decorated is no subclass of ``torch.autograd.Function``.

    Example:
        >>> import hookkit, torch
        >>> @hookkit.mode("trace")
        ... class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2
    """
    check_mode(value)

    def declare(function: FunctionClass) -> FunctionClass:
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            raise RegistrationError(
                f"hookkit.mode({value!r}) is for subclasses of torch.autograd.Function, got {function!r}; for other "
                "callables declare a rule: hookkit.rule(target, mode=...)"
            )
        global _declarations
        _of_functions[function] = value
        _declarations = next(_serials)
        return function

    return declare


@contextlib.contextmanager
def scope(value: Mode | None) -> Iterator[None]:
    """Have a mode in force for what is traced in the block; None leaves it as it is."""
    if value is None:
        yield
        return
    check_mode(value)
    token = _scope.set(value)
    try:
        yield
    finally:
        _scope.reset(token)


def mode_in_force(function: type[Any] | None) -> ModeInForce:
    """The mode of a call whose rule has ``mode="auto"``.

    Args:
        function: the autograd Function that is applied, if one is.

    Raises:
        RegistrationError: if the environment variable holds no mode.
    """
    for base in function.__mro__ if function is not None else ():
        if base in _of_functions:
            return ModeInForce(_of_functions[base], f"hookkit.mode on {base.__qualname__}")
    scoped = _scope.get()
    if scoped is not None:
        return ModeInForce(scoped, "hookkit.use(mode=...)")
    value = os.environ.get(VARIABLE, "auto")
    if value not in MODES:
        raise RegistrationError(
            f'the environment variable {VARIABLE}={value!r}; expected "auto", "trace", "opaque" or "region"'
        )
    return ModeInForce(value, f"the environment variable {VARIABLE}")  # type: ignore[arg-type]


def fingerprint() -> str:
    """A string that differs between contexts in which the mode of some call may differ."""
    return f"{_scope.get() or os.environ.get(VARIABLE, 'auto')}:{_declarations}"
