"""Regions: compile time and step of Functions of different make-up, and of a transformer.

Measured is the time until the first gradient is there, of n applications of one Function: as a region, traced, as
plain functions, under thunder's own lookaside (hookkit disabled), and under ``torch.compile(backend="aot_eager")``;
then the step of the region against the traced one; then a transformer of blocks, declared as a region and plain.

Run as ``python benchmarks/bench_region.py [--sizes 100,400] [--blocks 48] [--only NAME,...] [--json FILE]``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import thunder
import torch
from bench_compile import (
    Attention,
    Linear,
    Normalise,
    Swish,
    aot_eager,
    plain_attention,
    plain_linear,
    plain_normalise,
    plain_swish,
    stock,
)
from measuring import begin, fastest, seconds, table, write
from torch.autograd import Function

import hookkit

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Gate(Function):
    """``x * sigmoid(x)``, whose backward computes the sigmoid again by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The gated input."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Its gradient."""
        (x,) = ctx.saved_tensors
        gate = 1 / (1 + torch.exp(-x))
        return grad * (gate + x * gate * (1 - gate))


WEIGHT = torch.randn(8, 8) / 8
# Each with the same operations in a plain function, and what it is given beside the input.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "gate": (Gate.apply, lambda x: x * torch.sigmoid(x), ()),
    "swish": (Swish.apply, plain_swish, (1.5,)),
    "linear": (Linear.apply, plain_linear, (WEIGHT,)),
    "normalise": (Normalise.apply, plain_normalise, (torch.ones(8),)),
    "attention": (lambda x: Attention.apply(x, x, x), lambda x: plain_attention(x, x, x), ()),
}


def repeated(function: Callable[..., Any], given: tuple[Any, ...], count: int) -> Callable[[torch.Tensor], Any]:
    """A program that applies a function again and again."""

    def program(x: torch.Tensor) -> Any:
        for _ in range(count):
            x = function(x, *given)
        return x

    return program


def compiled_in(mode: Any) -> Compiler:
    """``thunder.jit``, the calls of a program being taken over in a mode."""

    def compiler(program: Callable[..., Any]) -> Callable[..., Any]:
        jitted = thunder.jit(program)

        def compiled(x: torch.Tensor) -> Any:
            with hookkit.use(mode=mode):
                return jitted(x)

        return compiled

    return compiler


def until_gradient(
    compiler: Compiler, program: Callable[..., Any], x: torch.Tensor
) -> tuple[float, Callable[..., Any]]:
    """The time until the first gradient is there, and the compiled program."""
    torch._dynamo.reset()
    gc.collect()
    compiled = compiler(program)
    return seconds(lambda: compiled(x).sum().backward()), compiled


def compile_times(name: str, count: int, largest: int) -> dict[str, Any]:
    """Compile times of one Function in the ways that there are, and the ratios that matter."""
    custom, plain, given = FUNCTIONS[name]
    x = torch.randn(2, 4, 8, requires_grad=True)
    ways = {
        "region": (compiled_in("region"), custom),
        "traced": (compiled_in("trace"), custom),
        "plain": (thunder.jit, plain),
        "stock": (stock, custom),
        "aot_eager": (aot_eager, custom),
    }
    found = {way: until_gradient(c, repeated(f, given, count), x) for way, (c, f) in ways.items()}
    times = {way: spent for way, (spent, _) in found.items()}
    larger, _ = until_gradient(compiled_in("region"), repeated(custom, given, largest), x)
    region, traced = (lambda way=way: found[way][1](x).sum().backward() for way in ("region", "traced"))
    steps = fastest(region, traced, rounds=30)
    return {
        "function": name,
        "n": count,
        **times,
        "region/plain": times["region"] / times["plain"],
        "aot_eager/region": times["aot_eager"] / times["region"],
        "stock/region": times["stock"] / times["region"],
        f"n={largest}/n={count}": larger / times["region"],
        "step region/traced": steps[0] / steps[1],
    }


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then two layers, each added to what came in."""
        q, k, v = self.mix(self.first(x)).chunk(3, -1)
        x = x + self.out(plain_attention(q, k, v))
        return x + self.down(Swish.apply(self.up(self.second(x)), 1.5))


class RegionBlock(Block):
    """The same, declared as a region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return Block.forward(self, x)


hookkit.region(RegionBlock)


def transformer(blocks: int) -> dict[str, Any]:
    """Compile times, steps and bytes of a model of blocks, as regions and plain."""
    x = torch.randn(2, 4, 8, requires_grad=True)
    models = {kind: torch.nn.Sequential(*(cls() for _ in range(blocks))) for kind, cls in _KINDS.items()}
    found = {kind: until_gradient(thunder.jit, model, x) for kind, model in models.items()}
    eager, _ = until_gradient(aot_eager, models["plain"], x)
    region, plain = (lambda kind=kind: found[kind][1](x).sum().backward() for kind in ("region", "plain"))
    steps = fastest(region, plain, rounds=20)
    kept = {kind: hookkit.report(jitted).saved_bytes for kind, (_, jitted) in found.items()}
    return {
        "blocks": blocks,
        **{kind: spent for kind, (spent, _) in found.items()},
        "aot_eager": eager,
        "region/plain": found["region"][0] / found["plain"][0],
        "step region/plain": steps[0] / steps[1],
        "bytes region/plain": kept["region"] / kept["plain"],
    }


_KINDS: dict[str, type[Block]] = {"region": RegionBlock, "plain": Block}


def main() -> None:
    """Measure, print, write."""
    options = begin(__doc__, sizes="100,400", blocks="48", only=",".join(FUNCTIONS))
    for _ in range(2):
        compile_times("gate", 1, 2)
    count, largest = map(int, options.sizes.split(","))
    rows = [compile_times(name, count, largest) for name in options.only.split(",") if name]
    if rows:
        table("one Function, seconds", rows)
    models = [transformer(int(n)) for n in options.blocks.split(",") if n]
    if models:
        table("transformer blocks, seconds", models)
    write(options.json, {"functions": rows, "transformer": models})


if __name__ == "__main__":
    main()
