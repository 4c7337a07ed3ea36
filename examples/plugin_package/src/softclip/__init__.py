"""An operation that leaves small values as they are and bends large ones towards a bound."""

import torch

__all__ = ["softclip"]


def softclip(x: torch.Tensor, bound: float = 1.0) -> torch.Tensor:
    """``bound * tanh(x / bound)``."""
    return bound * torch.tanh(x / bound)
