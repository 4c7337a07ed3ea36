"""Tensors that a forward provider uses and that are no arguments of the call: a module's parameters, globals, closures.

They have names, as the provider's author would write them, under which the backward provider gives their gradients:
``"self.weight"``, ``"self.layers.0.bias"``, ``"WEIGHT"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, _interpret_call, wrap_const
from thunder.core.proxies import Proxy, TensorProxy
from torch.overrides import TorchFunctionMode

from hookkit.call import Call
from hookkit.engine.values.wrapping import leaves, tensors_in, unwrap_arguments
from hookkit.errors import GradientError, HookError
from hookkit.rule import Rule

__all__ = ["OUTSIDE", "Uses", "gets_gradients", "name_of", "outside", "parameters_of", "refuse_missing"]

OUTSIDE = "hookkit_outside"  # the keyword under which an opaque call is given what its forward provider uses besides

_MODULE_DICTS = ("_parameters", "_buffers", "_modules", "__dict__")


def gets_gradients(rule: Rule[..., Any], call: Call) -> bool:
    """Whether a rule's backward provider is asked for gradients of what the forward uses besides its arguments.

    Not if the rule stands for an autograd Function, which in eager PyTorch has none but those of its arguments.
    """
    return rule.backward_provider is not None and call.function is None and not (rule.opaque_callee or rule.ships)


def outside(invocation: Any, free: Iterable[Proxy]) -> dict[str, TensorProxy]:
    """Of the tensors that a forward reads those that are no arguments, by name."""
    given = {p.name for p in tensors_in((invocation.call.args, invocation.call.kwargs))}
    roots = {id(w.provenance): n for n, w in invocation.named_arguments().items()}
    by_value = {_way(w.provenance): n for n, w in invocation.named_arguments().items()}
    found: dict[str, TensorProxy] = {}
    for proxy in free:
        if isinstance(proxy, TensorProxy) and proxy.name not in given:
            found.setdefault(name_of(proxy, roots, by_value), proxy)
    return found


def name_of(proxy: TensorProxy, roots: Mapping[int, str], by_value: Mapping[str, str]) -> str:
    """How a provider names a tensor, from how the interpreter came by it."""
    parts: list[str] = []
    record: Any = proxy.history
    while isinstance(record, ProvenanceRecord):
        root = roots.get(id(record)) or by_value.get(_way(record))
        if root is not None:
            return ".".join([root, *parts])
        if record.inst not in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR) or len(record.inputs) != 2:
            break
        holder, key = record.inputs[0], record.inputs[1].value
        if key == "cell_contents":
            return ".".join([_closed_over(holder), *parts])
        if key == "__globals__":
            return ".".join(parts)
        if key not in _MODULE_DICTS:
            parts.insert(0, str(key))
        record = holder
    return f"a tensor of the program ({proxy.name})"


def _way(record: ProvenanceRecord) -> str:
    """How the interpreter came by a value; the same for two reads of it.

    The records' own ``str`` asks for their hashes, which from Python 3.13 on instructions do not have.
    """
    way: list[str] = []
    records = [record]
    known: dict[int, int] = {}
    while records:  # each record once: values that many others lead to would be written out again and again
        current = records.pop()
        if id(current) in known:
            way.append(f"#{known[id(current)]}")
            continue
        known[id(current)] = len(known)
        value = current.value if isinstance(current.value, int | str | None) else id(current.value)
        way.append(f"{current.inst} {value!r} {current.output_idx} {current.output_key!r} {len(current.inputs)}")
        records.extend(current.inputs)
    return ", ".join(way)


def _closed_over(record: ProvenanceRecord) -> str:
    """The name of a variable that a function closes over: item ``i`` of the function's ``__closure__``."""
    closure, index = record.inputs
    code = getattr(closure.inputs[0].value, "__code__", None)
    return code.co_freevars[index.value] if code is not None else f"closure variable {index.value}"


def parameters_of(invocation: Any) -> dict[str, TensorProxy]:
    """The parameters, of modules among a call's arguments, that an opaque call may give gradients to."""
    found: dict[str, TensorProxy] = {}
    for name, wrapped in invocation.named_arguments().items():
        if not isinstance(wrapped.value, torch.nn.Module):
            continue
        for path, parameter in wrapped.value.named_parameters():
            if parameter.requires_grad:
                held = wrapped
                for part in path.split("."):
                    held = _interpret_call(getattr, held, wrap_const(part))
                ((proxy,), _) = unwrap_arguments((held,), {})
                found[f"{name}.{path}"] = proxy
    return found


def refuse_missing(rule: Rule[..., Any], call: Call, used: Iterable[str], gradients: Any) -> None:
    """Refuse a backward that says nothing of a tensor that requires grad and that the forward used.

    Raises:
        GradientError: naming the tensor.
    """
    given = gradients if isinstance(gradients, dict) else {}
    missing = [name for name in used if name not in given]
    if missing:
        named = " and ".join(missing)
        raise GradientError(
            f"{rule.described('forward provider')} for {call} uses {named}, which requires grad and is no argument of "
            f"the call, and {rule.described('backward provider')} returned no gradient for it, which would be lost. "
            f"Return it by name, {{{missing[0]!r}: ...}}, beside those of the arguments; None says that there is none. "
            "What has no such name has to be passed as an argument."
        )


class Uses(TorchFunctionMode):
    """Notes, while a forward provider runs, which tensors it uses that require grad and are no arguments.

    Attributes:
        names: those that are parameters of modules among the arguments.
    """

    def __init__(self, rule: Rule[..., Any], call: Call, by_name: Mapping[str, Any], known: Iterable[Any]) -> None:
        super().__init__()
        self._rule, self._call = rule, call
        self._known = {id(t) for t in known}
        self._modules = {n: m for n, m in by_name.items() if isinstance(m, torch.nn.Module)}
        self.names: dict[str, None] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not torch.Tensor.detach and any(isinstance(r, torch.Tensor) for r in leaves(result)):
            for value in leaves((list(args), kwargs or {})):
                if isinstance(value, torch.Tensor) and id(value) not in self._known:
                    self._note(value)
        return result

    def _note(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if not value.requires_grad:
                return
        names = [
            f"{name}.{path}" for name, m in self._modules.items() for path, p in m.named_parameters() if p is value
        ]
        if not names:
            raise HookError(
                f"{self._rule.described('forward provider')} for {self._call} runs as one opaque operator, which gives "
                f"gradients to its arguments and to parameters of modules among them, and it uses another tensor that "
                f"requires grad ({type(value).__name__} of shape {list(value.shape)}): its gradient would be lost. "
                "Pass the tensor as an argument, or detach it; a parameter of a module, or a global of the program, "
                "gets its gradient by name where the call can be traced."
            )
        self.names[names[0]] = None
