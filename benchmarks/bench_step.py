"""Run time of a step and bytes kept for the backward: Functions traced and opaque, against eager and stock thunder.

Each program applies its Function many times to a small tensor. The cost of a call, forward and backward, is how much
longer a step of 150 calls takes than one of 50; beside it stands the whole step of 50 calls, with what thunder adds to
each step. Steps of all programs alternate in one run.

The bytes are those of the storages that PyTorch keeps between forward and backward (each once, the input not among
them): by ``saved_tensors_hooks`` in eager, by what the compiled forward returns for the backward under thunder.

Run as ``python benchmarks/bench_step.py [--rounds 150] [--json FILE]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import thunder
import torch
from measuring import begin, fastest, table, write

import hookkit

SHORT, LONG = 50, 150


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


Program = Callable[[torch.Tensor], torch.Tensor]


def program(function: Callable[..., torch.Tensor], calls: int) -> Program:
    """A program of many calls."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            x = function(x)
        return x

    return step


def without_decision(program: Program, x: torch.Tensor, *, by_stock: bool = False) -> Program:
    """A program compiled by thunder, without its cache decision, which would compile anew what stock has compiled.

    Args:
        program: the program.
        x: its input.
        by_stock: whether it is compiled with hookkit disabled.
    """
    if by_stock:
        hookkit.disable()
    try:
        jitted = thunder.jit(program)
        jitted(x).sum().backward()
    finally:
        hookkit.enable()
    entry = thunder.compile_stats(jitted).interpreter_cache[-1]

    def step(x: torch.Tensor) -> torch.Tensor:
        data, (saved, others) = entry.computation_fn(x)
        thunder.connect_to_autograd(
            backward_fn=entry.backward_fn,
            flat_args=data["flat_args"],
            flat_output=data["flat_output"],
            saved_tensors=saved,
            saved_other=others,
            return_none_instead_of_grads=entry.return_none_instead_of_grads,
            disable_split_autograd=False,
            is_differentiable_outputs=None,
        )
        return data["flat_output"][0]  # type: ignore[no-any-return]

    return step


def steps(programs: dict[str, tuple[Program, Program]], x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """The cost of a call and of a step, for each program, given short and long."""

    def work(step: Program) -> Callable[[], object]:
        return lambda: step(x).sum().backward()

    works = [work(step) for pair in programs.values() for step in pair]
    fastest(*works, rounds=5)
    times = iter(fastest(*works, rounds=rounds))
    rows: list[dict[str, Any]] = []
    for name, short, long in zip(programs, times, times, strict=True):
        rows.append({"program": name, "us/call": 1e6 * (long - short) / (LONG - SHORT), "us/step": 1e6 * short})
    for row in rows:
        row["call/eager"], row["step/eager"] = (row[k] / rows[0][k] for k in ("us/call", "us/step"))
    return rows


def size(tensors: Iterable[Any], x: torch.Tensor) -> int:
    """The bytes of the storages of tensors, each once, but for that of the input."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
    storages.pop(x.untyped_storage()._cdata, None)
    return sum(storages.values())


def bytes_kept(function: Any, x: torch.Tensor) -> dict[str, Any]:
    """What is kept between forward and backward."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    eager = program(function.apply, SHORT)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = eager(x)
    in_eager = size(kept, x)
    output.sum().backward()
    jitted = thunder.jit(eager)
    jitted(x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        kept.clear()
        entry = thunder.compile_stats(jitted).interpreter_cache[-1]
        _, (saved, _) = entry.computation_fn(x)
        compiled = size([*kept, *saved], x)
    return {
        "Function": function.__name__,
        "eager": in_eager,
        "compiled": compiled,
        "compiled/eager": compiled / in_eager,
    }


def main() -> None:
    """Measure, print, write."""
    options = begin(__doc__, rounds="150")
    x, rounds = torch.randn(16, 16, requires_grad=True), int(options.rounds)

    def both(make: Callable[[Program], Program], function: Any) -> tuple[Program, Program]:
        short, long = (make(program(function.apply, calls)) for calls in (SHORT, LONG))
        return short, long

    by_stock = steps(
        {
            "eager": both(lambda p: p, Traced),
            "traced": both(lambda p: without_decision(p, x), Traced),
            "stock": both(lambda p: without_decision(p, x, by_stock=True), Traced),
        },
        x,
        rounds,
    )
    for row in by_stock:
        row["step/stock"] = row["us/step"] / by_stock[-1]["us/step"]
    table("a Function that is traced, without thunder's cache decision", by_stock)
    opaque = steps(
        {
            "eager": both(lambda p: p, Opaque),
            "opaque": both(thunder.jit, Opaque),
        },
        x,
        rounds,
    )
    table("a Function that is opaque", opaque)
    kept = [bytes_kept(function, x) for function in (Traced, Opaque)]
    table(f"bytes kept for the backward of {SHORT} calls", kept)
    write(options.json, {"traced": by_stock, "opaque": opaque, "bytes": kept})


if __name__ == "__main__":
    main()
