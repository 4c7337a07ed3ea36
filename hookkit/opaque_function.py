"""A function that is one operator wherever a program that thunder compiles calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hookkit.errors import RegistrationError

__all__ = ["opaque", "run_opaque"]

P = ParamSpec("P")
R = TypeVar("R")


def opaque(function: Callable[P, R], /) -> Callable[P, R]:
    """Make a function one operator: PyTorch runs it, and differentiates what it does with tensors.

    In one line, ``fast = hookkit.opaque(fast)`` or as a decorator, for what thunder cannot trace: branches on values,
    ``.item()``, NumPy, a compiled kernel. In a program that thunder compiles a call is one operator of the trace; the
    tensors that the function closes over, and the parameters of a module whose method it is, get their gradients, too.
    In eager PyTorch, and to Dynamo, which ``thunderfx`` runs first, it is the function itself.

    The shapes and dtypes of what it returns must not depend on the values of tensors. They are found when the program
    is traced, by running it on tensors without data, else on example values. Where that cannot be,
    ``hookkit.rule(function, mode="opaque")`` on the function returned here takes a meta function.

    Args:
        function: a function, a method, a module, or another callable.

    Returns:
        A function with the same signature.

    Raises:
        RegistrationError: if it is no function.

    Example:
        >>> import hookkit, thunder, torch
        >>> @hookkit.opaque
        ... def rectified(x):
        ...     return x * 2 if x.sum() > 0 else x.clone()
        >>> x = torch.ones(2, requires_grad=True)
        >>> (grad,) = torch.autograd.grad(thunder.jit(lambda x: rectified(x) * 3)(x).sum(), x)
        >>> grad
        tensor([6., 6.])
    """
    if not callable(function) or isinstance(function, type):
        raise RegistrationError(f"hookkit.opaque takes a function, a method or a module, got {function!r}")

    # the attributes of a module are no attributes of a function
    @functools.wraps(function, updated=())
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_opaque(function, *args, **kwargs)  # type: ignore[no-any-return]

    return operator


def run_opaque(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; a rule that ships (``hookkit/rules/opaque_functions.py``) stands for this."""
    return function(*args, **kwargs)


run_opaque.calls_its_argument = True  # type: ignore[attr-defined]  # hookkit.Call names the call after that
