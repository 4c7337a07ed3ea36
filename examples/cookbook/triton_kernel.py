"""Kernels in Triton: one that returns a new tensor, and one that overwrites what it is given.

What it shows: an opaque rule with a meta function; ``writes``, which says what a kernel overwrites behind PyTorch's
back. On a machine without a GPU the kernels are run by Triton's interpreter. Triton is in the ``test`` extra.

Run it with ``python examples/cookbook/triton_kernel.py``.
"""

from __future__ import annotations

import os

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # read when triton is imported

import thunder
import triton
import triton.language as tl
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def swish_kernel(x_pointer, y_pointer, count, BLOCK: tl.constexpr):
    """y = x * sigmoid(x)"""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_pointer + places, mask=inside)
    tl.store(y_pointer + places, x / (1 + tl.exp(-x)), mask=inside)


@triton.jit
def gradient_kernel(x_pointer, grad_pointer, count, BLOCK: tl.constexpr):
    """Puts the gradient of swish where its argument was."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_pointer + places, mask=inside)
    gate = 1 / (1 + tl.exp(-x))
    grad = tl.load(grad_pointer + places, mask=inside)
    tl.store(x_pointer + places, grad * gate * (1 + x * (1 - gate)), mask=inside)


def launch(kernel, first: Tensor, second: Tensor) -> None:
    """Runs a kernel over all elements."""
    count = first.numel()
    kernel[(triton.cdiv(count, 64),)](first, second, count, BLOCK=64)


# ------------------------------------------------------------------------------- a kernel that returns a new tensor


def swish(x: Tensor) -> Tensor:
    """What programs call."""
    y = torch.empty_like(x)
    launch(swish_kernel, x.detach(), y.detach())
    return y


# The backward puts its result where the residual was: a copy of x, so nothing of the program's is overwritten.
@hookkit.rule(swish, mode="opaque", writes=())
def swish_rule(x: Tensor):
    return swish(x), hookkit.save(x=x.detach().clone())


@swish_rule.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    launch(gradient_kernel, saved.x, grad.contiguous())
    return {"x": saved.x}


@swish_rule.meta
def _(x: Tensor):
    return torch.empty_like(x)


# ------------------------------------------------------------------------- a kernel that overwrites what it is given


def swish_and_keep_gradient(x: Tensor, ones: Tensor) -> Tensor:
    """Like fused losses: the result is new, and the gradient is put into x, which nobody needs any more."""
    y = torch.empty_like(x)
    launch(swish_kernel, x.detach(), y.detach())
    launch(gradient_kernel, x.detach(), ones)
    return y


@hookkit.rule(swish_and_keep_gradient, mode="opaque", writes=["x"])
def lean_rule(x: Tensor, ones: Tensor):
    return swish_and_keep_gradient(x, ones), hookkit.save(slope=x.detach())


@lean_rule.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    return {"x": grad * saved.slope}


@lean_rule.meta
def _(x: Tensor, ones: Tensor):
    return torch.empty_like(x)


def main() -> None:
    """Compares both with PyTorch's own swish."""
    torch.manual_seed(0)
    x = torch.randn(5, 40, device=DEVICE, requires_grad=True)
    weights = torch.rand_like(x)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(2 * x), x, weights)
    ones = torch.ones_like(x)
    for program in (lambda x: swish(2 * x), lambda x: swish_and_keep_gradient(2 * x, ones)):
        jitted = thunder.jit(program)
        output = jitted(x)
        (gradient,) = torch.autograd.grad(output, x, weights)
        torch.testing.assert_close(output, torch.nn.functional.silu(2 * x))
        torch.testing.assert_close(gradient, expected)
        print(hookkit.report(jitted))


if __name__ == "__main__":
    main()
