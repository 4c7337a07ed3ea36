"""Operators of ``torch.library``: what was registered for one, as far as rules have a use for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

import attrs
import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from hookkit import compat

__all__ = ["Operator", "is_custom", "operator_of", "overload_of", "written"]


@attrs.frozen
class Operator:
    """An operator that a program calls.

    Attributes:
        overload: the operator itself.
        setup_context: what ``register_autograd`` was given under this name, or None.
        backward: the backward that ``register_autograd`` was given; None if there is none in Python.
        composite: the Python function that was registered as ``CompositeImplicitAutograd``, or None.
        registration: where torch looks for ``setup_context`` and ``backward``.

    Example:
        >>> import hookkit
        >>> def of_my_library(call):
        ...     return call.operator is not None and call.operator.overload.namespace == "mylib"
        >>> @hookkit.rule(hookkit.where(of_my_library), pass_call=True, register=False)
        ... def by_its_formula(call, *args):
        ...     return call.operator.composite(*args)
    """

    overload: OpOverload
    setup_context: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    composite: Callable[..., Any] | None = None
    registration: dict[str, Any] | None = attrs.field(default=None, repr=False)

    @property
    def is_python(self) -> bool:
        """Whether a call can be traced, in part at least."""
        return self.backward is not None or self.composite is not None

    @property
    def traced(self) -> list[Any]:
        """The functions that a trace of a call runs through, and where they are looked up."""
        parts = (self.setup_context, self.backward, self.composite, self.registration)
        return [part for part in parts if part is not None]

    def arrange(
        self, args: Sequence[Any], kwargs: dict[str, Any], constant: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as ``setup_context`` sees them: all that can be by position, with defaults.

        What does not fit stays as it is; torch refuses it.

        Args:
            args: the positional arguments of a call.
            kwargs: its keyword arguments.
            constant: makes of a default what ``args`` and ``kwargs`` hold.
        """
        positional, rest = list(args), dict(kwargs)
        for place, argument in enumerate(self.overload._schema.arguments):
            if place < len(positional):
                continue
            if argument.name not in rest:
                if not argument.has_default_value():
                    return tuple(args), kwargs
                rest[argument.name] = constant(argument.default_value)
            if not argument.kwarg_only:
                positional.append(rest.pop(argument.name))
        return tuple(positional), rest


def overload_of(function: Any) -> OpOverload | None:
    """The operator that a callable is: itself, the only one of a packet, or what ``custom_op`` returned."""
    if isinstance(function, CustomOpDef):
        return function._opoverload
    if isinstance(function, OpOverloadPacket):
        overloads = function.overloads()
        return getattr(function, overloads[0]) if len(overloads) == 1 else None
    return function if isinstance(function, OpOverload) else None


def operator_of(function: Any) -> Operator | None:
    """What was registered for the operator that a callable is; None if it is none, or one of PyTorch's own."""
    overload = overload_of(function)
    if overload is None or not is_custom(overload):
        return None
    composite = compat.composite_kernel(overload)
    if composite is not None:
        return Operator(overload, composite=composite)
    found = compat.autograd_registration(overload)
    if found is None:
        return Operator(overload)
    return Operator(overload, found._setup_context_fn, found._backward_fn, registration=vars(found))


def is_custom(function: Any) -> bool:
    """Whether a callable is an operator of ``torch.library`` that is not one of PyTorch's own."""
    if isinstance(function, OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    return isinstance(function, OpOverload) and function.namespace not in ("aten", "prim", "prims")


def written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator changes in place, by its schema; none for any other callable.

    ``torch._foreach_mul_`` and its like are functions that PyTorch makes of operators. Of lists of tensors without data
    it counts no changes, so that their schemas are asked, too.
    """
    overload = overload_of(function)
    if overload is None and isinstance(function, BuiltinFunctionType) and function.__name__.endswith("_"):
        packet = getattr(torch.ops.aten, function.__name__, None)
        overload = getattr(packet, packet.overloads()[0]) if packet is not None else None
    if overload is None:
        return []
    parameters = overload._schema.arguments
    given = [*zip(parameters, args, strict=False), *((p, kwargs[p.name]) for p in parameters if p.name in kwargs)]
    return [value for p, value in given if p.alias_info is not None and p.alias_info.is_write]
