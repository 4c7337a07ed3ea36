"""The rules that ship with hookkit; each file is what a user could have written."""

from hookkit.rules import (
    autograd_function,
    autograd_function_apply,
    checkpoint,
    custom_operators,
    higher_order,
    opaque_functions,
    operations,
    refusals,
    transforms,
)

__all__ = [
    "autograd_function",
    "autograd_function_apply",
    "checkpoint",
    "custom_operators",
    "higher_order",
    "opaque_functions",
    "operations",
    "refusals",
    "transforms",
]
