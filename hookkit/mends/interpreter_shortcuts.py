"""What thunder's interpreter does by interpreting Python code of its own, done at once while a provider runs.

A global, an operator on a tensor, a tuple taken apart: thunder interprets a function of several lines for each, and
most of the time that a small Function takes to trace goes there. What comes out is the same value with the same
provenance. The program around the calls that hookkit takes over is interpreted as thunder does it.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from thunder.core import interpreter
from thunder.core.interpreter import BINARY_OP, INTERPRETER_SIGNALS, wrap_const
from thunder.core.proxies import TensorProxy

from hookkit.engine.interpreter import call_log
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["MENDS", "apply_operator", "look_up_global", "unpack_sequence"]

_METHODS = {
    BINARY_OP.ADD: "add",
    BINARY_OP.MATMUL: "matmul",
    BINARY_OP.MUL: "mul",
    BINARY_OP.POW: "pow",
    BINARY_OP.SUB: "sub",
    BINARY_OP.TRUEDIV: "truediv",
}


def look_up_global(stock: Callable[..., Any], namespace: Any, name: Any) -> Any:
    """The value of a global name; of thunder's and hookkit's own code, which no program changes, as a constant.

    Args:
        stock: ``thunder.core.interpreter.globals_lookup``.
        namespace: the wrapped globals of the code that is interpreted.
        name: the wrapped name.
    """
    if not call_log.inside_a_call() or not _is_own(namespace.value.get("__name__")):
        return stock(namespace, name)
    names = namespace.value
    value = names.get(name.value, names)
    if value is names:
        value = getattr(builtins, name.value, names)
    return stock(namespace, name) if value is names else wrap_const(value)


def _is_own(module: str | None) -> bool:
    return module is not None and (module == interpreter.__name__ or module.startswith("hookkit."))


def apply_operator(stock: Callable[..., Any], stack: Any, op: BINARY_OP, a: Any, b: Any) -> Any:
    """Put the value of an arithmetic operator on the stack; for tensors, that of the method that it stands for.

    Args:
        stock: ``thunder.core.interpreter._binary_op``.
        stack: the interpreter's stack.
        op: the operator.
        a: the wrapped left operand.
        b: the wrapped right operand.
    """
    name = _METHODS.get(op)
    if name is not None and call_log.inside_a_call():
        if isinstance(a.value, TensorProxy):
            result = interpreter._interpret_call(getattr(type(a.value), f"__{name}__"), a, b)
        elif isinstance(b.value, TensorProxy) and type(a.value) in (int, float):
            result = interpreter._interpret_call(getattr(type(b.value), f"__r{name}__"), b, a)
        else:
            return stock(stack, op, a, b)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        if result.value is not NotImplemented:
            stack.append(result.value)
            return None
    return stock(stack, op, a, b)


def unpack_sequence(stock: Callable[..., Any], inst: Any, /, stack: Any, **state: Any) -> Any:
    """Take a tuple or a list apart.

    Args:
        stock: thunder's handler of the instruction ``UNPACK_SEQUENCE``.
        inst: the instruction; its argument is how many items there must be.
        stack: the interpreter's stack, the sequence on top.
        **state: the rest of the interpreter's state.
    """
    sequence = stack.getitem_wrapped(-1) if call_log.inside_a_call() else None
    if sequence is None or type(sequence.value) not in (tuple, list) or len(sequence.value) != inst.arg:
        return stock(inst, stack=stack, **state)
    stack.pop_wrapped()
    sequence.track_items()
    stack.extend(reversed(sequence.item_wrappers))
    return None


_SLOWER = "programs take longer to compile"
MENDS = [
    Mend(
        "time to interpret a Function",
        "A global, an operator on a tensor and a tuple taken apart are each interpreted as several lines of Python.",
        program="",
        stock="",
        eager="",
        patches=(
            Patch(
                "thunder.core.interpreter:globals_lookup",
                around(look_up_global),
                _SLOWER,
                takes=("globals_dict, name",),
            ),
            Patch("thunder.core.interpreter:_binary_op", around(apply_operator), _SLOWER, takes=("stack, op, a, b",)),
            Patch(
                "thunder.core.interpreter:_default_opcode_handler_map[UNPACK_SEQUENCE]",
                around(unpack_sequence),
                _SLOWER,
                takes=("inst, stack, **kwargs",),
            ),
        ),
    )
]
