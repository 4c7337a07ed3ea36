"""Compile time: custom Functions under hookkit, against the same operations as plain functions, stock, and aot_eager.

First one Function applied n times, then a model of transformer blocks with four custom Functions each. Measured is the
time until the first gradient is there: of the custom Functions under hookkit, of the same operations in plain Python
functions, of the custom Functions under thunder's own lookaside (hookkit disabled), and under
``torch.compile(backend="aot_eager")``; all in one process, one after the other.

Run as ``python benchmarks/bench_compile.py [--sizes 1,10,50,100,200] [--blocks 12,48] [--json FILE]``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import thunder
import torch
from measuring import begin, seconds, table, write
from torch.autograd import Function

import hookkit

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Swish(Function):
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


class Linear(Function):
    """A matrix product with the gradient of both factors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both gradients."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Normalise(Function):
    """Root mean square normalisation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The rows over their root mean square, scaled."""
        inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, scale, inverse)
        return x * inverse * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both gradients."""
        x, scale, inverse = ctx.saved_tensors
        scaled = grad * scale
        inner = (scaled * x).mean(-1, keepdim=True)
        return inverse * (scaled - x * inverse * inverse * inner), (grad * x * inverse).sum((0, 1))


class Attention(Function):
    """Softmax attention of one head."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Weighted values."""
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of queries, keys and values."""
        q, k, v, weights = ctx.saved_tensors
        of_weights = grad @ v.transpose(-1, -2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def plain_swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    """The operations of :class:`Swish`."""
    return x * torch.sigmoid(x * beta)


def plain_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The operations of :class:`Linear`."""
    return x @ weight.t()


def plain_normalise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The operations of :class:`Normalise`."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The operations of :class:`Attention`."""
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


CUSTOM = (Swish.apply, Linear.apply, Normalise.apply, Attention.apply)
PLAIN = (plain_swish, plain_linear, plain_normalise, plain_attention)


class Block(torch.nn.Module):
    """A transformer block of four functions, custom or plain."""

    def __init__(self, functions: tuple[Callable[..., torch.Tensor], ...], width: int = 8) -> None:
        super().__init__()
        self.swish, self.linear, self.normalise, self.attention = functions
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.weights = torch.nn.Parameter(torch.randn(5, width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then a layer of swish, each added to what came in."""
        y = self.normalise(x, self.scale)
        q, k, v = (self.linear(y, self.weights[i]) for i in range(3))
        x = x + self.attention(q, k, v)
        return x + self.linear(self.swish(self.linear(x, self.weights[3]), 1.5), self.weights[4])


def repeated(function: Callable[..., torch.Tensor], count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A program that applies a function again and again."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = function(x, 1.5)
        return x

    return program


def until_gradient(compiler: Compiler, program: Callable[..., Any], x: torch.Tensor) -> float:
    """The time until the first gradient is there."""
    torch._dynamo.reset()
    gc.collect()
    compiled = compiler(program)
    return seconds(lambda: compiled(x).sum().backward())


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


def applications(count: int) -> dict[str, float]:
    """Compile times of n applications of one Function."""
    x = torch.randn(4, 4, requires_grad=True)
    ways: dict[str, tuple[Compiler, Callable[..., torch.Tensor]]] = {
        "custom": (thunder.jit, Swish.apply),
        "plain": (thunder.jit, plain_swish),
        "stock": (stock, Swish.apply),
        "aot_eager": (aot_eager, Swish.apply),
    }
    return {name: until_gradient(c, repeated(f, count), x) for name, (c, f) in ways.items()}


def transformer(blocks: int) -> dict[str, float]:
    """Compile times of a model of blocks."""
    x = torch.randn(2, 4, 8, requires_grad=True)

    def model(functions: tuple[Callable[..., torch.Tensor], ...]) -> torch.nn.Module:
        return torch.nn.Sequential(*(Block(functions) for _ in range(blocks)))

    ways: dict[str, tuple[Compiler, torch.nn.Module]] = {
        "custom": (thunder.jit, model(CUSTOM)),
        "plain": (thunder.jit, model(PLAIN)),
        "stock": (stock, model(CUSTOM)),
        "aot_eager": (aot_eager, model(CUSTOM)),
    }
    return {name: until_gradient(compiler, program, x) for name, (compiler, program) in ways.items()}


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Times in seconds, and what they are to one another."""
    custom = times["custom"]
    return {
        **times,
        "custom/plain": custom / times["plain"],
        "stock/custom": times["stock"] / custom,
        "aot_eager/custom": times["aot_eager"] / custom,
    }


def main() -> None:
    """Measure, print, write."""
    options = begin(__doc__, sizes="1,10,50,100,200", blocks="12,48")
    for _ in range(2):
        applications(1)
    sizes = [int(n) for n in options.sizes.split(",") if n]
    by_size = [{"n": n, **(row := ratios(applications(n))), "custom/n": row["custom"] / n} for n in sizes]
    table("applications of one Function, seconds", by_size)
    by_blocks = [{"blocks": n, **ratios(transformer(n))} for n in map(int, filter(None, options.blocks.split(",")))]
    if by_blocks:
        table("transformer blocks with four Functions each, seconds", by_blocks)
    write(options.json, {"applications": by_size, "transformer": by_blocks})


if __name__ == "__main__":
    main()
