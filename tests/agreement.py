"""The one comparison of a compiled program with the eager one that tests use."""

from collections.abc import Callable, Iterator
from typing import Any

import thunder
import torch

__all__ = ["assert_agrees", "assert_same"]


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested containers, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)


def structure_of(tree: Any) -> Any:
    """A tree with the metadata of a tensor in its place."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), tree.requires_grad
    if isinstance(tree, dict):
        return {k: structure_of(v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree), [structure_of(v) for v in tree]
    return tree


def run(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor | None]]:
    """The output of a function, and the gradient of each of its inputs."""
    inputs = tuple(
        i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, torch.Tensor) else i for i in inputs
    )
    output = function(*inputs)
    roots = [t for t in tensors_of(output) if t.requires_grad]
    leaves = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if roots and leaves:
        weights = [torch.linspace(1, 2, r.numel(), dtype=r.dtype).reshape(r.shape) for r in roots]
        gradients = list(torch.autograd.grad(roots, leaves, weights, allow_unused=True))
    return output, gradients


def assert_same(found: Any, expected: Any) -> None:
    """Compares output and gradients: structure, dtypes, ``requires_grad``, values."""
    assert structure_of(found[0]) == structure_of(expected[0])
    for got, wanted in zip(tensors_of(found[0]), tensors_of(expected[0]), strict=True):
        torch.testing.assert_close(got, wanted)
    for got, wanted in zip(found[1], expected[1], strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


def assert_agrees(function: Callable[..., Any], *inputs: Any, eager: Callable[..., Any] | None = None) -> Any:
    """Compiles a function and compares it, and its gradients, with itself, or with another one, run eagerly.

    Returns the compiled function.
    """
    jitted = thunder.jit(function)
    assert_same(run(jitted, inputs), run(eager or function, inputs))
    return jitted
