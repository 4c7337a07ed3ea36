"""What the interpreter does in the place of a call: which rule is asked, and what thunder would do without one.

Also what thunder's record of a compiled program's dependencies holds, and what is asked of a finished trace.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from thunder.core import interpreter, jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.proxies import TensorProxy
from torch.fx.graph_module import _WrappedCall

from hookkit import compat
from hookkit.engine.dispatch import extensions, missing_operations
from hookkit.engine.dispatch.recorded import record
from hookkit.engine.dispatch.takeover import lookaside_for
from hookkit.engine.dispatch.tensor_methods import attribute_lookup, fallback_of, method_lookup, torch_callee
from hookkit.engine.interpreter import cache_guards
from hookkit.engine.interpreter.side_effects import note_called
from hookkit.engine.joint import differentiation
from hookkit.engine.trace import gradflow, in_place_check, recomputation
from hookkit.engine.trace.composite import export_leaks
from hookkit.engine.trace.functionalize import LAYOUTS, layouts
from hookkit.opaque_function import run_opaque
from hookkit.patch import Patch, around, refuse_if_concerned
from hookkit.registry import registry
from hookkit.residuals import mark, recompute, save
from hookkit.transforming import is_made_by_transform, made_by_transform, recorded

__all__ = ["PATCHES"]

# Under this name thunder's record of what a compiled program depends on holds the rules in force.
RULES_KEY = "hookkit_rules"


def _cache_info(stock: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Thunder's record of what a compiled program depends on, with the rules in force.

    ``get_computation_and_inputs`` in thunder/__init__.py calls it before it looks for a compiled program. What is then
    in the record, the prologue of a program that is compiled checks (``unpack_inputs`` in thunder/core/jit_ext.py), for
    which it gets the record by the same call. A prologue that does not ask for the rules was compiled without hookkit.
    """

    def _get_cache_info() -> dict[str, Any]:
        info = stock()
        if RULES_KEY not in info:
            info[RULES_KEY] = registry.fingerprint()
            info[cache_guards.SETTINGS] = cache_guards.settings()
            return info
        caller = sys._getframe(1)
        if caller.f_code.co_name == "unpack_inputs":
            cache_guards.remember(info)
            if info.get("alias_tensor_indices"):
                info[LAYOUTS] = layouts(info, *cache_guards.traced_arguments())
        elif caller.f_code.co_name == "prologue":
            if LAYOUTS in caller.f_code.co_consts:
                info[LAYOUTS] = layouts(info, caller.f_locals["args"], caller.f_locals["kwargs"])
            if RULES_KEY not in caller.f_code.co_consts:
                raise RuntimeError("this program was compiled without hookkit's rules")
            if cache_guards.STATE in caller.f_code.co_consts:
                cache_guards.recall(info, caller.f_code.co_consts, caller.f_locals["args"], caller.f_locals["kwargs"])
        return info

    return _get_cache_info


def _inputs_and_intermediates(stock: Callable[..., Any], trace: Any) -> Any:
    """What thunder asks of a finished trace; by now it is known what composites must return."""
    refuse_if_concerned(trace)
    extensions.finish(trace)
    export_leaks(trace)
    in_place_check.check(trace)
    differentiation.check_undefined(trace)
    return stock(trace)


def _lookaside(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Thunder's way of finding what replaces a call, with the rules asked first."""
    answers: dict[Any, Any] = {torch.is_grad_enabled: interpreter_needs_wrap(_is_grad_enabled)}
    answers[TensorProxy.requires_grad.fget] = interpreter_needs_wrap(_requires_grad)
    native = {f: interpreter_needs_wrap(f) for f in (save, mark)}
    answers.update(native)
    answers[recompute] = recomputation.recompute
    answers[recorded] = record

    def general_jit_lookaside(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        def thunders() -> Any:  # whose own parameter has a name, too, that the program may use
            return stock(fn, *args, **{name: value for name, value in kwargs.items() if name != "fn"})

        try:
            answer = answers.get(fn) or extensions.answer(fn)
        except TypeError:
            answer = None
        if answer is not None:
            return answer
        if (found := extensions.before_rules(fn, args)) is not None:
            return found
        if fn is TensorProxy.grad.fget:
            return lookaside_for(_tensor_grad.__get__, None, args, {}) or stock(fn, *args)
        if missing_operations.iterates(fn):
            return None
        if fn is setattr and missing_operations.is_torch_attribute(*args[:2]):
            return missing_operations.assign
        note_called(fn)
        if isinstance(fn, torch.fx.GraphModule):
            compat.realise_graph_module(fn)
        if isinstance(fn, _WrappedCall):
            return partial(interpreter._interpret_call, _module_call(fn, interpreter.unwrap(args[0])))
        if (attribute := attribute_lookup(fn, args)) is not None:
            lacking = missing_operations.lacking(attribute, attribute)
            taken = lookaside_for(attribute, None, args[:1], {}, unsupported=lacking)
            return partial(_of_tensor, taken) if taken is not None else thunders()
        callee = torch_callee(fn)
        found = lookaside_for(callee, None, args, kwargs, unsupported=missing_operations.lacking(fn, callee))
        found = found or method_lookup(fn, args) or extensions.after_rules(fn, args)
        if found is not None:
            return found
        found = missing_operations.or_opaque(fallback_of(fn) or thunders(), callee)
        if found is None and interpreter.is_opaque(fn):
            cache_guards.note_read(fn, map(interpreter.unwrap, args))
        return found

    return general_jit_lookaside


def _dispatch(
    stock: Callable[..., Any], compilectx: Any, runtimectx: Any, fn: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Thunder's dispatch of a call, with ``Function.apply`` taken before it becomes a call of something else.

    ``_call_dispatch`` in thunder/core/interpreter.py unbinds methods by interpreting a call of ``fn.__func__``. Here
    the class keeps the provenance with which the program reached it, on which the guards rest, also where ``apply`` is
    a C classmethod (torch 2.14 and later).
    """
    if jit_ext._jit_ctx.get(None) is None:  # thunder's interpreter, used by itself
        return stock(compilectx, runtimectx, fn, *args, **kwargs)
    callee, owner = interpreter.unwrap(fn), None
    if compat.is_optimized(callee):  # Dynamo would compile the interpreter
        fn = interpreter._interpret_call(getattr, fn, interpreter.wrap_const("_torchdynamo_orig_callable"))
        return stock(compilectx, runtimectx, fn, *args, **kwargs)
    if isinstance(callee, torch.jit.ScriptModule) and not _is_program(fn):  # one operator, which gets its parameters
        return stock(compilectx, runtimectx, interpreter.wrap_const(run_opaque), _wrapped(fn), *args, **kwargs)
    if type(callee) is types.GenericAlias:  # `dict[str, int]()`
        return interpreter._interpret_call(_called_alias, fn, *args, **kwargs)
    if is_made_by_transform(callee):
        return interpreter._interpret_call(made_by_transform, fn, *args, **kwargs)
    if callee is _function_apply and args:  # unbound already, by the interpreter's LOAD_METHOD
        owner, args = args[0], args[1:]
        callee = owner.value.apply
    elif compat.function_owner(callee) is not None:
        owner = interpreter._interpret_call(getattr, _wrapped(fn), interpreter.wrap_const("__self__"))
    if owner is None:
        return stock(compilectx, runtimectx, fn, *args, **kwargs)
    claimed = jit_ext.get_jit_ctx()._executor_lookasides.get(callee)
    if claimed is not None:
        return claimed(*args, **kwargs)
    found = lookaside_for(callee, owner, args, kwargs)
    if found is not None:
        return found(*args, **kwargs)
    if interpreter.is_opaque(callee):  # a C classmethod, for which thunder's own lookaside is not found
        return jit_ext._general_jit_torch_autograd_function_apply_lookaside(owner, *args, **kwargs)
    rest = (owner, *args) if interpreter.unwrap(fn) is _function_apply else args
    return stock(compilectx, runtimectx, fn, *rest, **kwargs)


def _called_alias(alias: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What the call of a class with type arguments comes to; its ``__call__`` is that of the class."""
    made = alias.__origin__(*args, **kwargs)
    try:
        made.__orig_class__ = alias
    except (AttributeError, TypeError):  # as for a list, or what is frozen
        return made
    return made


def _is_program(wrapped: Any) -> bool:
    """Whether what is called is what was compiled."""
    return getattr(wrapped, "provenance", None) is None or wrapped.provenance.inst is interpreter.PseudoInst.INPUT_FN


def _wrapped(function: Any) -> Any:
    return function if isinstance(function, interpreter.WrappedValue) else interpreter.wrap_const(function)


def _module_call(wrapped: Any, module: Any) -> Any:
    """What the call of a graph module comes to. Around that is a report of errors, slow when it is interpreted."""
    return wrapped.cls_call or super(wrapped.cls, module).__call__.__func__


def _of_tensor(taken: Callable[..., Any], tensor: Any, name: Any) -> Any:
    """What is called in the place of ``TensorProxy.__getattr__``: what stands for the attribute itself."""
    return taken(tensor)


_tensor_grad: Any = torch.Tensor.grad
_function_apply = getattr(torch.autograd.Function.apply, "__func__", object())


def _is_grad_enabled() -> bool:
    return bool(get_compile_data().is_grad_enabled)


def _requires_grad(tensor: Any) -> bool:
    return gradflow.requires_grad(jit_ext.get_jit_ctx().computation_trace, tensor)


PATCHES = [
    Patch(
        "thunder.core.jit_ext:general_jit_lookaside",
        _lookaside,
        "no rule is asked about a call",
        takes=("fn, *args, **kwargs",),
        needed=True,
    ),
    Patch(
        "thunder.core.interpreter:_call_dispatch",
        around(_dispatch),
        "no rule is asked about the apply of a Function",
        takes=("compilectx, runtimectx, fn, *args, **kwargs",),
        needed=True,
    ),
    Patch(
        "thunder:_get_cache_info",
        _cache_info,
        "a program that was compiled under other rules is taken for this one",
        takes=("",),
        needed=True,
    ),
    Patch(
        "thunder.core.jit_ext:get_computation_inputs_and_intermediates",
        around(_inputs_and_intermediates),
        "a finished trace is not looked at",
        takes=("computation_trace",),
        needed=True,
    ),
]
