"""Run time of a step: a Function traced and a Function opaque, against eager PyTorch, forward and backward.

Each program applies its Function many times to a small tensor, so that what is measured is the cost of a call. Eager
and compiled steps alternate in one run; the figures are medians of the time of this thread on the processor.

Run as ``python benchmarks/bench_step.py``.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import thunder
import torch

import hookkit  # noqa: F401 (enables the rules)

CALLS = 50
STEPS = 200


class Traced(torch.autograd.Function):
    """A Function that thunder can trace."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sine."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Cosine."""
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Opaque(torch.autograd.Function):
    """The same through NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sine, by NumPy's memory."""
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy()).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Cosine."""
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def program(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A program of many calls."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            x = function(x)
        return x

    return step


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(16, 16, requires_grad=True)

    def microseconds(step: Callable[..., torch.Tensor]) -> float:
        start = time.thread_time()
        step(x).sum().backward()
        return (time.thread_time() - start) / CALLS * 1e6

    for function in (Traced, Opaque):
        eager, jitted = program(function.apply), thunder.jit(program(function.apply))
        for _ in range(5):
            microseconds(eager), microseconds(jitted)
        pairs = [(microseconds(eager), microseconds(jitted)) for _ in range(STEPS)]
        by_eager, by_jit = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{function.__name__:<7} per call, forward and backward: eager {by_eager:.1f} us, compiled {by_jit:.1f} "
            f"us, ratio {by_jit / by_eager:.2f}"
        )


if __name__ == "__main__":
    main()
