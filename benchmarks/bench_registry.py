"""What hookkit costs where no rule matches: the import, tracing with 1,000 rules, the cache decision of each call.

Prints how long ``import hookkit`` takes in a new process, beside ``import torch``; the time to trace a program that
matches no rule, and how long the registry takes to answer for its calls with the shipped rules alone and with 1,000
more of all kinds; and how much of one call of a compiled program is spent on the rules in force.

Run as ``python benchmarks/bench_registry.py [--json FILE]``.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import thunder
import torch
from measuring import begin, fastest, seconds, table, write

import hookkit
from hookkit.call import Call
from hookkit.registry import Registry, registry

RULES = 1000
ROUNDS, REPEATED = 20, 100


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


def imports() -> dict[str, float]:
    """Seconds that imports take in a new process, the interpreter's own start not among them."""
    imported = {"import hookkit": "hookkit", "import torch": "torch"}
    work = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"

    def once(module: str) -> float:
        command = [sys.executable, "-W", "ignore", "-c", work.format(module)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return {name: min(once(module) for _ in range(5)) for name, module in imported.items()}


def tracing() -> dict[str, float]:
    """What rules that match nothing add to tracing."""
    calls = calls_of_a_trace()
    rules: list[hookkit.Rule] = []
    registering = seconds(lambda: rules.extend(declare_rules(RULES)))
    (with_rules,) = fastest(lambda: ask(calls), rounds=ROUNDS)
    for rule in rules:
        rule.unregister()
    without, trace_alone = fastest(lambda: ask(calls), trace, rounds=ROUNDS)
    return {
        "us to register a rule": 1e6 * registering / RULES,
        "ms to trace": 1e3 * trace_alone,
        "calls": len(calls),
        "us to look up": 1e6 * without / len(calls),
        f"with {RULES}": 1e6 * with_rules / len(calls),
        "added to tracing": (with_rules - without) / trace_alone,
    }


def step() -> dict[str, float]:
    """What the rules in force add to each call of a compiled program: thunder asks for its record twice."""
    model, x = Layer(), torch.ones(4, 32)
    jitted = thunder.jit(model)
    jitted(x)
    ask_twice = thunder._with_cache_info_ctx(lambda: (thunder._get_cache_info(), thunder._get_cache_info()))

    def repeatedly(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: [work() for _ in range(REPEATED)]

    whole, enabled = fastest(repeatedly(lambda: jitted(x)), repeatedly(ask_twice), rounds=ROUNDS)
    hookkit.disable()
    (disabled,) = fastest(repeatedly(ask_twice), rounds=ROUNDS)
    hookkit.enable()
    added = enabled - disabled
    return {
        "us of a forward step": 1e6 * whole / REPEATED,
        "us for the rules": 1e6 * added / REPEATED,
        "part": added / whole,
    }


def main() -> None:
    """Measure, print, write."""
    options = begin(__doc__)
    figures = {"imports": imports(), "tracing": tracing(), "step": step()}
    table("seconds in a new process", [figures["imports"]])
    table("tracing a program that matches no rule", [figures["tracing"]])
    table("the cache decision of a compiled program", [figures["step"]])
    write(options.json, figures)


if __name__ == "__main__":
    main()
