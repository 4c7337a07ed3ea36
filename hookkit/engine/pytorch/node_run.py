"""Calling the backward of a custom Function without PyTorch's engine, which must not notice.

The engine cannot be stopped at a leaf without ``inputs=``, and with that it says that checkpoints are not valid
(``torch.autograd._is_checkpoint_valid``), although the program's own backward may be one in which they are. So the node
is called: what ``PyNode`` (torch/csrc/autograd/python_function.cpp) makes of undefined gradients and of what the
backward returns, and the checks of ``validate_outputs`` (torch/csrc/autograd/engine.cpp), are here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookkit.engine.values.wrapping import Slot, TensorMetadata, broadcasts_to

__all__ = ["apply", "materializes_grads", "set_materialize_grads", "validated"]

_without_zeros: weakref.WeakSet[Any] = weakref.WeakSet()


def set_materialize_grads(ctx: Any, value: bool) -> None:
    """``FunctionCtx.set_materialize_grads``; what was set cannot be read from a node, so it is noted."""
    ctx.materialize_grads = value
    if torch.compiler.is_compiling():  # by Dynamo, which then goes on as if this were PyTorch's own
        return
    (_without_zeros.discard if value else _without_zeros.add)(ctx)


def materializes_grads(node: Any) -> bool:
    """Whether the backward of a custom Function's node gets zeros, and not None, for a gradient that is undefined."""
    quick = not _without_zeros.data  # type: ignore[attr-defined]  # the set itself: this is asked at every step
    return quick or node not in _without_zeros


def apply(
    node: Any, gradients: Sequence[torch.Tensor | None], outputs: Sequence[TensorMetadata | None]
) -> tuple[Any, ...]:
    """What a Function's backward returns.

    Args:
        node: the Function's node.
        gradients: for each of its outputs the gradient, or None.
        outputs: the metadata of each output; None for one that is no tensor.
    """
    if any([g is None for g in gradients]) and materializes_grads(node):
        gradients = [o.zeros() if g is None and o is not None else g for g, o in zip(gradients, outputs, strict=True)]
    result = node.apply(*gradients)
    node.maybe_clear_saved_tensors()  # unless the graph is kept
    return result if isinstance(result, tuple) else (result,)


def validated(
    node: Any, found: tuple[Any, ...], arguments: Sequence[Any], inputs: Mapping[int, TensorMetadata]
) -> dict[int, torch.Tensor | None]:
    """What a Function's backward returned, as the engine would hand it on, by the index of the slot.

    Args:
        node: the Function's node.
        found: what its backward returned.
        arguments: what it was applied to, a slot for each tensor.
        inputs: by index the metadata of each slot that gets a gradient.
    """
    expected = len(arguments)
    if len(found) > expected and all(g is None for g in found[expected:]):
        found = found[:expected]
    if len(found) != expected:
        raise RuntimeError(
            f"function {node.name()} returned an incorrect number of gradients (expected {expected}, got {len(found)})"
        )
    result: dict[int, torch.Tensor | None] = dict.fromkeys(inputs)
    for place, (argument, gradient) in enumerate(zip(arguments, found, strict=True)):
        if gradient is None:
            continue
        if not isinstance(gradient, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(gradient).__name__})")
        if not isinstance(argument, Slot | torch.Tensor):
            raise RuntimeError(
                f"function {node.name()} returned a gradient different from None at position {place + 1}, but the "
                "corresponding forward input was not a Variable"
            )
        if isinstance(argument, Slot) and argument.index in result:
            index: int = argument.index
            fitted, present = _fitted(node, place, inputs[index], gradient), result[index]
            result[index] = fitted if present is None else present + fitted
    return result


def _fitted(node: Any, place: int, like: TensorMetadata, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.shape == like.shape and gradient.dtype == like.dtype and gradient.device == like.device:
        return gradient
    if gradient.device != like.device:
        raise RuntimeError(
            f"Function {node.name()} returned an invalid gradient at index {place} - expected device {like.device} but "
            f"got {gradient.device}"
        )
    if gradient.shape != like.shape:
        if not broadcasts_to(like.shape, tuple(gradient.shape)):
            raise RuntimeError(
                f"Function {node.name()} returned an invalid gradient at index {place} - got {list(gradient.shape)} "
                f"but expected shape compatible with {list(like.shape)}"
            )
        gradient = gradient.sum_to_size(like.shape)
    if gradient.is_complex() and not like.dtype.is_complex:
        raise RuntimeError(
            f"Function {node.name()} returned an invalid gradient at index {place}: it is complex, the input is real"
        )
    return gradient.to(like.dtype)
