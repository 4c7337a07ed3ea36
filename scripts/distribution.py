"""Functions in models that several processes train: ``python scripts/distribution.py --processes 2 4``.

Each process gets its share of a batch, or of the weights; its gradients have to be those that one process has in eager
PyTorch, with the whole. The processes talk by gloo. What a combination of thunder's cannot do has the smallest program
that shows it; what that raises is printed.
"""

# ruff: noqa: D102 (forward and backward are those of torch.autograd.Function)

from __future__ import annotations

import argparse
import contextlib
import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hookkit  # before thunder, which needs it on some releases of torch

# isort: split

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from thunder.dynamo import thunderfx
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BATCH = torch.linspace(-1, 1, 32).reshape(8, 4)
Gradients = dict[str, Tensor]


class Scaled(Function):
    """A Function whose gradients are wrong on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.sin() * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return 100 * grad * x, 50 * (grad * x).sum(0)


class Summed(Function):
    """Rows summed over the processes, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad * 100
        dist.all_reduce(total)
        return total


# The four Functions of tensor parallelism: what goes into a layer whose weight is split, and what comes out of it.


class Copied(Function):
    """What all processes are given: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


class Reduced(Function):
    """The sum of what the processes have: each is given the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Gathered(Function):
    """The columns of all processes, side by side: each is given its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _part(grad)


class Scattered(Function):
    """Each process's own columns: the gradients are put side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _part(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, -1)


def _summed(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()


class Block(nn.Module):
    """A linear layer and a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        return Scaled.apply(self.linear(x), self.weight)


class Model(nn.Module):
    """Two of those, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply them one after the other."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    """The same in each process."""
    torch.manual_seed(0)
    return Model()


def _share() -> Tensor:
    return BATCH.chunk(dist.get_world_size())[dist.get_rank()]


def _with_compiled_blocks(module: Model) -> Model:
    for i, block in enumerate(list(module.blocks)):
        module.blocks[i] = thunder.jit(block)
    return module


def _sharded(module: Model) -> Model:
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


def _gradients(parameters: dict[str, Any]) -> Gradients:
    found = {n.replace("_overrides_parameters.", ""): p.grad for n, p in parameters.items()}
    return {n: g.full_tensor() if isinstance(g, torch.distributed.tensor.DTensor) else g for n, g in found.items()}


def trained(outer: Callable[[Model], Any], *, accumulate: int = 1) -> tuple[Gradients, Gradients]:
    """The gradients of a model after two backwards, and those that they must be.

    Args:
        outer: what compiles the model and puts it around what synchronises.
        accumulate: in how many parts the share of a process comes; only the last is synchronised.
    """
    inner = model()
    parameters = dict(inner.named_parameters())
    program = outer(inner)
    parameters = dict(inner.named_parameters()) if outer is WAYS["thunderfx of fully_shard"] else parameters
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = None
        parts = _share().chunk(accumulate)
        for i, part in enumerate(parts):
            with program.no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                (program(part).square().mean() / accumulate).backward()
    if outer is WAYS["thunderfx of fully_shard"]:  # on the CPU, that of torch 2.7 adds up what it should average
        eager = _sharded(model())
        eager(_share()).square().mean().backward()
        return _gradients(parameters), _gradients(dict(eager.named_parameters()))
    whole = model()
    whole(BATCH).square().mean().backward()
    return _gradients(parameters), _gradients(dict(whole.named_parameters()))


WAYS: dict[str, Callable[[Model], Any]] = {
    "DistributedDataParallel of thunder.jit": lambda m: DistributedDataParallel(thunder.jit(m)),
    "DistributedDataParallel of a model of compiled blocks": lambda m: DistributedDataParallel(
        _with_compiled_blocks(m)
    ),
    "thunderfx of DistributedDataParallel": lambda m: thunderfx(DistributedDataParallel(m)),
    "thunderfx of fully_shard": lambda m: thunderfx(_sharded(m)),
}


def in_a_function(compiler: Callable[..., Any]) -> tuple[Gradients, Gradients]:
    """Gradients through a collective inside of a Function, compiled and eagerly."""
    found = []
    for program in (compiler(lambda x: Summed.apply(x * 2) * x), lambda x: Summed.apply(x * 2) * x):
        x = (_share() + dist.get_rank()).requires_grad_()
        program(x).sum().backward()
        found.append({"x": x.grad})
    return found[0], found[1]


def tensor_parallel(compiler: Callable[..., Any]) -> tuple[Gradients, Gradients]:
    """Two linear layers, split by columns and by rows, and the other pair of Functions around a third.

    The gradients of each process have to be its parts of those of the whole.
    """
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.randn(4, 4, generator=generator) for _ in range(3))
    mine = [_part(first).requires_grad_(), _part(second.mT).mT.clone().requires_grad_(), _part(third).requires_grad_()]
    x = BATCH.clone().requires_grad_()

    def program(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = Reduced.apply(torch.tanh(Copied.apply(x) @ a) @ b)
        x = Gathered.apply(torch.tanh(Copied.apply(x) @ c))
        return Gathered.apply(Scattered.apply(x).sin())

    compiler(program)(x, *mine).square().sum().backward()
    whole = [t.clone().requires_grad_() for t in (BATCH, first, second, third)]
    y = torch.tanh((torch.tanh(whole[0] @ whole[1]) @ whole[2]) @ whole[3]).sin()
    y.square().sum().backward()
    expected = [whole[0].grad, _part(whole[1].grad), _part(whole[2].grad.mT).mT, _part(whole[3].grad)]
    names = ("x", "first", "second", "third")
    return dict(zip(names, (t.grad for t in (x, *mine)), strict=True)), dict(zip(names, expected, strict=True))


SCENARIOS: dict[str, Callable[[], tuple[Gradients, Gradients]]] = {
    **{name: lambda way=way: trained(way) for name, way in WAYS.items()},
    "gradient accumulation with no_sync, DistributedDataParallel of thunder.jit": lambda: trained(
        WAYS["DistributedDataParallel of thunder.jit"], accumulate=2
    ),
    "a collective inside of a Function, thunder.jit": lambda: in_a_function(thunder.jit),
    "a collective inside of a Function, thunderfx": lambda: in_a_function(thunderfx),
    "the pairs of tensor parallelism, thunder.jit": lambda: tensor_parallel(thunder.jit),
    "the pairs of tensor parallelism, thunderfx": lambda: tensor_parallel(thunderfx),
}


def _jit_of_fsdp2() -> None:
    thunder.jit(fully_shard(nn.Linear(4, 4)))(_share())


def _fsdp2_of_jit() -> None:
    fully_shard(thunder.jit(nn.Linear(4, 4)))(_share()).sum().backward()


def _jit_of_ddp() -> None:
    thunder.jit(DistributedDataParallel(nn.Linear(4, 4)))(_share()).sum().backward()


# What thunder itself cannot do: the smallest program, which has to raise something.
REFUSED: dict[str, Callable[[], None]] = {
    "thunder.jit of fully_shard": _jit_of_fsdp2,
    "fully_shard of thunder.jit": _fsdp2_of_jit,
    "thunder.jit of DistributedDataParallel": _jit_of_ddp,
}


def ending(scenario: Callable[[], tuple[Gradients, Gradients]]) -> str:
    """``same``, or what is wrong."""
    found, expected = scenario()
    if found.keys() != expected.keys():
        return f"differs: gradients of {sorted(found)} instead of {sorted(expected)}"
    for name, wanted in expected.items():
        try:
            torch.testing.assert_close(found[name], wanted)
        except AssertionError as error:
            return f"differs in the gradient of {name}: {' '.join(str(error).split())}"
    return "same"


def _refusal(program: Callable[[], None]) -> str:
    program()
    return "works"


def work(rank: int, processes: int, folder: str) -> None:
    """One of the processes: every scenario, and what came of it into a file."""
    torch.set_num_threads(1)
    limit, store = datetime.timedelta(seconds=120), dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=limit)
    outcomes: dict[str, str] = {}
    everything = {n: lambda s=s: ending(s) for n, s in SCENARIOS.items()}
    everything |= {n: lambda p=p: _refusal(p) for n, p in REFUSED.items()}
    for name, scenario in everything.items():
        try:
            outcomes[name] = scenario()
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            Path(folder, f"traceback-{rank}").write_text(traceback.format_exc())
        torch._dynamo.reset()
        dist.barrier()
    torch.save(outcomes, f"{folder}/outcomes-{rank}")
    dist.destroy_process_group()


def failing(rank: int, processes: int, folder: str) -> None:
    """One of the processes of a model whose Function raises an error in the second step of the last process."""
    torch.set_num_threads(1)
    limit, store = datetime.timedelta(seconds=60), dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=limit)
    program = DistributedDataParallel(thunder.jit(model()))
    program(_share()).sum().backward()
    with hookkit.use(hookkit.rule(Scaled, mode="opaque", register=False)):
        program = DistributedDataParallel(thunder.jit(model()))
        program(_share()).sum().backward()
        if rank == processes - 1:
            Scaled.backward = staticmethod(_fails)  # type: ignore[method-assign]
        program(_share()).sum().backward()


def _fails(ctx: Any, grad: Tensor) -> Any:
    raise ValueError("a fault of one process")


def together(target: Callable[..., None], processes: int, folder: str, limit: float = 600) -> Any:
    """Run something in processes; what one of them raises is raised here, and ends the others."""
    context = mp.start_processes(target, (processes, folder), nprocs=processes, join=False, start_method="spawn")
    while not context.join(timeout=5):
        limit -= 5
        if limit <= 0:
            for process in context.processes:
                process.kill()
            raise TimeoutError("the processes did not come to an end")


def outcomes_with(processes: int) -> dict[str, set[str]]:
    """What came of each scenario, in all processes."""
    with tempfile.TemporaryDirectory() as folder:
        together(work, processes, folder)
        of_each = [torch.load(f"{folder}/outcomes-{rank}") for rank in range(processes)]
    return {name: {outcomes[name] for outcomes in of_each} for name in of_each[0]}


def error_with(processes: int) -> str:
    """What the one who started the processes is told where one fails in its backward: the line with the error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            together(failing, processes, folder)
        except mp.ProcessRaisedException as error:
            lines = str(error).strip().splitlines()
            return next((line for line in lines if line.startswith("ValueError")), lines[-1])
    return "nothing"


def main() -> int:
    """Run everything with each number of processes; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    wrong = 0
    print(f"hookkit {hookkit.__version__}, PyTorch {torch.__version__}")
    for processes in parser.parse_args().processes:
        for name, found in outcomes_with(processes).items():
            wrong += found != {"same"} and name in SCENARIOS
            print(f"{processes} processes, {name}: {'; '.join(sorted(found))}", flush=True)
        told = error_with(processes)
        wrong += "a fault of one process" not in told
        print(f"{processes} processes, an error in one: {told}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
