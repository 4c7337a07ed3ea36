"""Attributes that a program assigns to its modules and objects: thunder writes some back afterwards, and loses others.

It forgets those of the outermost module, and all but the first assignment of a program to one object. And it reads the
hooks of the outermost module where they are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, NoneType
from typing import Any

import torch
from thunder.core import jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import Device
from thunder.core.interpreter import INTERPRETER_SIGNALS, PseudoInst, _interpret_call, unwrap, wrap_const
from thunder.core.proxies import Proxy

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter.attempt import is_made
from hookkit.errors import HookError
from hookkit.mends.mend import Mend
from hookkit.mends.written_globals import write_after
from hookkit.patch import Patch, around, around_method

__all__ = ["MENDS", "assign", "read_inputs", "set_attribute", "write_back"]

# by outermost module: the names of attributes that programs assign to it
_assigned: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()

# What a module has itself; a ``ThunderModule``, which is one, hands on to the one that it wraps what it lacks alone.
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training", *jit_ext.MODULE_MEMBER_DICT_ATTRS}

# what the code that thunder writes can assign
_WRITABLE = (Proxy, int, float, tuple, NoneType, Device)


def assign(stock: Callable[..., Any], obj: Any, name: Any, value: Any) -> Any:
    """``object.__setattr__`` of an object that has been assigned to before: noted, as the first time.

    That of a module of Python, which is the same function from Python 3.13 on, sets a global.

    Args:
        stock: ``_general_jit_object_setattr_lookaside`` in thunder/core/jit_ext.py. At the first time it replaces the
            object's ``__dict__``, and does not know the replacement afterwards.
        obj: the wrapped object.
        name: the wrapped name of the attribute.
        value: the wrapped value.
    """
    plain = unwrap(obj)
    sets_global = isinstance(plain, ModuleType)
    is_noted = hasattr(plain, "__dict__") and type(plain) not in jit_ext._TORCH_DYNAMIC_TYPES
    if not sets_global and (not is_noted or jit_ext.is_created_during_tracing(obj.provenance)):
        return stock(obj, name, value)
    attributes = _interpret_call(getattr, obj, wrap_const("__dict__"))
    if attributes is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return attributes
    if sets_global:
        return _interpret_call(dict.__setitem__, attributes, name, value)
    if attributes.original_value is attributes.nothing:
        return stock(obj, name, value)
    attributes.provenance.ext_flag |= jit_ext.EXT_FLAG_IS_MODULE_MEMBER_DICT
    return _interpret_call(dict.__setitem__, attributes, name, value)


def write_back(stock: Callable[..., Any], context: Any, epilogue: Any) -> None:
    """What a program has assigned is written back after it, to the outermost module as well.

    Args:
        stock: ``process_recorded_modifications`` in thunder/core/jit_ext.py. It leaves out an object for which no proxy
            stands.
        context: what is known of the program that is traced.
        epilogue: the trace of what runs after the program.

    Raises:
        HookError: if a value is assigned that cannot be written back.
    """
    outermost: Proxy | None = None
    for attributes, modifications in context._additional_outputs.items():
        if not _are_attributes(attributes.provenance):
            continue
        module = attributes.provenance.inputs[0]
        if is_made(module):  # as a function or an instance: nothing is to be written back
            continue
        for _, _, name, value in modifications:
            _check(name.value, value.value)
        if module.inst is PseudoInst.INPUT_FN:
            if outermost is None:
                outermost = Proxy(history=module)
                epilogue.add_name(outermost.name)
            module.proxy = outermost
            names = _assigned.setdefault(get_compile_data().fn, set())
            names.update(name.value for _, _, name, _ in modifications)
    stock(context, epilogue)
    write_after(epilogue)


def _are_attributes(provenance: Any) -> bool:
    """Whether something is the ``__dict__`` of an object."""
    of_object = provenance.inst is PseudoInst.LOAD_ATTR and provenance.inputs[1].inst is PseudoInst.CONSTANT
    return of_object and provenance.inputs[1].value == "__dict__"


def _check(name: str, value: Any) -> None:
    if not isinstance(value, _WRITABLE):
        raise HookError(
            f"the program assigns an object of the class {type(value).__name__} to the attribute {name!r} of a module "
            "or an object, which a compiled program cannot. Assign tensors or numbers, or do it outside of the "
            "compiled program."
        )


def set_attribute(module: Any, stock: Callable[..., Any], name: str, value: Any) -> None:
    """Set an attribute; one that a program assigns to, of the module that thunder has wrapped.

    Args:
        module: the ``ThunderModule``.
        stock: its own ``__setattr__``.
        name: the attribute's name.
        value: its value.
    """
    wrapped = module.__dict__.get("_modules", {}).get("_model")
    if wrapped is not None and name in _assigned.get(wrapped, ()):
        setattr(wrapped, name, value)
    else:
        stock(module, name, value)


def read_inputs(stock: Callable[..., Any], context: Any, *traces: Any) -> Any:
    """The prologue of a program reads what the outermost module has itself, its hooks, from that module.

    Args:
        stock: ``unpack_inputs`` in thunder/core/jit_ext.py. It reads from the module that thunder makes, except for
            what can be called.
        context: what is known of the program that is traced.
        *traces: the prologue, and what it hands on.
    """
    seen: set[int] = set()
    guarded = [p.history for c in context._constraints for p in c[1:] if isinstance(p, Proxy) and p.history is not None]
    handed_on = [p.proxy.history for found in traces[1:3] for p in found if p.proxy.history is not None]
    pending = guarded + handed_on
    while pending:
        provenance = pending.pop()
        if id(provenance) in seen:
            continue
        seen.add(id(provenance))
        pending += provenance.inputs
        if _is_of_outermost(provenance):
            provenance.ext_flag |= jit_ext.EXT_FLAG_IS_CALLABLE
    return stock(context, *traces)


def _is_of_outermost(provenance: Any) -> bool:
    if getattr(provenance.inst, "opname", provenance.inst) not in ("LOAD_ATTR", PseudoInst.LOAD_ATTR):
        return False
    module, name = provenance.inputs
    return module.inst is PseudoInst.INPUT_FN and name.inst is PseudoInst.CONSTANT and name.value in _OF_MODULES


MENDS = [
    Mend(
        "hooks of the outermost module",
        "A hook of the outermost module that has attributes, as `weight_norm` and `spectral_norm` of `torch.nn.utils` "
        "make one, is looked for in another module.",
        program="""
class Scale:
    factor = 2.0

    def __call__(self, module, arguments):
        return (arguments[0] * self.factor,)

module = torch.nn.ReLU()
module.register_forward_pre_hook(Scale())
print(thunder.jit(module)(torch.ones(1)).tolist())
""",
        stock="KeyError",
        eager="[2.0]",
        patches=(
            Patch(
                "thunder.core.jit_ext:unpack_inputs",
                around(read_inputs),
                "hooks of the outermost module are looked for in another module",
                takes=("ctx, prologue_trace, pro_to_comp_inps, pro_to_epi_inps, args, kwargs",),
            ),
        ),
    ),
    Mend(
        "attributes of the outermost module",
        "What a program assigns to an attribute of the outermost module is lost.",
        program="""
class Remembers(torch.nn.Module):
    total = 0.0

    def forward(self, x):
        self.total = self.total + x
        return self.total * 1

module = Remembers()
compiled = thunder.jit(module)
print([compiled(torch.ones(())).item() for _ in range(3)], float(module.total))
""",
        stock="[1.0, 1.0, 1.0] 0.0",
        eager="[1.0, 2.0, 3.0] 3.0",
        patches=(
            Patch(
                "thunder.core.jit_ext:process_recorded_modifications",
                around(write_back),
                "what a program assigns to an attribute of the outermost module is lost",
                takes=("ctx, epilogue_trace",),
            ),
            Patch(
                "thunder.core.module:ThunderModule.__setattr__",
                around_method(set_attribute),
                "what a program assigns to an attribute of the outermost module is not seen in the module",
                takes=("self, name, value",),
            ),
        ),
    ),
    Mend(
        "several assignments to one object",
        "Of what a program assigns to the attributes of one object, a module say, all but the first is lost.",
        program="""
class Remembers(torch.nn.Module):
    def forward(self, x):
        self.first = x * 2
        self.second = x * 3
        return self.first + self.second

module = Remembers()
thunder.jit(torch.nn.Sequential(module))(torch.ones(()))
print(module.first.item(), getattr(module, "second", torch.tensor(0.0)).item())
""",
        stock="2.0 0.0",
        eager="2.0 3.0",
        extension=Extension(
            answers=dict.fromkeys(
                (object.__setattr__, ModuleType.__setattr__),
                partial(assign, jit_ext._general_jit_object_setattr_lookaside),
            )
        ),
    ),
]
