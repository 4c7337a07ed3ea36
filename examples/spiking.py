"""A spiking network with surrogate gradients, trained eagerly and under ``thunder.jit``.

What it shows: a Function that is applied at every time step, twenty times in one program, and interpreted once for each
layer: the report counts the replays. The threshold's own derivative is zero almost everywhere; its surrogate is that of
SuperSpike (Zenke and Ganguli, 2018). Neurons leak, spike and are reset; the task is to tell which of two rhythms the
input has.

Nothing in the network knows hookkit. Run it with::

    python examples/spiking.py [--steps 60]
"""

from __future__ import annotations

import argparse
import copy
import sys

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME, INPUTS, NEURONS = 10, 10, 24


class Spike(torch.autograd.Function):
    """1 where the potential is above 0, else 0; the gradient is that of a steep fast sigmoid."""

    @staticmethod
    def forward(potential: Tensor) -> Tensor:
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return grad / (1 + 5 * potential.abs()).square()


class Network(nn.Module):
    """Two layers of leaky integrate-and-fire neurons; the second one's spikes are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, NEURONS, dtype=torch.float64)
        self.outer = nn.Linear(NEURONS, 2, dtype=torch.float64)

    def forward(self, trains: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.zeros(trains.shape[0], NEURONS, dtype=trains.dtype)
        counts = out = torch.zeros(trains.shape[0], 2, dtype=trains.dtype)
        for step in range(TIME):
            hidden = 0.8 * hidden + self.inner(trains[:, step])
            spikes = Spike.apply(hidden - 1)
            hidden = hidden * (1 - spikes)
            out = 0.8 * out + self.outer(spikes)
            fired = Spike.apply(out - 1)
            out = out * (1 - fired)
            counts = counts + fired + 0.1 * out
        return F.cross_entropy(counts, labels)


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy spike trains; every third, or every fifth, moment is louder."""
    labels = torch.randint(0, 2, (size,), generator=generator)
    moments = torch.arange(TIME)
    rhythm = torch.stack([(moments % 3 == 0), (moments % 5 == 0)]).double()[labels]
    chance = 0.1 + 0.6 * rhythm
    trains = torch.rand(size, TIME, INPUTS, generator=generator, dtype=torch.float64) < chance[:, :, None]
    return trains.double(), labels


def train(step, model: nn.Module, steps: int) -> list[float]:
    """The losses of training ``model`` through ``step``, which is the model or its compiled form."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        loss = step(*batch(64, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a spiking network eagerly and under thunder.jit.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default: %(default)s)")
    steps = parser.parse_args(arguments).steps

    torch.manual_seed(0)
    eager_model = Network()
    thunder_model = copy.deepcopy(eager_model)
    eager = train(eager_model, eager_model, steps)
    jitted = thunder.jit(thunder_model)
    compiled = train(jitted, thunder_model, steps)

    for i in range(0, steps, max(1, steps // 8)):
        print(f"step {i:>3}: loss {eager[i]:.4f} eagerly, {compiled[i]:.4f} under thunder")
    calls = hookkit.report(jitted).calls
    print(f"{len(calls)} spikes in one program, {sum(call.replays == 0 for call in calls)} of them interpreted")
    difference = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
    print(f"largest difference between the two runs: {difference:.1e}")
    return 0 if difference < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
