"""Patch: one thing of thunder's or torch's that hookkit replaces while it is enabled, and whether it fits.

Each module of the engine declares its own, in ``PATCHES``; ``hookkit/install.py`` installs them, each by itself. One
that does not fit the installed torch or thunder is left out and stands in `left_out`, where the engine finds it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import attrs
import torch

from hookkit.errors import HookError

__all__ = [
    "Installed",
    "LeftOut",
    "Misfit",
    "Patch",
    "around",
    "around_method",
    "left_out",
    "refuse_if_concerned",
    "replaced",
    "versions",
]

_MISSING = object()


class Misfit(Exception):
    """A patch does not fit what is installed; the text says what was found."""


@attrs.frozen
class Patch:
    """A replacement of one attribute, or of one entry of a dict.

    Attributes:
        target: what is replaced: ``"module:Qualified.name"``, or ``"module:table[key]"`` for an entry of a dict; with
            ``|`` between the names that it has had.
        replace: makes what takes its place from what is there.
        lost: what thunder does where the patch is left out, for people who wonder.
        takes: the names of the parameters of what is replaced, in each form that is known; None if it is no function.
        needed: whether nothing can be right without it.
        adds: whether there is nothing to replace: a thunder that has something there needs the patch no more.
        set_by: where an attribute of instances is added to their class: the method that must set it.
        optional: whether some versions of torch have no such thing, and do not need the patch.
        concerns: asked, where the patch is left out, about the trace of each program: whether it would be wrong.
        concerns_thunderfx: whether, where the patch is left out, what Dynamo makes of a custom Function may be wrong.
    """

    target: str
    replace: Callable[[Any], Any]
    lost: str
    takes: tuple[str, ...] | None = None
    needed: bool = False
    adds: bool = False
    set_by: str | None = None
    optional: bool = False
    concerns: Callable[[Any], bool] | None = None
    concerns_thunderfx: bool = False

    def locate(self) -> tuple[Any, str]:
        """What holds the target, and under which name or key.

        Raises:
            Misfit: if a module, or what holds the target in it, is not there.
        """
        module, _, name = self.target.partition(":")
        path, _, key = name[:-1].rpartition("[") if name.endswith("]") else name.rpartition(".")
        try:
            holder: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                holder = getattr(holder, part)
        except (ImportError, AttributeError) as error:
            raise Misfit(f"{self.target} is not there ({error})") from error
        names = key.split("|")
        return holder, next((name for name in names if _held(holder, name) is not _MISSING), names[0])

    def is_wanted(self) -> bool:
        """Whether there is something to do: a version may lack, or have, what makes the patch unnecessary.

        Raises:
            Misfit: if the target is not there, or is no longer what the patch was written for.
        """
        holder, key = self.locate()
        stock = _held(holder, key)
        if self.set_by is not None and key not in getattr(holder, self.set_by).__code__.co_names:
            raise Misfit(f"{self.target} is not set by {self.set_by}")
        if self.adds:
            return stock is _MISSING
        if stock is _MISSING:
            if self.optional:
                return False
            raise Misfit(f"{self.target} is not there")
        if self.takes is not None:
            found = _parameters(stock)
            if found not in self.takes:
                raise Misfit(f"{self.target} takes ({found}); expected ({' or '.join(self.takes)})")
        return True

    def install(self) -> Installed:
        """Put the replacement in place.

        Raises:
            Misfit: if it does not fit.
        """
        holder, key = self.locate()
        before = holder.get(key, _MISSING) if isinstance(holder, dict) else holder.__dict__.get(key, _MISSING)
        installed = Installed(self, holder, key, before)
        stock = _held(holder, key)  # which a class may inherit
        installed.put(self.replace(None if stock is _MISSING else stock))
        return installed

    def __str__(self) -> str:
        return self.target


@attrs.frozen
class Installed:
    """A patch that is in place.

    Attributes:
        patch: the patch.
        holder: the module, class or dict.
        key: the name or key in it.
        before: what was there.
    """

    patch: Patch
    holder: Any
    key: str
    before: Any

    def put(self, value: Any) -> None:
        """Put a value in place."""
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)

    def remove(self) -> None:
        """Put back what was there."""
        if self.before is not _MISSING:
            self.put(self.before)
        elif isinstance(self.holder, dict):
            self.holder.pop(self.key, None)
        else:
            delattr(self.holder, self.key)


@attrs.frozen
class LeftOut:
    """A patch that is not installed, and why."""

    patch: Patch
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; without the patch {self.patch.lost}"


left_out: list[LeftOut] = []
"""The patches that do not fit, while hookkit is enabled; as a rule there are none."""


def _held(holder: Any, key: str) -> Any:
    """What a holder has under a name: of a class, also what it inherits, but not from object."""
    if isinstance(holder, dict):
        return holder.get(key, _MISSING)
    found = getattr(holder, key, _MISSING)
    return _MISSING if isinstance(holder, type) and found is getattr(object, key, _MISSING) else found


def _parameters(function: Any) -> str:
    """The names of a function's parameters, as in ``"self, *args, **kwargs"``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        return f"what Python cannot tell: {error}"
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(stars.get(p.kind, "") + p.name for p in parameters)


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement of a function by one that takes, first, what it stands for."""
    return lambda stock: partial(function, stock)


def around_method(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement of a method by a function that takes the object, and then what it stands for."""
    return lambda stock: partialmethod(function, stock)


def versions() -> str:
    """The versions that are installed, in words."""
    return f"torch {torch.__version__} and lightning-thunder {importlib.metadata.version('lightning-thunder')}"


def refuse_if_concerned(trace: Any) -> None:
    """Refuse a program that would be wrong without a patch that is left out.

    Args:
        trace: the program's computation trace.

    Raises:
        HookError: if there is such a patch.
    """
    for left in left_out:
        if left.patch.concerns is not None and left.patch.concerns(trace):
            raise HookError(
                f"this program cannot be compiled right with {versions()}: {left}. Leave out of the program what "
                "concerns it, use versions that hookkit is known to work with (python -m hookkit lists what does not "
                "fit), or compile it with thunder alone, after hookkit.disable(), if thunder is right."
            )


def replaced(function: Any) -> Any:
    """What a function stands for that `around` has put in place: thunder's or torch's own."""
    while isinstance(function, partial):
        function = function.args[0]
    return function
