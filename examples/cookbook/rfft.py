"""A function of PyTorch's that thunder lacks: ``torch.fft.rfft``, with forward, meta function and backward.

What it shows: an opaque rule with all three providers; a meta function that changes the dtype; a gradient of a
complex output. The short way is ``hookkit.rule(torch.fft.irfft, mode="opaque")`` below: it leaves metadata and gradient
to PyTorch. (So does a rule that ships, for every function of PyTorch's that thunder lacks.) Write the long way for
kernels of which PyTorch knows neither.

The gradient: ``y[k] = sum_t x[t] exp(-2πi k t / n)``, and PyTorch's gradient of a complex number is the conjugate
(docs/source/notes/autograd.rst, "Autograd for Complex Numbers"), so ``grad_x[t] = Re sum_k grad[k] exp(2πi k t / n)``.

Run it with ``python examples/cookbook/rfft.py``.
"""

from __future__ import annotations

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
from torch import Tensor


@hookkit.rule(torch.fft.rfft, mode="opaque")
def rfft(input: Tensor, n=None, dim: int = -1, norm=None, *, out=None):
    return torch.fft.rfft(input), hookkit.save(length=input.shape[-1])


@rfft.when
def _(input, n=None, dim=-1, norm=None, *, out=None):
    plain = n is None and norm is None and out is None and dim in (-1, input.ndim - 1)
    return plain or hookkit.decline("only whole transforms of the last dimension")


@rfft.meta
def _(input, n=None, dim=-1, norm=None, *, out=None):
    dtype = torch.complex128 if input.dtype == torch.float64 else torch.complex64
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2 + 1), dtype=dtype)


@rfft.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    missing = saved.length - grad.shape[-1]
    padded = torch.nn.functional.pad(grad, (0, missing))
    return {"input": torch.fft.ifft(padded).real * saved.length}


irfft = hookkit.rule(torch.fft.irfft, mode="opaque")


def power(signal: Tensor) -> Tensor:
    """The power spectrum."""
    return torch.fft.rfft(signal).abs().square()


def smooth(signal: Tensor) -> Tensor:
    """There and back, with half of each frequency."""
    return torch.fft.irfft(torch.fft.rfft(signal) * 0.5)


def main() -> None:
    """Compares with eager PyTorch, and with finite differences."""
    torch.manual_seed(0)
    for length in (7, 8):
        signal = torch.randn(2, length, dtype=torch.float64, requires_grad=True)
        jitted = thunder.jit(power)
        torch.testing.assert_close(jitted(signal), power(signal))
        assert torch.autograd.gradcheck(jitted, (signal,))
        print(hookkit.report(jitted))
    jitted = thunder.jit(smooth)
    torch.testing.assert_close(jitted(signal), smooth(signal))
    assert torch.autograd.gradcheck(jitted, (signal,))
    print(hookkit.report(jitted))


if __name__ == "__main__":
    main()
