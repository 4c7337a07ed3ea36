"""What the shipped rules stand for, by name: a torch that lacks one of them has no calls of it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["both", "of_torch"]


def of_torch(*names: str) -> list[Any]:
    """What torch has of these names, such as ``"nn.functional.glu"``."""
    found = []
    for name in names:
        value: Any = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            found.append(value)
    return found


def both(*names: str) -> list[Any]:
    """The function of torch and the method of tensors of each name."""
    return [found for name in names for found in of_torch(name, f"Tensor.{name}")]
