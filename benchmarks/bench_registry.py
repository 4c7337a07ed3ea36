"""What rules cost that do not match: tracing with 1,000 of them, and the cache decision of each call.

Prints the time to trace a program that matches no rule, with no rule beyond the shipped ones and with 1,000 rules of
all kinds, and the time of one call of a compiled program with and without hookkit. Traces are timed in turn, and the
medians of the ratios of neighbours count, so that a machine that others use disturbs both sides alike.

Run as ``python benchmarks/bench_registry.py``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import thunder
import torch

import hookkit

RULES = 1000
ROUNDS = 15
STEPS = 400


class Layer(torch.nn.Module):
    """Something of everything that a program does between tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.scales = [0.5, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A few operations, containers, and Python functions."""
        for i, scale in enumerate(self.scales):
            x = torch.nn.functional.gelu(self.linear(x)) * scale + math.sqrt(i + 1)
        values = {"x": x, "total": x.sum()}
        return values["x"] * values["total"]


def declare_rules(count: int) -> list[hookkit.Rule]:
    """Rules of all kinds, in equal parts: callables, Functions, lazy names, predicates."""
    rules = []
    for i in range(count // 4):

        def operation(x):
            return x

        function = type(f"Unused{i}", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: x)})
        predicate = hookkit.where(lambda call, name=f"unused_{i}": call.name == name)
        for target in (operation, function, f"not.imported:operation_{i}", predicate):
            rules.append(hookkit.rule(target, mode="opaque"))
    return rules


def seconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def trace() -> None:
    """Traces the program: all that the rules take part in."""
    hookkit.explain(Layer(), torch.ones(4, 32))


def compare_tracing() -> None:
    """Prints what the rules add to tracing."""
    start = time.perf_counter()
    rules = declare_rules(RULES)
    print(f"registering {RULES} rules: {1e6 * (time.perf_counter() - start) / RULES:.0f} us each")
    trace()
    ratios, without = [], []
    for _ in range(ROUNDS):
        # The order alternates within a round, so that a machine that becomes slower does not look like a cost.
        with hookkit.use(without=rules):
            before = seconds(trace)
        among = seconds(trace) + seconds(trace)
        with hookkit.use(without=rules):
            after = seconds(trace)
        ratios.append(among / (before + after))
        without.append((before + after) / 2)
    print(
        f"tracing a program that matches none: {1e3 * statistics.median(without):.1f} ms, "
        f"{100 * (statistics.median(ratios) - 1):+.2f}% with {RULES} rules"
    )
    for rule in rules:
        rule.unregister()


def compare_steps() -> None:
    """Prints what the rules in force add to each call of a compiled program."""
    model, x = Layer(), torch.ones(4, 32)

    def steps(jitted: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return seconds(lambda: [jitted(x) for _ in range(STEPS)]) / STEPS

    enabled = thunder.jit(model)
    enabled(x)
    hookkit.disable()
    disabled = thunder.jit(model)
    disabled(x)
    differences, without = [], []
    for _ in range(ROUNDS):
        hookkit.disable()
        base = steps(disabled)
        hookkit.enable()
        differences.append(steps(enabled) - base)
        without.append(base)
    step, added = statistics.median(without), statistics.median(differences)
    print(f"one forward step: {1e6 * step:.0f} us, {1e6 * added:+.1f} us with hookkit ({100 * added / step:+.2f}%)")


if __name__ == "__main__":
    compare_tracing()
    compare_steps()
