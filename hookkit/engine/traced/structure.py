"""Whether two recorded calls do the same: their operations, with the tensors numbered in the order of their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.devices import Device
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy

from hookkit.engine.trace.composite import Composite
from hookkit.engine.values.wrapping import PLAIN

__all__ = ["structure_of"]


def structure_of(composite: Composite, needs: Sequence[bool]) -> tuple[Any, ...]:
    """What two composites have in common if they do the same with inputs of the same metadata.

    Args:
        composite: the recorded operations.
        needs: for each of its inputs whether it requires grad.

    Returns:
        A hashable value. Objects in it that are no plain values stand for themselves alone, by their identity.
    """
    return (tuple(needs), *_of_composite(composite))


def _of_composite(composite: Composite) -> tuple[Any, ...]:
    return _Numbering(composite.explicit and composite.is_node).of_composite(composite)


class _Numbering:
    """Numbers tensors in the order in which they are met.

    Args:
        is_node: whether it does not matter which operations run with grad mode off, because the call has a backward.
    """

    def __init__(self, is_node: bool) -> None:
        self._is_node = is_node
        self._numbers: dict[str, int] = {}

    def of_composite(self, composite: Composite) -> tuple[Any, ...]:
        backward = composite.backward
        return (
            self.of(tuple(composite.inputs)),
            tuple(map(self._of_operation, composite.forward)),
            self.of(tuple(composite.outputs)),
            tuple(getattr(o, "requires_grad", False) for o in composite.outputs),
            self.of(tuple(composite.output_gradients)),
            None if backward is None else tuple(map(self._of_operation, backward)),
            self.of(tuple(composite.input_gradients)),
            (composite.explicit, composite.is_node, composite.materializes, composite.tracked_count),
        )

    def of(self, value: Any) -> Any:
        """A value in which tensors are numbers."""
        if isinstance(value, Proxy):
            return self._of_proxy(value)
        if isinstance(value, tuple | list):
            return (type(value), tuple(map(self.of, value)))
        if isinstance(value, dict):
            return (dict, tuple((self.of(k), self.of(v)) for k, v in value.items()))
        if isinstance(value, slice):
            return (slice, self.of((value.start, value.stop, value.step)))
        if isinstance(value, (*PLAIN, dtypes.dtype, Device)):
            return (type(value), str(value))  # 0.0 and -0.0 differ, and True and 1
        return ("object", id(value))

    def _of_proxy(self, proxy: Proxy) -> tuple[Any, ...]:
        known = self._numbers.get(proxy.name)
        if known is not None:
            return ("tensor", known)
        number = self._numbers[proxy.name] = len(self._numbers)
        if not isinstance(proxy, TensorProxy):
            return ("proxy", type(proxy), number, proxy.name)
        detached = not self._is_node and ProxyTag.DETACHED_AUTOGRAD_GRAPH in proxy.tags
        return ("tensor", number, tuple(proxy.shape), str(proxy.dtype), str(proxy.device), detached)

    def _of_operation(self, bsym: Any) -> tuple[Any, ...]:
        meta = bsym.sym.meta
        symbol: tuple[Any, ...]
        beneath: tuple[Any, ...] = ()
        if not isinstance(meta, Composite):
            symbol = (bsym.sym.id, bsym.sym.name, id(bsym.sym.executor))
            beneath = tuple(map(self._of_operation, bsym.subsymbols))
        elif (region := getattr(meta, "region", None)) is not None:
            symbol = ("region", id(region))
        else:  # its own names; in a copy they are those of the original
            symbol = ("call", _of_composite(meta))
        return (symbol, self.of(bsym.args), self.of(bsym.kwargs), self.of(bsym.output), beneath)
