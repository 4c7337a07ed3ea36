"""Which tensors a call overwrites without PyTorch's counting it: finding that out where the call is tried out.

A kernel gets an address, and writes there; ``x.data`` and ``x.numpy()`` lead to memory, too. No version counter shows
it, so the memory is compared before and after. What follows from such writes for the program around the call is in
:mod:`hookkit.engine.opaque.overwritten`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

from hookkit.engine.interpreter.side_effects import WritesUndone
from hookkit.engine.pytorch.graph_run import EagerState, saved_by
from hookkit.engine.values.wrapping import leaves

__all__ = ["Watched", "Written", "kept_tensors", "share_memory", "written_in_backward"]


class Watched:
    """Tensors whose memory is watched while a call runs.

    Where they have data it is compared; where they have none, nothing but PyTorch's operations can write to them, and
    those say so.
    """

    def __init__(self, values: Sequence[Any], operations: WritesUndone) -> None:
        self._tensors = {i: v for i, v in enumerate(values) if _has_memory(v)}
        self._before = {i: _memory(v).clone() for i, v in self._tensors.items() if _has_data(v)}
        self._operations = operations
        operations.written.clear()

    def written(self) -> frozenset[int]:
        """The places of those that were written to since."""
        return frozenset(
            i
            for i, tensor in self._tensors.items()
            if _storage(tensor)._cdata in self._operations.written
            or (i in self._before and not torch.equal(_memory(tensor), self._before[i]))
        )


@attrs.frozen
class Written:
    """What a backward overwrites: the places of gradients that it is given, and of the call's arguments."""

    gradients: frozenset[int] = frozenset()
    arguments: frozenset[int] = frozenset()


def written_in_backward(
    state: EagerState | None, made: Sequence[Any], values: Sequence[Any], operations: WritesUndone, scale: float
) -> Written | Exception:
    """What the backward of a call overwrites; what it raises if it does not run.

    Args:
        state: what the call keeps for it.
        made: the results that require grad.
        values: the arguments of the call.
        operations: what sees the writes of PyTorch's operations.
        scale: the values of the gradients. A kernel that scales what it has may leave that out for ones.
    """
    if state is None:
        return Written()
    gradients = [torch.full_like(t, scale) for t in made]
    watched = Watched([*gradients, *values], operations)
    try:
        with torch.no_grad():
            state.backward(gradients)
    except Exception as error:  # what is wrong with it is said when it runs, as in eager
        return error.with_traceback(None)
    written, count = watched.written(), len(gradients)
    return Written(frozenset(i for i in written if i < count), frozenset(i - count for i in written if i >= count))


def kept_tensors(state: EagerState | None) -> list[torch.Tensor]:
    """What PyTorch's graph keeps for the backward of a call."""
    saved = [saved_by(node) for node in state.nodes()] if state is not None else []
    return [t for t in leaves(saved) if isinstance(t, torch.Tensor)]


def share_memory(a: Any, b: torch.Tensor) -> bool:
    """Whether a value is a tensor that shares memory with another one."""
    return isinstance(a, torch.Tensor) and torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _has_data(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _storage(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():  # a mode that refuses the storage of tensors without data
        return tensor.untyped_storage()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(_storage(tensor))
