"""Functions in a model under DistributedDataParallel and FSDP2, with two processes that the tests start.

Each process gets one half of the batch. Gradients have to be those of one process with the whole batch, in eager
PyTorch; for FSDP2 those of eager FSDP2 (on the CPU, that of torch 2.7 adds up what it should average).
"""

import datetime
import traceback

import hookkit  # noqa: F401 isort: skip (before thunder, in the processes too, where nothing else has imported it)
import pytest
import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from thunder.dynamo import thunderfx
from torch.autograd import Function
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.long

PROCESSES = 2
BATCH = torch.linspace(-1, 1, 32).reshape(8, 4)


class Traced(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.sin() * weight

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        return 100 * grad * x, 50 * (grad * x).sum(0)


class Opaque(Traced):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() * 2) * weight


class Block(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x):
        return self.function.apply(self.linear(x), self.weight)


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(function), Block(function)])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(function):
    torch.manual_seed(0)
    return Model(function)


def sharded(module):
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


WAYS = {
    "DistributedDataParallel of thunder.jit": lambda m: DistributedDataParallel(thunder.jit(m)),
    "thunderfx of DistributedDataParallel": lambda m: thunderfx(DistributedDataParallel(m)),
    "thunderfx of fully_shard": lambda m: thunderfx(sharded(m)),
}
CASES = [*((way, Traced) for way in WAYS), *((way, Opaque) for way in list(WAYS)[:2])]


def gradients(module, parameters, x):
    """The gradients of two steps, as whole tensors, by the names of the parameters."""
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = None
        module(x).square().mean().backward()
    found = {name: parameter.grad for name, parameter in parameters.items()}
    return {n: g.full_tensor() if isinstance(g, torch.distributed.tensor.DTensor) else g for n, g in found.items()}


def takes_part(outer):
    """Whether hookkit's symbols stand in what thunder compiled."""
    if isinstance(outer, DistributedDataParallel):
        compiled = [outer.module]
    else:
        compiled = [f for graph in outer._backend.subgraph_infos for f in graph.thunder_compiled_fns]
    symbols = [b.sym for f in compiled for b in thunder.last_traces(f)[0].bound_symbols]
    return any(str(symbol.id).startswith("hookkit.") for symbol in symbols)


def eager_of(way, function, x):
    """What FSDP2 makes of the gradients itself; None for another way."""
    if "fully_shard" not in way:
        return None
    module = sharded(model(function))
    return gradients(module, dict(module.named_parameters()), x)


def work(rank, folder):
    """One of the processes: every case, and what came of it into a file."""
    torch.set_num_threads(1)
    limit, store = datetime.timedelta(seconds=120), dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=limit)
    share = len(BATCH) // PROCESSES
    x = BATCH[rank * share : (rank + 1) * share]
    outcomes = []
    for way, function in CASES:
        inner = model(function)
        try:
            outer = WAYS[way](inner)
            found = gradients(outer, dict(inner.named_parameters()), x)
            outcomes.append((found, takes_part(outer), eager_of(way, function, x)))
        except Exception:
            outcomes.append(traceback.format_exc())
        torch._dynamo.reset()
    torch.save(outcomes, f"{folder}/outcomes-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each process what came of each case."""
    folder = tmp_path_factory.mktemp("distributed")
    context = mp.start_processes(work, (str(folder),), nprocs=PROCESSES, join=False, start_method="spawn")
    deadline = 600
    while not context.join(timeout=10):
        deadline -= 10
        if deadline <= 0:
            for process in context.processes:
                process.kill()
            pytest.fail("the processes did not come to an end")
    return [torch.load(folder / f"outcomes-{rank}") for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{way}, {f.__name__}" for way, f in CASES])
def test_gradients_are_those_of_one_process_with_the_whole_batch(case, outcomes):
    way, function = CASES[case]
    whole = model(function)
    of_one_process = gradients(whole, dict(whole.named_parameters()), BATCH)
    for outcome in (of_process[case] for of_process in outcomes):
        assert isinstance(outcome, tuple), outcome
        found, takes_part_in_it, eager = outcome
        expected = eager or of_one_process
        # thunderfx leaves what thunder lacks, NumPy say, to inductor, the Function with it
        assert takes_part_in_it or (function is Opaque and "thunderfx" in way)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])
