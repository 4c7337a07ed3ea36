"""SciPy's ``expm`` as an opaque rule with an analytic backward.

What it shows: code that is not PyTorch at all in a compiled program; a meta function; a residual that is a NumPy array;
a gradient by a formula rather than by PyTorch. SciPy is in the ``test`` extra.

The gradient is the Fréchet derivative of ``expm`` at the transposed matrix, in the direction of the output gradient
(Al-Mohy and Higham, 2009, "Computing the Fréchet derivative of the matrix exponential").

Run it with ``python examples/cookbook/matrix_exponential.py``.
"""

from __future__ import annotations

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import scipy.linalg
import thunder
import torch
from torch import Tensor


def expm(matrix: Tensor) -> Tensor:
    """The matrix exponential, by SciPy. Eager PyTorch knows no gradient of it."""
    return torch.from_numpy(scipy.linalg.expm(matrix.detach().numpy()))


@hookkit.rule(expm, mode="opaque")
def expm_rule(matrix: Tensor):
    return expm(matrix), hookkit.save(transposed=matrix.detach().numpy().T.copy())


@expm_rule.meta
def _(matrix: Tensor):
    return torch.empty_like(matrix)


@expm_rule.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    return {"matrix": torch.from_numpy(scipy.linalg.expm_frechet(saved.transposed, grad.numpy(), compute_expm=False))}


def rotation(angles: Tensor) -> Tensor:
    """The rotation of three-space with these angles: the exponential of a skew matrix."""
    x, y, z = angles[0], angles[1], angles[2]
    zero = x * 0
    rows = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero])
    return expm(rows.reshape(3, 3))


def main() -> None:
    """Compares with PyTorch's own matrix exponential, and with finite differences."""
    torch.manual_seed(0)
    angles = torch.randn(3, dtype=torch.float64, requires_grad=True)
    jitted = thunder.jit(rotation)
    turned = jitted(angles)
    torch.testing.assert_close(turned @ turned.mT, torch.eye(3, dtype=torch.float64))
    assert torch.autograd.gradcheck(jitted, (angles,))

    matrix = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(thunder.jit(expm)(matrix), matrix, weights)
    (expected,) = torch.autograd.grad(torch.matrix_exp(matrix), matrix, weights)
    torch.testing.assert_close(gradient, expected)
    print(hookkit.report(jitted))


if __name__ == "__main__":
    main()
