"""What a tensor of a program is as an object of Python: of which class, which attributes it has, which other it is.

In a traced program a tensor is a ``TensorProxy``. Asked for its class thunder tells that one's, and of a program's
input that comes by two ways there are two. Here the program is told what it would see of the tensor itself, and
of a number that a tensor holds what it would see of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from thunder.core import interpreter, jit_ext
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import get_interpreterruntimectx, unwrap, wrap_const
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.trace import TraceCtx

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter import cache_guards
from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.interpreter.reasons import user_source
from hookkit.engine.trace import gradflow
from hookkit.errors import HookError
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "forget", "is_same", "lookaside", "note"]

# for each name of a proxy that stands for a tensor which was there before: the tensor, and the wrapped proxy
_inputs: weakref.WeakKeyDictionary[TraceCtx, dict[str, tuple[torch.Tensor, Any]]] = weakref.WeakKeyDictionary()


def note(trace: TraceCtx, tensor: torch.Tensor, wrapped: Any) -> None:
    """A tensor that was there before is replaced, in the program that is traced, by a proxy."""
    _inputs.setdefault(trace, {}).setdefault(wrapped.value.name, (tensor, wrapped))


def forget(trace: TraceCtx) -> None:
    """Let go of the tensors of a trace that is finished, which itself is kept."""
    _inputs.pop(trace, None)


def lookaside(function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a question about a tensor as an object, or None if the call is another one.

    Args:
        function: what the program calls.
        args: the wrapped arguments.
    """
    if isinstance(function, weakref.ref):
        return _referent(function)
    if not args or not isinstance(args[0].value, TensorProxy | NumberProxy) or _is_thunders_own():
        return None
    try:
        question = (_QUESTIONS if isinstance(args[0].value, TensorProxy) else _QUESTIONS_OF_NUMBERS).get(function)
    except TypeError:  # unhashable
        return None
    return question(*map(unwrap, args)) if question is not None else None


def _is_thunders_own() -> bool:
    """Whether it is thunder's code that asks, to find the method that an operator stands for."""
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is not None and frame.module in (interpreter.__name__, jit_ext.__name__)


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_: wrap_const(value)


def _class_of(tensor: TensorProxy, *rest: Any) -> Callable[..., Any] | None:
    if rest:
        return None
    _note_dependence(tensor)
    return _answer(type(_itself(tensor)))


def _is_instance(tensor: TensorProxy, classes: Any) -> Callable[..., Any]:
    each = classes if isinstance(classes, tuple) else (classes,)
    if not all(isinstance(c, type) and issubclass(torch.Tensor, c) for c in each):
        _note_dependence(tensor)
    try:
        return _answer(isinstance(_itself(tensor), classes))
    except TypeError as error:
        return _raising(error)


def _has_attribute(tensor: TensorProxy, name: Any) -> Callable[..., Any]:
    try:
        return _answer(hasattr(_itself(tensor), name))
    except (RuntimeError, TypeError) as error:  # `imag` of real numbers, say
        return _raising(error)


def _attribute(tensor: TensorProxy, name: Any, *default: Any) -> Callable[..., Any] | None:
    return _class_of(tensor) if name == "__class__" else None


def _unknown_attribute(tensor: TensorProxy, name: str) -> Callable[..., Any] | None:
    if name == "_base":
        return _raising(
            HookError(
                f"_base of a tensor is not supported inside a program compiled by thunder (at {user_source()}), in "
                "which a view may be a tensor of its own. Ask outside the program, or inside a torch.autograd.Function."
            )
        )
    if name != "is_leaf":
        return None
    if not gradflow.requires_grad(_trace(), tensor):
        return _answer(True)
    found = _inputs.get(_trace(), {}).get(tensor.name)
    if found is None or isinstance(found[0], torch.nn.Parameter):
        return _answer(found is not None)
    return _raising(
        HookError(
            f"is_leaf of an argument that requires grad is not supported inside a program compiled by thunder (at "
            f"{user_source()}), which would take the answer for one that always holds. Ask outside the program."
        )
    )


_QUESTIONS: dict[Any, Callable[..., Callable[..., Any] | None]] = {
    type: _class_of,
    isinstance: _is_instance,
    hasattr: _has_attribute,
    getattr: _attribute,
    TensorProxy.__getattr__: _unknown_attribute,
}


def _class_of_number(number: NumberProxy, *rest: Any) -> Callable[..., Any] | None:
    return None if rest else _answer(number.python_type)


def _is_instance_of_number(number: NumberProxy, classes: Any) -> Callable[..., Any]:
    try:
        return _answer(isinstance(number.python_type(0), classes))
    except TypeError as error:
        return _raising(error)


# numbers that tensors hold
_QUESTIONS_OF_NUMBERS: dict[Any, Callable[..., Callable[..., Any] | None]] = {
    type: _class_of_number,
    isinstance: _is_instance_of_number,
}


def _raising(error: Exception) -> Callable[..., Any]:
    return lambda *_: raise_in_program(error)


def _trace() -> TraceCtx:
    return jit_ext.get_jit_ctx().computation_trace


def _itself(tensor: TensorProxy) -> torch.Tensor:
    """The tensor for which a proxy stands; for one that the program makes an empty one of its dtype and device."""
    found = _inputs.get(_trace(), {}).get(tensor.name)
    if found is not None:
        return found[0]
    return torch.empty(0, dtype=to_torch_dtype(tensor.dtype), device=to_torch_device(tensor.device))


def _note_dependence(tensor: TensorProxy) -> None:
    """The program goes by the class of an input: what it is called with is compared next time."""
    if tensor.name in _inputs.get(_trace(), {}):
        cache_guards.note_call(torch.Tensor)


def is_same(stock: Callable[..., Any], inst: Any, /, stack: Any, **state: Any) -> Any:
    """Whether two values are one object; a tensor that comes by two ways is.

    Args:
        stock: thunder's handler of the instruction ``IS_OP``.
        inst: the instruction; its argument is whether the answer is inverted.
        stack: the interpreter's stack, with the two values on top.
        **state: the rest of the interpreter's state.
    """
    a, b = stack[-1], stack[-2]
    if isinstance(a, TensorProxy) and isinstance(b, TensorProxy):
        inputs = _inputs.get(_trace(), {}) if jit_ext._jit_ctx.get(None) is not None else {}
        if a.name in inputs and b.name in inputs:
            del stack[-2:]
            stack.append((inputs[a.name][0] is inputs[b.name][0]) is not bool(inst.arg))
            return None
    return stock(inst, stack=stack, **state)


def _has_aliases(trace: TraceCtx) -> bool:
    """Whether one tensor has two names."""
    tensors = [id(tensor) for tensor, _ in _inputs.get(trace, {}).values()]
    return len(set(tensors)) < len(tensors)


def _referent(reference: weakref.ref[Any]) -> Callable[..., Any] | None:
    """What a weak reference to a tensor gives a program: the tensor, if the program has come to it in another way.

    The prologue cannot follow a weak reference. A module of ``torch.nn`` (``RNNBase._weights_have_changed``) compares
    what it leads to with its parameters.
    """
    tensor = reference()
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, TensorProxy):
        return None
    for held, wrapped in _inputs.get(_trace(), {}).values():
        if held is tensor:
            return lambda: wrapped
    return _raising(
        HookError(
            f"the program comes to a tensor by a weak reference (at {user_source()}), which a compiled program cannot "
            "follow. Let it read the tensor from an attribute, or take it as an argument."
        )
    )


MENDS = [
    Mend(
        "which tensor it is",
        "A tensor that a program comes to by two ways is two objects.",
        program="""
x = torch.ones(1)
print(thunder.jit(lambda x, y: x * (2 if x is y else 3))(x, x).tolist())
""",
        stock="[3.0]",
        eager="[2.0]",
        patches=(
            Patch(
                "thunder.core.interpreter:_default_opcode_handler_map[IS_OP]",
                around(is_same),
                "of a tensor that a program comes to by two ways, the two are not the same object",
                takes=("inst, stack, **kwargs",),
                concerns=_has_aliases,
            ),
        ),
    ),
    Mend(
        "of which class a tensor is",
        "The class of a tensor in a program is that of thunder's stand-in, and a weak reference to a tensor, as in "
        "`torch.nn.LSTM`, is an error.",
        program="""
print(thunder.jit(lambda x: x * (2 if type(x) is torch.Tensor else 3))(torch.ones(1)).tolist())
""",
        stock="[3.0]",
        eager="[2.0]",
        extension=Extension(before_rules=lookaside, finished=forget),
    ),
]
