"""``functools.partial`` of a tensor: thunder, which sees C code that is given one, takes it for an operation.

Delete this when ``general_jit_lookaside`` in thunder/core/jit_ext.py knows the module of ``functools.partial.__new__``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.values.wrapping import unwrap_arguments, wrap_result
from hookkit.mends.mend import Mend

__all__ = ["MENDS", "partial_lookaside"]


def partial_lookaside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What makes a partial in the place of ``functools.partial.__new__``."""
    of_partial = getattr(function, "__self__", None) is functools.partial
    makes_one = of_partial and getattr(function, "__name__", None) == "__new__"
    return _make if makes_one else None


def _make(cls: Any, *args: Any, **kwargs: Any) -> Any:
    given, named = unwrap_arguments(args, kwargs)
    return wrap_result(cls.value(*given, **named), cls, *args, *kwargs.values())


MENDS = [
    Mend(
        "a partial of a tensor",
        "Making a `functools.partial` of a tensor is taken for an operation on it.",
        program="""
import functools

print(thunder.jit(lambda x: functools.partial(torch.add, x)(x))(torch.ones(1)).tolist())
""",
        stock="KeyError: None",
        eager="[2.0]",
        extension=Extension(after_rules=partial_lookaside),
    )
]
