"""A character-level transformer whose linear layers have four-bit weights, trained under ``thunder.jit``.

What it shows: a custom Function in each of nine layers, with parameters, compiled with the model around it. The layer
multiplies by rounded weights, and its gradient passes straight through to the weights that are trained (Bengio et al.,
2013). The Function is applied nine times and interpreted once for each shape. The text ships with Python: the
language reference, as the interactive help has it.

Nothing in the model knows hookkit. Run it with::

    python examples/char_transformer.py [--steps 200]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pydoc_data.topics import topics

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 48, 4, 2, 16
LEVELS = 7  # of either sign: four bits


class QuantisedLinear(torch.autograd.Function):
    """``x @ rounded(weight).T``, each row of ``weight`` rounded to ``LEVELS`` steps of its largest entry."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        step = weight.abs().amax(1, keepdim=True) / LEVELS
        rounded = torch.round(weight / step) * step
        ctx.rounded = rounded
        ctx.save_for_backward(x)
        return x @ rounded.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x,) = ctx.saved_tensors
        grad_x = grad @ ctx.rounded if ctx.needs_input_grad[0] else None
        grad_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class Linear(nn.Module):
    """A layer with quantised weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return QuantisedLinear.apply(x, self.weight)


class Block(nn.Module):
    """Attention over what came before, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).reshape(x.shape[0], CONTEXT, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)).masked_fill(self.future, float("-inf"))
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape[0], CONTEXT, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(text) + self.places)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a quantised character-level transformer under thunder.jit.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    steps = parser.parse_args(arguments).steps

    torch.manual_seed(0)
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    data = torch.tensor([numbers[character] for character in text])
    print(f"{len(text):,} characters of Python's documentation, {len(alphabet)} different ones")

    model = Transformer(len(alphabet))
    jitted = thunder.jit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    begun = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        scores = jitted(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        if step == 0:
            print(f"compiled in {time.perf_counter() - begun:.1f} s; the same step eagerly, to compare:")
            eager = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            weights = (model.head.weight, model.blocks[0].qkv.weight)
            expected = torch.autograd.grad(eager, weights)
            torch.testing.assert_close(
                torch.autograd.grad(loss, weights, retain_graph=True), expected, rtol=1e-3, atol=1e-5
            )
            print(f"loss {eager.item():.4f} eagerly, {loss.item():.4f} under thunder, and the gradients agree")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // 6) == 0:
            print(f"step {step:>4}: loss {loss.item():.3f}")
    calls = hookkit.report(jitted).calls
    print(f"{len(calls)} quantised layers, {sum(call.replays == 0 for call in calls)} of them interpreted; ", end="")
    print(f"all {calls[0].outcome}")

    known = data[:CONTEXT].clone()
    with torch.no_grad():
        for _ in range(120 if steps > 50 else 3):
            chances = torch.softmax(jitted(known[None, -CONTEXT:])[0, -1], -1)
            known = torch.cat([known, torch.multinomial(chances, 1)])
    print("a sample:", repr("".join(alphabet[number] for number in known[CONTEXT:].tolist())))

    tail = losses[-10:]
    learned = sum(tail) / len(tail) < losses[0] - 1
    return 0 if learned or steps < 100 else 1


if __name__ == "__main__":
    sys.exit(main())
