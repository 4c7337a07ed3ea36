"""A fused cross-entropy: the forward makes the gradient, so that the backward is one multiplication.

What it shows: a traced rule for a function of PyTorch's; a residual that is a gradient, in the place of the logits and
their softmax; `.when`, which declines what the rule is not for. Large language models spend much of their memory here:
the plain way keeps the logits and the log-probabilities, this one keeps a single tensor of that size.

Run it with ``python examples/cookbook/fused_cross_entropy.py``.
"""

from __future__ import annotations

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
import torch.nn.functional as F
from torch import Tensor


@hookkit.rule(F.cross_entropy)
def fused_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight=None,
    size_average=None,
    ignore_index: int = -100,
    reduce=None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
):
    """The mean over rows of ``logsumexp(row) - row[target]``; its gradient is softmax minus one-hot, over the rows."""
    rows = input.shape[0]
    log_total = torch.logsumexp(input, -1, keepdim=True)
    one_hot = F.one_hot(target, input.shape[-1]).to(input.dtype)
    loss = (log_total.squeeze(-1) - (input * one_hot).sum(-1)).sum() / rows
    return loss, hookkit.save(direction=(torch.exp(input - log_total) - one_hot) / rows)


@fused_cross_entropy.when
def _(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    if weight is not None or label_smoothing or reduction != "mean" or size_average is not None or reduce is not None:
        return hookkit.decline("only the plain mean is fused")
    return (input.ndim == 2 and target.ndim == 1) or hookkit.decline("input must be rows of logits")


@fused_cross_entropy.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    return {"input": saved.direction * grad}


def loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """The end of a language model."""
    return F.cross_entropy(hidden @ head, labels)


def main() -> None:
    """Compares the compiled loss with the eager one, and shows what was kept."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    head = torch.randn(32, 500, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 500, (64,))

    jitted = thunder.jit(loss)
    compiled, eager = jitted(hidden, head, labels), loss(hidden, head, labels)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled, (hidden, head)), torch.autograd.grad(eager, (hidden, head))
    )
    print(hookkit.report(jitted))

    smoothed = hookkit.explain(lambda x: F.cross_entropy(x, labels, label_smoothing=0.1), hidden)
    print(smoothed)


if __name__ == "__main__":
    main()
