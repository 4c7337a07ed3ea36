"""The forms in which a program writes one operation of torch: function, method, operator, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookkit.errors import RegistrationError
from hookkit.targets import describe_callable

__all__ = ["forms", "other_forms"]

# What Python calls for an operator on tensors. Reflected ones (2 - x) have their operands the other way round, and are
# forms of the operation only where it commutes.
_OPERATORS = {
    "abs": ["__abs__"],
    "absolute": ["__abs__"],
    "add": ["__add__", "__radd__"],
    "bitwise_and": ["__and__", "__rand__"],
    "bitwise_not": ["__invert__"],
    "bitwise_or": ["__or__", "__ror__"],
    "bitwise_xor": ["__xor__", "__rxor__"],
    "div": ["__truediv__"],
    "divide": ["__truediv__"],
    "eq": ["__eq__"],
    "floor_divide": ["__floordiv__"],
    "ge": ["__ge__"],
    "gt": ["__gt__"],
    "le": ["__le__"],
    "lt": ["__lt__"],
    "matmul": ["__matmul__"],
    "mul": ["__mul__", "__rmul__"],
    "multiply": ["__mul__", "__rmul__"],
    "ne": ["__ne__"],
    "neg": ["__neg__"],
    "negative": ["__neg__"],
    "pow": ["__pow__"],
    "remainder": ["__mod__"],
    "sub": ["__sub__"],
    "subtract": ["__sub__"],
    "true_divide": ["__truediv__"],
}
_NAMESPACES: tuple[Any, ...] = (torch, torch.Tensor, torch.special, torch.linalg)


def forms(operation: Callable[..., Any], *, in_place: bool = False) -> list[Callable[..., Any]]:
    """An operation of torch in all its forms, as the targets of a rule.

    ``hookkit.forms(torch.mul)`` is ``torch.mul``, the method ``x.mul``, and the operators ``x * y`` and ``2 * x``. A
    provider takes the first argument by position. An operator whose operands are the other way round, ``2 - x``, is no
    form of ``torch.sub``; nor are functions of other options, such as ``torch.nn.functional.relu``: list them beside.

    Args:
        operation: one of the forms, a function or method of torch.
        in_place: whether to include the forms that work in place: ``x.exp_()``, ``torch.exp_(x)``, ``x += y``.

    Returns:
        The forms that the installed torch has, the one given first.

    Raises:
        RegistrationError: if it is no operation of torch.

    Example:
        >>> import hookkit, torch
        >>> [form.__name__ for form in hookkit.forms(torch.mul)]
        ['mul', 'mul', '__mul__', '__rmul__']
    """
    name = getattr(operation, "__name__", "").rstrip("_")
    plain = next((n for n, methods in _OPERATORS.items() if getattr(operation, "__name__", "") in methods), name)
    found = _of_name(plain)
    in_place_found = [form for base in (f"{plain}_",) for form in _of_name(base)]
    in_place_found += [
        method
        for dunder in _OPERATORS.get(plain, ())
        if not dunder.startswith("__r") and (method := getattr(torch.Tensor, f"__i{dunder[2:]}", None)) is not None
    ]
    if not plain or all(operation is not form for form in (*found, *in_place_found)):
        raise RegistrationError(
            f"hookkit.forms({describe_callable(operation)}): this is no operation of torch that has other forms; give "
            "it as a target by itself"
        )
    chosen = [operation, *found, *(in_place_found if in_place else ())]
    return list({id(form): form for form in chosen}.values())


def _of_name(name: str) -> list[Callable[..., Any]]:
    names = [(space, name) for space in _NAMESPACES] + [(torch.Tensor, dunder) for dunder in _OPERATORS.get(name, ())]
    found = (getattr(space, n, None) for space, n in names)
    return [form for form in found if callable(form) and not isinstance(form, type)]


def other_forms(operation: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The forms of an operation beside the one given; none for what is no operation of torch."""
    try:
        return [form for form in forms(operation, in_place=True) if form is not operation]
    except RegistrationError:
        return []
