"""The arguments of a call by name, and the gradients of a backward provider by argument."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from thunder.core.proxies import TensorProxy

from hookkit.call import Call
from hookkit.engine.values.wrapping import Slot, is_container, leaves
from hookkit.errors import GradientError
from hookkit.rule import Rule
from hookkit.targets import signature_of

__all__ = ["Bound"]

_TENSORS = (TensorProxy, Slot)


def _identity(tensor: Any) -> Any:
    return tensor.name if isinstance(tensor, TensorProxy) else tensor


@attrs.define(eq=False)
class Bound:
    """A call's arguments, by position and by name.

    Attributes:
        call: the call.
        names: for each positional argument the name of its parameter, or ``"args[2]"`` for one of ``*args``, or
            ``"argument 2"`` where Python does not know the names.
        by_name: the arguments by parameter name; ``*args`` as a tuple.
        omitted: the names of the parameters that are left at their defaults.
        outside: tensors that the forward uses and that are no arguments, by name: ``"self.weight"``.
        named: what messages call it; by default as the call.
    """

    call: Call
    names: tuple[str, ...]
    by_name: dict[str, Any]
    omitted: tuple[str, ...] = ()
    outside: dict[str, Any] = attrs.field(factory=dict)
    named: str = ""

    @classmethod
    def of(cls, rule: Rule[..., Any], call: Call) -> Bound:
        """Bind a call's arguments to the signature of what it calls, or else of the forward provider."""
        signature = signature_of(rule.forward) if rule.forward is not None else signature_of(call.callable)
        if signature is not None and rule.pass_call and rule.forward is not None:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        try:
            bound = signature.bind(*call.args, **call.kwargs) if signature is not None else None
        except TypeError:
            bound = None  # running the forward raises what Python raises
        if bound is None or signature is None:
            return cls(call, tuple(f"argument {i}" for i in range(len(call.args))), dict(call.kwargs))
        names: list[str] = []
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                rest = len(call.args) - len(names)
                names.extend(f"{parameter.name}[{i}]" for i in range(rest))
            elif parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            ) and len(names) < len(call.args):
                names.append(parameter.name)
        by_name = {
            k: v
            for k, v in bound.arguments.items()
            if signature.parameters[k].kind is not inspect.Parameter.VAR_KEYWORD
        }
        for k, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                by_name.update(bound.arguments.get(k, {}))
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        omitted = [n for n, p in signature.parameters.items() if n not in by_name and p.kind not in variadic]
        return cls(call, tuple(names), by_name, tuple(omitted))

    def needs(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """By parameter name, whether a gradient is needed; a tuple of bools for ``*args`` and other containers."""
        wanted = {_identity(i) for i in inputs}

        def need(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(need(v) for v in value)
            return any(_identity(t) in wanted for t in leaves(value) if isinstance(t, _TENSORS))

        named = {**self.outside, **self.by_name}
        return {**dict.fromkeys(self.omitted, False), **{name: need(value) for name, value in named.items()}}

    def pair_gradients(self, rule: Rule[..., Any], result: Any) -> list[tuple[str, Any, Any]]:
        """Put each gradient beside its tensor.

        Raises:
            GradientError: if there are too few or too many, or names or structure do not fit.
        """
        where = f"{rule.described('backward provider')} for {self.named or self.call}"
        if result is None and not rule.ships:
            raise GradientError(f"{where} returned None: is its return statement missing? {{}} says: no gradients")
        if isinstance(result, dict):
            named = {**self.outside, **self.by_name}
            unknown = [k for k, v in result.items() if k not in named and v is not None and not self._is_frozen(k)]
            if unknown:
                raise GradientError(
                    f"{where} returned a gradient for {unknown[0]!r}, which is no argument of the call, and no tensor "
                    f"that the forward provider uses besides; expected names among {sorted(named)}"
                )
            return [
                pair
                for name, gradient in result.items()
                if name in named
                for pair in self._match(where, name, named[name], gradient, rule)
            ]
        items = tuple(result) if isinstance(result, tuple | list) else (result,)
        count = len(self.call.args)
        if len(items) > count and all(g is None for g in items[count:]):
            items = items[:count]
        if len(items) != count:
            raise GradientError(
                f"{where} returned an incorrect number of gradients (expected {count}, got {len(items)}); "
                "return one for each positional argument, None for those that need none"
            )
        return [
            pair
            for name, value, gradient in zip(self.names, self.call.args, items, strict=True)
            for pair in self._match(where, name, value, gradient, rule)
        ]

    def _is_frozen(self, name: str) -> bool:
        """Whether a name is that of a module's parameter, or buffer, that requires no grad."""
        root, _, path = name.partition(".")
        module = self.by_name.get(root)
        if not isinstance(module, torch.nn.Module):
            return False
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        return path in tensors and not tensors[path].requires_grad

    def _match(
        self, where: str, label: str, value: Any, gradient: Any, rule: Rule[..., Any]
    ) -> list[tuple[str, Any, Any]]:
        if gradient is None:
            return []
        if isinstance(value, _TENSORS):
            return [(label, value, gradient)]
        if rule.track == "tree" and is_container(value):
            if isinstance(value, dict) and isinstance(gradient, dict):
                items = [(f"{label}[{k!r}]", value[k], g) for k, g in gradient.items() if k in value]
            elif isinstance(value, tuple | list) and isinstance(gradient, tuple | list):
                if len(value) != len(gradient):
                    raise GradientError(
                        f"{where} returned {len(gradient)} gradients for {label}; expected {len(value)}, one for each "
                        "item"
                    )
                items = [(f"{label}[{i}]", v, g) for i, (v, g) in enumerate(zip(value, gradient, strict=True))]
            else:
                raise GradientError(
                    f"{where} returned {type(gradient).__name__} as the gradient of {label}; "
                    f"expected {type(value).__name__}, with one gradient for each item"
                )
            return [pair for item in items for pair in self._match(where, item[0], item[1], item[2], rule)]
        raise GradientError(
            f"{where} returned a gradient different from None for {label}, which is "
            f"{type(value).__name__} and no tensor; return None for it"
        )
