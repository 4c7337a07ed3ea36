"""A quantiser with a straight-through estimator and a learned step.

What it shows: a plain function, which eager PyTorch differentiates to zero, and a rule that says what its gradient
should be under thunder, that of Esser et al., "Learned step size quantization" (2020); the same thing as a custom
Function, for which no rule is needed; that both agree. The gradient of the step is a sum over all elements: what the
backward returns has the step's shape.

Run it with ``python examples/cookbook/ste_quantiser.py``.
"""

from __future__ import annotations

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
from torch import Tensor

LOW, HIGH = -8, 7  # four bits


def quantise(x: Tensor, step: Tensor) -> Tensor:
    """Multiples of ``step``, from ``LOW`` to ``HIGH`` of them."""
    return torch.round(torch.clamp(x / step, LOW, HIGH)) * step


def straight_through(x: Tensor, step: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients: that of x passes inside the range; that of step is the rounding error, or the bound outside."""
    level = x / step
    inside = (level > LOW) & (level < HIGH)
    rounded = torch.round(torch.clamp(level, LOW, HIGH))
    return grad * inside, (grad * torch.where(inside, rounded - level, rounded)).sum()


@hookkit.rule(quantise)
def quantise_rule(x: Tensor, step: Tensor):
    return quantise(x, step), hookkit.save(x=x, step=step)  # inside its own rule the target is the real one


@quantise_rule.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    grad_x, grad_step = straight_through(saved.x, saved.step, grad)
    return {"x": grad_x, "step": grad_step}


class Quantise(torch.autograd.Function):
    """The same, as people write it for eager PyTorch."""

    @staticmethod
    def forward(ctx, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return quantise(x, step)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return straight_through(*ctx.saved_tensors, grad)


def main() -> None:
    """The rule under thunder against the Function in eager PyTorch, and the Function in both."""
    torch.manual_seed(0)
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    step = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(100, dtype=torch.float64)
    expected = torch.autograd.grad(Quantise.apply(x, step), (x, step), weights)
    for program in (lambda x, step: quantise(x, step), lambda x, step: Quantise.apply(x, step)):
        jitted = thunder.jit(program)
        torch.testing.assert_close(torch.autograd.grad(jitted(x, step), (x, step), weights), expected)
        print(hookkit.report(jitted))


if __name__ == "__main__":
    main()
