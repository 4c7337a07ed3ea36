"""Operations of torch that thunder lacks, or lacks in the form in which a program calls them: PyTorch runs them.

``torch.linspace``, ``x.mH``, ``torch.special.bessel_j0``, ``torch.zeros_like(x, requires_grad=True)``: functions,
methods and attributes of tensors. Each becomes one operator with PyTorch's own gradient.
"""

from __future__ import annotations

import hookkit

__all__ = ["operations"]


def is_unsupported(call: hookkit.Call) -> bool:
    """Whether thunder would refuse the call."""
    return call.unsupported is not None


operations = hookkit.rule(hookkit.where(is_unsupported), mode="opaque", priority=-200)
