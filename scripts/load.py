"""Compiles, runs, fails and drops programs, over and over, and counts what stays alive: ``python scripts/load.py``.

What is counted are the objects that Python's garbage collector knows, by type, the entries of the tables that hookkit
and thunder keep, and the files that are open. Memory is shown, and does not count: an allocator's figure neither proves
a leak nor the absence of one. The tests run the same in a short form.
"""

from __future__ import annotations

import argparse
import gc
import linecache
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import hookkit  # before thunder, which needs it on some releases of torch

import thunder  # isort: skip

# Of these not one more may be alive afterwards; of any other type fewer than one for each repetition.
COUNTED = (
    torch.Tensor,
    torch.nn.Module,
    torch.autograd.function.FunctionMeta,
    thunder.core.proxies.Proxy,
    thunder.core.symbol.Symbol,
    thunder.core.symbol.BoundSymbol,
    thunder.core.trace.TraceCtx,
    thunder.extend.Executor,
    thunder.common.CompileStats,
)


def alive() -> Counter[str]:
    """How many objects there are of each type, and how many entries in each table of hookkit's and thunder's."""
    linecache.clearcache()  # thunder keeps the source of every program there
    for _ in range(2):  # a node of autograd that is freed may free others
        gc.collect()
    found: Counter[str] = Counter()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        found[f"{kind.__module__}.{kind.__qualname__}"] += count
        for counted in COUNTED:
            if issubclass(kind, counted):
                found[f"any {counted.__name__}"] += count
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("hookkit", "thunder"):
            for attribute, value in list(vars(module).items()):
                _count_entries(found, f"{name}.{attribute}", value)
    if os.path.isdir("/dev/fd"):
        found["entries of the table of open files"] = len(os.listdir("/dev/fd"))
    return found


def resident() -> float:
    """The megabytes of memory that the process has, where Linux says it."""
    try:
        with open("/proc/self/statm") as said:
            return int(said.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
    except OSError:
        return float("nan")


def _count_entries(found: Counter[str], name: str, value: Any) -> None:
    if isinstance(value, Sized) and not isinstance(value, str | bytes | type | torch.Tensor):
        found[f"entries of {name}"] = len(value)
    elif type(value).__module__.startswith("hookkit."):
        for attribute, held in vars(value).items() if hasattr(value, "__dict__") else ():
            if isinstance(held, Sized):
                found[f"entries of {name}.{attribute}"] = len(held)


def growth(action: Callable[[], None], times: int, *, warm_up: int = 2) -> dict[str, int]:
    """What an action that is repeated leaves behind.

    Args:
        action: what is repeated.
        times: how often, after the warm-up.
        warm_up: how often before the first count, for what is kept once.

    Returns:
        By what is counted, how much there is more of it; empty if nothing grows.
    """
    for _ in range(warm_up):
        action()
    alive()  # asking for the type of everything fills the caches of abstract base classes
    before = alive()
    for _ in range(times):
        action()
    more = alive() - before
    allowed = max(2, times // 4)
    return {name: n for name, n in more.items() if n >= (1 if name.startswith(("any ", "entries ")) else allowed)}


class Boom(Exception):
    """What the failing programs raise."""


def scaled(mode: str, *, fails: str | None = None) -> tuple[type[torch.autograd.Function], Any]:
    """A Function whose gradient is wrong on purpose, and a rule, not registered, under which it is traced or opaque.

    Args:
        mode: ``"trace"`` or ``"opaque"``.
        fails: the stage that raises :class:`Boom`: ``"forward"``, ``"backward"``, ``"run"`` (the forward when it runs
            on values), ``"when"`` or ``"meta"``; None for a Function that works.
    """

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            if fails == "forward":
                raise Boom(fails)
            if fails == "run" and not isinstance(x, torch._subclasses.FakeTensor) and x.isnan().any():
                raise Boom(fails)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if fails == "backward":
                raise Boom(fails)
            return 100 * gradient * x

    rule = None
    if mode == "opaque" or fails in ("when", "meta"):
        rule = hookkit.rule(Scaled, mode="opaque", register=False)
        if fails in ("when", "meta"):

            def provider(x: Any) -> Any:
                raise Boom(fails)

            getattr(rule, fails)(provider)
    return Scaled, rule


class Layer(torch.nn.Module):
    """A module with a parameter that applies a Function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the Function to the input times the weight."""
        return self.function.apply(x * self.weight) * 2  # type: ignore[no-any-return]


def in_force(rule: Any) -> Any:
    """The scope in which a rule of :func:`scaled` is in force."""
    return hookkit.use(*() if rule is None else (rule,))


def compilation(mode: str) -> Callable[[], None]:
    """An action: declare a Function, compile a module that applies it, take a step, and drop everything."""

    def action() -> None:
        function, rule = scaled(mode)
        module = Layer(function)
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        with in_force(rule):
            thunder.jit(module)(x).sum().backward()
        _check(x.grad, 200 * x * module.weight**2)
        _check(module.weight.grad, 200 * x**2 * module.weight)

    return action


def step(mode: str) -> Callable[[], None]:
    """An action: one more step of a program that is compiled."""
    function, rule = scaled(mode)
    compiled = thunder.jit(Layer(function))
    x = torch.linspace(-1, 1, 4)

    def action() -> None:
        compiled.zero_grad()
        with in_force(rule):
            compiled(x).sum().backward()
        _check(compiled.weight.grad, 200 * x**2 * compiled.weight)
        if thunder.cache_misses(compiled) != 1:
            raise AssertionError(f"compiled {thunder.cache_misses(compiled)} times")

    return action


def together(work: Callable[[int], None], threads: int = 16) -> None:
    """Call something in threads that begin at once, with the number of each thread."""
    barrier = threading.Barrier(threads)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(begin, range(threads)))


def in_threads(mode: str) -> Callable[[], None]:
    """An action: sixteen threads compile, run and drop programs of their own, and take steps of one that they share."""
    one = compilation(mode)
    function, rule = scaled(mode)
    shared = thunder.jit(lambda x, scale: function.apply(x * scale) * 2)
    with in_force(rule):  # threads that called it first, all at once, would each compile it
        shared(torch.ones(4, requires_grad=True), torch.tensor(1.0)).sum().backward()

    def work(number: int) -> None:
        one()
        for _ in range(10):
            x = torch.linspace(-1, 1, 4, requires_grad=True)
            with in_force(rule):
                shared(x, torch.tensor(float(number))).sum().backward()
            _check(x.grad, 200 * x * number**2)

    def action() -> None:
        together(work)
        if thunder.cache_misses(shared) != 1:
            raise AssertionError(f"compiled {thunder.cache_misses(shared)} times")

    return action


class Gradients(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Gradients that a worker of a DataLoader computes: of a program that it compiles, and of one that it was given."""

    def __init__(self, mode: str, given: Any = None) -> None:
        self.mode = mode
        self.given = given

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        torch.set_num_threads(1)
        compilation(self.mode)()
        if self.given is not None:
            x = torch.linspace(-1, 1, 4, requires_grad=True)
            self.given(x).sum().backward()
            _check(x.grad, 200 * x)
        return index


def workers(mode: str, method: str) -> Callable[[], None]:
    """An action: two workers of a DataLoader compile and run programs while the main process does.

    Args:
        mode: ``"trace"`` or ``"opaque"``.
        method: how the workers are started, ``"fork"`` or ``"spawn"``. Those that are forked are given a program that
            is compiled.
    """
    function, _ = scaled("trace")
    given = thunder.jit(lambda x: function.apply(x) * 2)
    given(torch.ones(4, requires_grad=True)).sum().backward()
    data = Gradients(mode, given if method == "fork" else None)

    def action() -> None:
        indices: list[int] = []
        for batch in torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=2, multiprocessing_context=method, collate_fn=list
        ):
            compilation(mode)()
            indices += batch
        assert indices == [0, 1, 2, 3]

    return action


def failures(mode: str) -> Callable[[], None]:
    """An action: compile and run, for each stage, a program that raises there."""
    stages = ("forward", "backward") if mode == "trace" else ("forward", "backward", "run", "when", "meta")

    def action() -> None:
        for stage in stages:
            function, rule = scaled(mode, fails=stage)
            x = torch.full((4,), torch.nan if stage == "run" else 1.0)
            try:
                with in_force(rule):
                    thunder.jit(Layer(function))(x).sum().backward()
            except (Boom, hookkit.HookError) as error:
                if isinstance(error, hookkit.HookError) != (stage in ("when", "meta")):
                    raise
            else:
                raise AssertionError(f"a program that fails in its {stage} ran ({mode})")

    return action


def scenarios() -> dict[str, tuple[Callable[[], None], float]]:
    """Each action of one thread by name, with how often it is repeated for each compilation."""
    found: dict[str, tuple[Callable[[], None], float]] = {}
    for mode in ("trace", "opaque"):
        found[f"compilations, {mode}"] = (compilation(mode), 1)
        found[f"steps, {mode}"] = (step(mode), 50)
        found[f"failures, {mode}"] = (failures(mode), 0.1)
    return found


def at_once() -> dict[str, tuple[Callable[[], None], float]]:
    """The same for actions of several threads or processes."""
    found: dict[str, tuple[Callable[[], None], float]] = {}
    for mode in ("trace", "opaque"):
        found[f"16 threads, {mode}"] = (in_threads(mode), 1 / 32)
        found[f"workers, fork, {mode}"] = (workers(mode, "fork"), 0.02)
        found[f"workers, spawn, {mode}"] = (workers(mode, "spawn"), 0.002)
    return found


def _check(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.detach())


def main() -> int:
    """Run every scenario, print what it leaves behind; 1 if it is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compilations", type=int, default=2000, help="of each kind (default: 2000)")
    parser.add_argument("--only", default="", help="run the scenarios whose name has this in it")
    options = parser.parse_args()
    warnings.simplefilter("ignore", hookkit.OpaqueFallbackWarning)
    leaks = 0
    for name, (action, share) in (scenarios() | at_once()).items():
        if options.only not in name:
            continue
        times = max(1, round(options.compilations * share))
        action()
        begun, before = time.process_time(), resident()
        more = growth(action, times)
        leaks += bool(more)
        spent = f"{time.process_time() - begun:7.1f} s, {before:5.0f} to {resident():5.0f} MB"
        print(f"{name:24} {times:6} times, {spent}: {more or 'nothing grows'}", flush=True)
    return 1 if leaks else 0


if __name__ == "__main__":
    raise SystemExit(main())
