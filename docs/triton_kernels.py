"""Kernels of Triton for the contract and the tests, run on the CPU by Triton's interpreter.

Whether ``triton.jit`` makes interpreted kernels is decided by the environment when a kernel is made; these are
interpreted whatever it says, and whatever was imported before. Where Triton is not installed NumPy stands for it, and
``NAME`` says so.
"""

from __future__ import annotations

import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
NAME = "Triton" if HAS_TRITON else "Triton (which is not installed here: NumPy stands for it)"

if HAS_TRITON:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    def _scale(source, target, factor, count, BLOCK: tl.constexpr):
        places = tl.arange(0, BLOCK)
        inside = places < count
        tl.store(target + places, tl.load(source + places, mask=inside) * factor, mask=inside)

    _kernel = InterpretedFunction(_scale)


def _launch(source: torch.Tensor, target: torch.Tensor, factor: int) -> None:
    if HAS_TRITON:
        _kernel[(1,)](source, target, factor, source.numel(), BLOCK=16)
    else:
        target.numpy()[...] = source.numpy() * factor


def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
    """A new tensor, written by a kernel."""
    target = torch.empty_like(x)
    _launch(x.detach(), target.detach(), factor)
    return target


def scale_in_place(x: torch.Tensor, factor: int) -> torch.Tensor:
    """A tensor, overwritten by a kernel, which PyTorch does not see."""
    memory = x.detach().data
    _launch(memory, memory, factor)
    return x
