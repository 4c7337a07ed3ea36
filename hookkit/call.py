"""Call: one interpreted call that rules are asked about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Call", "Source", "bind_arguments"]


@attrs.frozen
class Source:
    """A place in a user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@attrs.define(eq=False)
class Call:
    """One call in a program that is being compiled.

    A rule registered with ``pass_call=True`` gets it as the first argument of its providers, and every predicate
    target (:func:`hookkit.where`) gets it as its only argument.

    Attributes:
        callable: what the program called.
        function: the ``torch.autograd.Function`` subclass whose ``apply`` was called, or None.
        args: the positional arguments, tensors as thunder's proxies.
        kwargs: the keyword arguments.
        needs: for each positional argument, whether it is a tensor that needs a gradient.
        source: where in the user's program the call stands, or None if that is not known.
    """

    callable: Callable[..., Any]
    function: type[Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: tuple[bool, ...] = ()
    source: Source | None = None

    @property
    def name(self) -> str:
        """The name of what is called, as people write it."""
        if self.function is not None:
            return self.function.__name__
        return str(getattr(self.callable, "__name__", None) or type(self.callable).__name__)

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.name}(){where}"


def bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The positional arguments with which a function would run, defaults and keywords put in their places.

    Providers can call it in a traced program, where ``inspect`` would be slow.

    Args:
        function: the function whose signature counts.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The arguments, in the order of the parameters.

    Raises:
        TypeError: as Python does, if the arguments do not fit.

    Example:
        >>> bind_arguments(lambda a, b=2: None, (1,), {})
        (1, 2)
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args
