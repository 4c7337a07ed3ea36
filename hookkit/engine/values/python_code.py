"""Functions of Python's as the engine looks into them: whose code it is, which names it uses, what it closes over."""

from __future__ import annotations

from types import CellType, CodeType
from typing import Any

__all__ = ["contents", "is_own", "names_in"]

# Packages whose functions use no tensors, and change no state, of a program's but what they are given or close over.
_FOREIGN = ("torch", "thunder", "numpy", "hookkit", "builtins", "typing", "functools", "math", "collections")


def is_own(module: Any) -> bool:
    """Whether a module, by its name, is the program's: one without a name is, too."""
    return not (isinstance(module, str) and module.partition(".")[0] in _FOREIGN)


def names_in(code: CodeType) -> set[str]:
    """The names of globals, and of attributes, that code uses, functions in it included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def contents(cell: CellType, empty: Any = None) -> Any:
    """What a cell of a closure holds; ``empty`` where it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
