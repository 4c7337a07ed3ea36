"""What rules cost that do not match: tracing with 1,000 of them, and the cache decision of each call.

Prints the time to trace a program that matches no rule, and how much longer the registry takes to answer for its calls
with 1,000 rules of all kinds; and how much of one call of a compiled program is spent on the rules in force. Times are
those of this thread on the processor, so that what else the machine does counts little.

Run as ``python benchmarks/bench_registry.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import thunder
import torch

import hookkit
from hookkit.call import Call
from hookkit.registry import Registry, registry

RULES = 1000
ROUNDS = 20


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
    """How long something takes this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def trace() -> None:
    """Traces the program."""
    hookkit.explain(Layer(), torch.ones(4, 32))


def calls_of_a_trace() -> list[tuple[Any, type[Any] | None]]:
    """What the registry is asked about while the program is traced."""
    asked = []
    matching = Registry.matching

    def note(self: Registry, callable_: Any, function: type[Any] | None) -> bool:
        asked.append((callable_, function))
        return matching(self, callable_, function)

    Registry.matching = note
    try:
        trace()
    finally:
        Registry.matching = matching
    return asked


def ask(calls: list[tuple[Any, type[Any] | None]]) -> None:
    """Asks the registry as tracing the program does."""
    for callable_, function in calls:
        if registry.matching(callable_, function):
            for _ in registry.candidates(Call(callable_, function, (), {})):
                pass


def compare_tracing() -> None:
    """Prints what rules that match nothing add to tracing."""
    calls = calls_of_a_trace()
    start = time.perf_counter()
    rules = declare_rules(RULES)
    print(f"registering {RULES} rules: {1e6 * (time.perf_counter() - start) / RULES:.0f} us each")
    with_rules = fastest(lambda: ask(calls), 1)
    for rule in rules:
        rule.unregister()
    without = fastest(lambda: ask(calls), 1)
    tracing = fastest(trace, 1)
    print(
        f"tracing a program that matches none: {1e3 * tracing:.0f} ms; about its {len(calls)} calls {RULES} rules "
        f"add {1e3 * (with_rules - without):.1f} ms ({(with_rules - without) / tracing:.2%})"
    )


def compare_steps() -> None:
    """Prints what the rules in force add to each call of a compiled program: thunder asks for its record twice."""
    model, x = Layer(), torch.ones(4, 32)
    jitted = thunder.jit(model)
    jitted(x)
    step = fastest(lambda: jitted(x))
    ask_twice = thunder._with_cache_info_ctx(lambda: (thunder._get_cache_info(), thunder._get_cache_info()))
    enabled = fastest(ask_twice)
    hookkit.disable()
    added = enabled - fastest(ask_twice)
    hookkit.enable()
    print(f"one forward step: {1e6 * step:.0f} us, of which {1e6 * added:.2f} us for the rules ({added / step:.2%})")


def fastest(work: Callable[[], object], repeated: int = 100) -> float:
    """How long something takes when nothing disturbs it."""
    return min(seconds(lambda: [work() for _ in range(repeated)]) for _ in range(ROUNDS)) / repeated


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare_tracing()
    compare_steps()
