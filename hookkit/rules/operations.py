"""Operations of torch that thunder lacks, or lacks in the form in which a program calls them: PyTorch runs them.

``torch.linspace``, ``x.mH``, ``torch.special.bessel_j0``, ``torch.zeros_like(x, requires_grad=True)``: functions,
methods and attributes of tensors. Each becomes one operator with PyTorch's own gradient.
"""

from __future__ import annotations

import hookkit
from hookkit.rules._names import of_torch

__all__ = ["script_function", "unsupported_operations"]


def is_unsupported(call: hookkit.Call) -> bool:
    """Whether thunder has no such operation, or not in the form of the call."""
    return call.unsupported is not None


unsupported_operations = hookkit.rule(
    hookkit.where(is_unsupported), mode="opaque", priority=-200, name="unsupported_operations"
)


def is_scripted(call: hookkit.Call) -> bool:
    """Whether a function of ``torch.jit`` is called, which thunder cannot look into."""
    return isinstance(call.callable, tuple(of_torch("jit.ScriptFunction")))


script_function = hookkit.rule(hookkit.where(is_scripted), mode="opaque", priority=-150, name="script_function")
