"""The guards that interpreting a call adds to the prologue, and which of them thunder's prologue can check.

A prologue reads each guarded value again, the way the program reached it (``unpack_inputs``,
thunder/core/jit_ext.py). Some ways it does not know; a call that depends on such a value is not traced.
"""

from __future__ import annotations

from types import GetSetDescriptorType
from typing import Any

from thunder.core.interpreter import ProvenanceRecord
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy

from hookkit.engine.interpreter.outside_tensors import name_of

__all__ = ["drop_changed", "drop_uncheckable", "mark", "uncheckable"]


def mark() -> int:
    """How many guards there are."""
    return len(get_jit_ctx()._constraints)


def uncheckable(since: int) -> list[str]:
    """The guards added since a mark that the prologue cannot check, in words."""
    return [_describe(c) for c in get_jit_ctx()._constraints[since:] if not _checkable(c)]


def drop_uncheckable(since: int) -> None:
    """Forget the guards, added since a mark for a call that is opaque after all, that could not be checked."""
    constraints = get_jit_ctx()._constraints
    constraints[since:] = [c for c in constraints[since:] if _checkable(c)]


def drop_changed(since: int, program: Any) -> None:
    """Forget the guards, added since a mark for a call that is opaque after all, of numbers that the call has changed.

    A counter of its own, say: it reads that when it runs, and the program would be compiled again at every call.

    Args:
        since: the mark.
        program: the function or module that is traced.
    """
    constraints = get_jit_ctx()._constraints
    constraints[since:] = [c for c in constraints[since:] if not any(_has_changed(p, program) for p in c[1:])]


def _has_changed(guarded: Any, program: Any) -> bool:
    if not isinstance(guarded, NumberProxy) or guarded.history is None:
        return False
    try:
        now = _value_of(guarded.history, program)
    except (LookupError, AttributeError, TypeError):  # what leads there is not as it was, or no way that is known
        return False
    return bool(now != guarded.value)


def _value_of(provenance: ProvenanceRecord, program: Any) -> Any:
    """What a provenance leads to now.

    Raises:
        LookupError: if it leads there in a way that is not known here.
    """
    instruction = getattr(provenance.inst, "opname", None) or getattr(provenance.inst, "value", None)
    if instruction == "INPUT_FN":
        return program
    if instruction == "CONSTANT":
        return provenance.value
    if instruction not in ("LOAD_ATTR", "BINARY_SUBSCR"):
        raise LookupError(instruction)
    holder, key = (_value_of(i, program) for i in provenance.inputs)
    return getattr(holder, key) if instruction == "LOAD_ATTR" else holder[key]


def _checkable(constraint: Any) -> bool:
    return all(_can_unpack(a.history) for a in constraint[1:] if isinstance(a, Proxy) and a.history is not None)


def _can_unpack(provenance: ProvenanceRecord) -> bool:
    if isinstance(getattr(provenance, "proxy", None), AnyProxy):
        return False
    instruction = getattr(provenance.inst, "opname", None) or getattr(provenance.inst, "value", None)
    if instruction in ("INPUT_ARGS", "INPUT_KWARGS", "INPUT_FN"):
        return True
    if instruction == "CONSTANT":
        return isinstance(provenance.value, int | str)
    if instruction in ("LOAD_ATTR", "BINARY_SUBSCR"):
        return all(_can_unpack(i) for i in provenance.inputs)
    if instruction == "OPAQUE":
        function, arguments = provenance.inputs[0], provenance.inputs[1]
        if getattr(function.value, "__name__", "") == "__getitem__":
            return all(_can_unpack(i) for i in arguments.inputs)
        return bool(function.value == GetSetDescriptorType.__get__) and _can_unpack(arguments.inputs[1])
    return False


def _describe(constraint: Any) -> str:
    return next((_in_words(guarded) for guarded in constraint[1:]), "a value")


def _in_words(guarded: Any) -> str:
    if isinstance(guarded, TensorProxy):
        return f"the tensor {name_of(guarded, {}, {})}"
    return str(guarded.value) if hasattr(guarded, "value") else repr(guarded)
