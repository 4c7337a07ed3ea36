"""Compile time against the number of applications of one custom Function, each in one process and one run.

For n applications: the time to the first gradient of a custom Function under hookkit, of the same operations as a plain
function, of the custom Function under thunder's own lookaside (hookkit disabled), and of the custom Function under
``torch.compile(backend="aot_eager")``. Prints a table and, with ``--json FILE``, writes it. Times are those of this
thread on the processor.

Run as ``python benchmarks/bench_compile.py [--sizes 1,10,50,100,200] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import thunder
import torch

import hookkit


class Swish(torch.autograd.Function):
    """A small Function with a number on ctx and two saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        """Swish, with its sigmoid kept."""
        gate = torch.sigmoid(x * beta)
        ctx.save_for_backward(x, gate)
        ctx.beta = beta
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Its gradient."""
        x, gate = ctx.saved_tensors
        return grad * (gate + ctx.beta * x * gate * (1 - gate)), None


def plain(x: torch.Tensor, beta: float) -> torch.Tensor:
    """The same operations, which thunder differentiates."""
    return x * torch.sigmoid(x * beta)


def repeated(function: Callable[..., torch.Tensor], count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A program that applies a function again and again."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = function(x, 1.5)
        return x

    return program


def seconds(compiler: Callable[..., Any], function: Callable[..., torch.Tensor], count: int) -> float:
    """The time until the first gradient is there."""
    torch._dynamo.reset()
    x = torch.randn(4, 4, requires_grad=True)
    compiled = compiler(repeated(function, count))
    start = time.thread_time()
    compiled(x).sum().backward()
    return time.thread_time() - start


def aot_eager(program: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile without code generation."""
    return torch.compile(program, backend="aot_eager")


def stock(program: Callable[..., Any]) -> Callable[..., Any]:
    """``thunder.jit`` with thunder's own lookaside."""

    def compiled(x: torch.Tensor) -> Any:
        hookkit.disable()
        try:
            return thunder.jit(program)(x)
        finally:
            hookkit.enable()

    return compiled


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,10,50,100")
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways = {
        "custom": (thunder.jit, Swish.apply),
        "plain": (thunder.jit, plain),
        "stock": (stock, Swish.apply),
        "aot_eager": (aot_eager, Swish.apply),
    }
    for compiler, function in ways.values():
        seconds(compiler, function, 1)
    rows = []
    print(f"{'n':>4}  " + "  ".join(f"{name:>9}" for name in ways) + "  custom/plain  stock/custom")
    for count in map(int, options.sizes.split(",")):
        row = {name: seconds(compiler, function, count) for name, (compiler, function) in ways.items()}
        rows.append({"n": count, **row})
        times = "  ".join(f"{row[name]:>8.2f}s" for name in ways)
        print(f"{count:>4}  {times}  {row['custom'] / row['plain']:>12.2f}  {row['stock'] / row['custom']:>12.1f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
