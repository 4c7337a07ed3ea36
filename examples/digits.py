"""Train one classifier twice, eagerly and under ``thunder.jit``, and see that it learns the same.

What it shows:

* three custom ``torch.autograd.Function``s of the kinds that people write, each in another style: ``Quantise``, a
  straight-through estimator that keeps a mask on ``ctx``; ``Spike``, a threshold with a surrogate gradient and a
  ``setup_context``; ``LeanNorm``, a normalisation that keeps two intermediates and asks ``needs_input_grad``.
  thunder 0.2.6 by itself refuses all three. Nothing in them knows hookkit: ``import hookkit`` is all that they need;
* one rule declared with ``@hookkit.rule(...)``: ``fused_cross_entropy`` stands for a plain function and brings a
  backward of its own;
* which rules fired where, and the trace that thunder compiled.

Both runs start from the same weights and see the same batches of the handwritten digits that scikit-learn ships. The
script fails if they do not end with the same parameters. Run it with::

    python examples/digits.py [--steps 80]

The numbers are double precision, because rounding and thresholds jump: eager and compiled code may differ in the last
bit of a number, one number in a million then falls on the other side of a jump, and from there on the runs train
apart. In double precision that does not happen, and the parameters agree to far less than one float32 rounding.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import hookkit  # before thunder, which current PyTorch cannot import otherwise; enables the shipped rules

# isort: split
import thunder
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10
HELD_OUT = 360  # the last images, by writers that the others are not by
TOLERANCE = torch.finfo(torch.float32).eps  # one float32 rounding of a number of size 1: 1.2e-07


# Three custom Functions ----------------------------------------------------------------------------------------------


class Quantise(torch.autograd.Function):
    """Rounds to multiples of ``step`` within ``[-limit, limit]``; the gradient passes as if it had only clamped."""

    @staticmethod
    def forward(ctx, weight: Tensor, step: float, limit: float) -> Tensor:
        ctx.inside = weight.abs() <= limit
        return torch.round(weight.clamp(-limit, limit) / step) * step

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.inside, None, None


class LeanNorm(torch.autograd.Function):
    """Scales each row to a root mean square of 1, times ``gain``; keeps the scaled rows and one number a row."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        scaled = x * scale
        ctx.save_for_backward(scaled, scale, gain)
        return scaled * gain

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        scaled, scale, gain = ctx.saved_tensors
        grad_scaled = grad * gain
        grad_x = scale * (grad_scaled - scaled * (grad_scaled * scaled).mean(-1, keepdim=True))
        grad_gain = (grad * scaled).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_gain, None


class Spike(torch.autograd.Function):
    """1 where the potential is above the threshold, else 0; its gradient, 0 almost everywhere, is replaced.

    The surrogate is that of SuperSpike (Zenke and Ganguli, 2018): ``1 / (1 + slope * |potential - threshold|)²``.
    """

    @staticmethod
    def forward(potential: Tensor, threshold: float, slope: float) -> Tensor:
        return (potential > threshold).to(potential.dtype)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        potential, ctx.threshold, ctx.slope = inputs
        ctx.save_for_backward(potential)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (potential,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * (potential - ctx.threshold).abs()).square(), None, None


# A function, and the rule that stands for it under thunder ------------------------------------------------------------


def soft_targets(labels: Tensor, smoothing: float, dtype: torch.dtype) -> Tensor:
    """One-hot rows with ``smoothing`` of their weight spread evenly over all classes."""
    return F.one_hot(labels, CLASSES).to(dtype) * (1 - smoothing) + smoothing / CLASSES


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """What a library might ship: eagerly it is this, and autograd differentiates it."""
    return -(soft_targets(labels, smoothing, logits.dtype) * F.log_softmax(logits, -1)).sum(-1).mean()


@hookkit.rule(smoothed_cross_entropy)
def fused_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float):
    """The same loss, with its gradient, softmax minus targets, found on the way."""
    log_probabilities = F.log_softmax(logits, -1)
    targets = soft_targets(labels, smoothing, logits.dtype)
    loss = -(targets * log_probabilities).sum(-1).mean()
    return loss, hookkit.save(direction=(log_probabilities.exp() - targets) / logits.shape[0])


@fused_cross_entropy.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    return {"logits": saved.direction * grad}


# The model and its training -------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Quantised weights, a normalisation, spiking neurons, a linear read-out."""

    def __init__(self, neurons: int = 96) -> None:
        super().__init__()
        self.inner = nn.Linear(64, neurons, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones(neurons, dtype=torch.float64))
        self.outer = nn.Linear(neurons, CLASSES, dtype=torch.float64)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        quantised = Quantise.apply(self.inner.weight, 1 / 16, 0.5)
        potential = LeanNorm.apply(F.linear(pixels, quantised, self.inner.bias), self.gain, 1e-5)
        spikes = Spike.apply(potential, 0.5, 4.0)
        logits = self.outer(spikes)
        loss = smoothed_cross_entropy(logits, labels, 0.1)
        return loss, logits


@dataclass
class Data:
    """The handwritten digits: 1797 images of 8 by 8 pixels in [0, 1]."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def load(cls) -> Data:
        digits = load_digits()
        return cls(torch.tensor(digits.data / 16), torch.tensor(digits.target))


@dataclass
class Run:
    """What training left behind."""

    losses: list[float]
    parameters: dict[str, Tensor]


def train(step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], model: nn.Module, data: Data, steps: int) -> Run:
    """Trains ``model`` through ``step``, which is the model or its compiled form."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        batch = torch.randint(0, len(data.pixels) - HELD_OUT, (128,), generator=batches)
        loss, _ = step(data.pixels[batch], data.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def accuracy(step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], data: Data) -> float:
    """The share of held-out images that are recognised."""
    labels = data.labels[-HELD_OUT:]
    with torch.no_grad():
        _, logits = step(data.pixels[-HELD_OUT:], labels)
    return (logits.argmax(-1) == labels).double().mean().item()


# What came of it ------------------------------------------------------------------------------------------------------


def largest_differences(eager: Run, compiled: Run) -> dict[str, float]:
    """For the losses and for each parameter, the largest absolute difference between the two runs."""
    losses = max(abs(a - b) for a, b in zip(eager.losses, compiled.losses, strict=True))
    parameters = {name: (p - compiled.parameters[name]).abs().max().item() for name, p in eager.parameters.items()}
    return {"loss": losses} | parameters


def compare(eager: Run, compiled: Run) -> list[str]:
    """Where the runs differ by more than a float32 rounding; nothing if they agree."""
    differences = largest_differences(eager, compiled).items()
    return [f"{name} differs by {by:.3g}" for name, by in differences if not by <= TOLERANCE]  # NaN is a difference


def print_losses(eager: Run, compiled: Run) -> None:
    last = len(eager.losses) - 1
    print(f"{'step':>4} {'eager loss':>12} {'thunder loss':>13} {'difference':>11}")
    for i, (a, b) in enumerate(zip(eager.losses, compiled.losses, strict=True)):
        if i % 10 == 0 or i == last:
            print(f"{i:>4} {a:>12.6f} {b:>13.6f} {abs(a - b):>11.1e}")


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train one classifier eagerly and under thunder.jit, and compare.")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run (default: %(default)s)")
    steps = parser.parse_args(arguments).steps

    torch.manual_seed(0)
    data = Data.load()
    eager_model = Classifier()
    thunder_model = copy.deepcopy(eager_model)

    eager = train(eager_model, eager_model, data, steps)
    jitted = thunder.jit(thunder_model)
    compiled = train(jitted, thunder_model, data, steps)
    report = hookkit.report(jitted)  # of the step compiled last, as the traces are: before the one without gradients
    first_trace, *_, last_trace = thunder.last_traces(jitted)

    title("Training")
    print_losses(eager, compiled)
    largest = max(v for k, v in largest_differences(eager, compiled).items() if k != "loss")
    print(f"\nlargest difference of any parameter after {steps} steps: {largest:.1e} (allowed: {TOLERANCE:.1e})")
    print(f"accuracy on {HELD_OUT} held-out images: ", end="")
    print(f"eager {accuracy(eager_model, data):.1%}, thunder {accuracy(jitted, data):.1%}")

    title("Which rules fired where")
    print(report)

    title("The trace of one step, as recorded: each Function and rule is one line, under its own name")
    print(first_trace.python())
    calls = [line for line in last_trace.python().splitlines() if " = torch." in line]
    title(f"The same step as it runs: {len(calls)} calls of PyTorch in the forward; the last of them")
    print(*calls[-8:], sep="\n")

    differences = compare(eager, compiled)
    title("Result")
    print(*(differences or ["the two runs agree"]), sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
