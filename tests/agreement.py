"""The one comparison of a compiled program with the eager one, hookkit's own, in the forms in which tests need it."""

from collections.abc import Callable
from typing import Any

import hookkit.testing
from hookkit.comparison import Observation, difference_between, observe, structure_of, tensors_of

__all__ = ["assert_agrees", "assert_same", "run", "structure_of", "tensors_of"]


def run(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Observation:
    """What a program gives, on inputs of its own."""
    return observe(function, inputs)


def assert_same(found: Observation, expected: Observation) -> None:
    """Two runs gave the same output, the same gradients, and the same inputs afterwards."""
    assert difference_between(expected, found) is None, difference_between(expected, found)


def assert_agrees(function: Callable[..., Any], *inputs: Any, eager: Callable[..., Any] | None = None) -> Any:
    """One call of a program that is compiled agrees with it, or with another one, run eagerly.

    Returns the compiled program.
    """
    return hookkit.testing.assert_same(function, *inputs, reference=eager, calls=1)
