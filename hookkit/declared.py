"""Where a rule was declared, and whether two declarations are one that was run again.

A module is executed again by ``importlib.reload``, a cell of a notebook by its author, and a function that registers
rules by whoever calls it: an import, then an entry point.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import attrs

__all__ = ["Origin", "is_same_function"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@attrs.frozen(eq=False)
class Origin:
    """The statement that declared a rule.

    Attributes:
        module: the name of the module in which it stands.
        code: the code that ran: of the module, of the notebook's cell, or of a function.
        line: where in it.
        name: the qualified name of the forward provider; empty for one that is not named.
    """

    module: str
    code: types.CodeType
    line: int
    name: str

    def on(self, forward: Any) -> Origin:
        """The same with a forward provider."""
        return attrs.evolve(self, name=_name_of(forward))

    @classmethod
    def of(cls, frame: types.FrameType, forward: Any) -> Origin:
        """The statement that a frame executes, on a forward provider or None."""
        return cls(str(frame.f_globals.get("__name__")), frame.f_code, frame.f_lineno, _name_of(forward))

    def is_run_again(self, other: Origin) -> bool:
        """Whether another one is this statement in code that was compiled again: reloaded, or a cell run again."""
        if self.module != other.module or self.code is other.code:
            return False
        return self.name == other.name if self.name else self.line == other.line and not other.name

    def is_repeated(self, other: Origin) -> bool:
        """Whether another one is this very statement, executed a second time."""
        return self.code is other.code and self.line == other.line


def _name_of(function: Any) -> str:
    """The qualified name of a function; empty if that says nothing."""
    name = str(getattr(function, "__qualname__", ""))
    return "" if name.rpartition(".")[2] in ("", "_", "<lambda>") else name


def is_same_function(first: Any, second: Any) -> bool:
    """Whether two functions are made by one ``def``, and close over the same."""
    if first is second:
        return True
    if not (isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType)):
        return isinstance(first, _PLAIN) and type(first) is type(second) and first == second
    held = [(first.__defaults__, second.__defaults__), (_values(first.__kwdefaults__), _values(second.__kwdefaults__))]
    held.append((_cells(first), _cells(second)))
    return first.__code__ is second.__code__ and all(_are_same(a or (), b or ()) for a, b in held)


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_same_function, first, second))


def _values(defaults: dict[str, Any] | None) -> list[Any]:
    return list((defaults or {}).values())


def _cells(function: types.FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != types.CellType()]
