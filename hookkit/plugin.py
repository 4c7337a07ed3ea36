"""The only module that installs anything into thunder: enable puts hookkit in place, disable takes it out again."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import attrs
import thunder
import thunder.plugins
import torch
from thunder import clang
from thunder.common import CompileData
from thunder.core import codeutils, interpreter, jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.module import ThunderModule
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import AutocastStack
from thunder.dynamo import splitter
from thunder.executors.torch_autograd import ThunderFunction
from thunder.transforms import autodiff
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable as ContextVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.autograd.function import FunctionCtx
from torch.fx.graph_module import _WrappedCall

from hookkit import compat
from hookkit.engine import (
    caching,
    connection,
    corrections,
    differentiation,
    dynamo,
    gradflow,
    identity,
    modules,
    mutation,
    operations,
    recomputation,
    shortcuts,
    threads,
)
from hookkit.engine.calls import lookaside_for, trace_program
from hookkit.engine.eager import set_materialize_grads
from hookkit.engine.functionalise import functionalise_program
from hookkit.engine.iteration import iterator_lookaside
from hookkit.engine.methods import attribute_lookup, fallback_of, method_lookup, torch_callee
from hookkit.engine.symbols import export_leaks
from hookkit.registry import registry
from hookkit.residuals import mark, recompute, save

__all__ = ["disable", "enable", "is_enabled"]

# Under this name thunder's record of what a compiled program depends on holds the rules in force.
RULES_KEY = "hookkit_rules"

_lock = threading.RLock()
_MISSING = object()


@attrs.define
class Patch:
    """One thing of thunder's that is replaced while hookkit is enabled: an attribute, or an entry of a dict."""

    holder: Any
    key: Any
    value: Any
    before: Any = None

    def install(self) -> None:
        """Put the value in place and keep what was there."""
        if isinstance(self.holder, dict):
            self.before = self.holder.get(self.key, _MISSING)
            self.holder[self.key] = self.value
        else:
            self.before = self.holder.__dict__.get(self.key, _MISSING)
            setattr(self.holder, self.key, self.value)

    def remove(self) -> None:
        """Put back what was there."""
        if isinstance(self.holder, dict):
            if self.before is _MISSING:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = self.before
        elif self.before is _MISSING:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, self.before)


_installed: list[Patch] = []


def is_enabled() -> bool:
    """Whether hookkit's rules take part in ``thunder.jit``, ``thunder.compile`` and ``thunderfx``."""
    return bool(_installed)


def enable() -> None:
    """Let the rules take part in every later ``thunder.jit``, ``thunder.compile`` and ``thunderfx``.

    ``import hookkit`` does this. Enabling twice is the same as once.

    Example:
        >>> import hookkit
        >>> hookkit.enable()
        >>> hookkit.is_enabled()
        True
    """
    with _lock:
        if _installed:
            return
        for patch in _patches():
            patch.install()
            _installed.append(patch)


def disable() -> None:
    """Take the rules out of thunder, which is afterwards exactly as it was.

    Example:
        >>> import hookkit
        >>> hookkit.disable()
        >>> hookkit.is_enabled()
        False
        >>> hookkit.enable()
    """
    with _lock:
        while _installed:
            _installed.pop().remove()


class Plugin(thunder.Plugin):  # type: ignore[misc]
    """What ``thunder.compile(model, plugins="hookkit")`` asks for: the rules."""

    def setup_executors(self) -> None:
        """Enable the rules; thunder calls this before it compiles."""
        enable()


def _patches() -> list[Patch]:
    stock = jit_ext.general_jit_lookaside
    patches = [Patch(jit_ext, "general_jit_lookaside", _lookaside(stock))]
    patches += [
        Patch(autodiff, name, partial(correction, getattr(autodiff, name)))
        for name, correction in (
            ("grad_transform_on_trace", differentiation.differentiate),
            ("split_into_forward_and_backward", differentiation.split),
            ("_should_recompute_bsym_in_backward", recomputation.is_recomputed),
        )
    ]
    patches.append(Patch(thunder, "_get_cache_info", _cache_info(thunder._get_cache_info)))
    handlers = interpreter._default_opcode_handler_map
    name = "get_nodes_in_unsupported_ctx_regions"
    stock_inputs = jit_ext.get_computation_inputs_and_intermediates
    patches += [
        Patch(jit_ext, "get_computation_inputs_and_intermediates", partial(_inputs_and_intermediates, stock_inputs)),
        Patch(interpreter, "_call_dispatch", partial(_dispatch, interpreter._call_dispatch)),
        Patch(interpreter, "globals_lookup", partial(shortcuts.look_up_global, interpreter.globals_lookup)),
        Patch(interpreter, "_binary_op", partial(shortcuts.apply_operator, interpreter._binary_op)),
        *(Patch(handlers, n, partial(caching.read_two, handlers[n])) for n in ("COMPARE_OP", "DICT_UPDATE")),
        Patch(handlers, "IS_OP", partial(identity.is_same, handlers["IS_OP"])),
        Patch(handlers, "UNPACK_SEQUENCE", partial(shortcuts.unpack_sequence, handlers["UNPACK_SEQUENCE"])),
        Patch(Symbol, "bind", partialmethod(corrections.bind, Symbol.bind)),
        Patch(interpreter.MappingKeysView, "__len__", corrections.keys_count),
        Patch(TensorProxy, "__eq__", partialmethod(corrections.compare, TensorProxy.__eq__)),
        Patch(TensorProxy, "__ne__", partialmethod(corrections.compare, TensorProxy.__ne__)),
        *(
            Patch(NumberProxy, n, partialmethod(corrections.of_known_value, getattr(NumberProxy, n)))
            for n in corrections.DECISIONS
        ),
        Patch(codeutils, "prettyprint", partial(corrections.printed, codeutils.prettyprint)),
        Patch(clang, "maybe_broadcast", partial(corrections.broadcast, clang.maybe_broadcast)),
        Patch(CompileData, "is_grad_enabled", threads.GRAD_MODE),
        Patch(AutocastStack, "stack", threads.AUTOCAST_REGIONS),
        Patch(ThunderModule, "set_buffer", partialmethod(modules.set_buffer, ThunderModule.set_buffer)),
        Patch(jit_ext.JitCtx, "proxify", partialmethod(corrections.proxify, jit_ext.JitCtx.proxify)),
        Patch(thunder, "thunder_general_jit", partial(trace_program, thunder.thunder_general_jit)),
        Patch(thunder, "insert_alias_updates", partial(functionalise_program, thunder.insert_alias_updates)),
        Patch(thunder, "connect_to_autograd", partial(connection.connect, thunder.connect_to_autograd)),
        Patch(splitter, name, partial(corrections.unsupported_nodes, getattr(splitter, name))),
        Patch(thunder.plugins.names_to_plugins, "hookkit", Plugin),
        Patch(FunctionCtx, "set_materialize_grads", set_materialize_grads),
        Patch(AutogradFunctionVariable, "call_apply", partialmethod(dynamo.apply, AutogradFunctionVariable.call_apply)),
        Patch(ContextVariable, "call_method", partialmethod(dynamo.call_method, ContextVariable.call_method)),
        *(
            Patch(ContextVariable, n, partialmethod(dynamo.var_getattr, getattr(ContextVariable, n)))
            for n in ("var_getattr",)
            if hasattr(ContextVariable, n)
        ),
        *(
            Patch(AutogradFunctionApplyVariable, n, partialmethod(step, getattr(AutogradFunctionApplyVariable, n)))
            for n, step in dynamo.STEPS.items()
            if hasattr(AutogradFunctionApplyVariable, n)
        ),
        Patch(ThunderFunction, "backward", staticmethod(partial(connection.backward, ThunderFunction.backward))),
    ]
    return patches


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
            info[caching.SETTINGS] = caching.settings()
            return info
        caller = sys._getframe(1)
        if caller.f_code.co_name == "unpack_inputs":
            caching.remember(info)
        elif caller.f_code.co_name == "prologue":
            if RULES_KEY not in caller.f_code.co_consts:
                raise RuntimeError("this program was compiled without hookkit's rules")
            if caching.STATE in caller.f_code.co_consts:
                caching.recall(info, caller.f_code.co_consts, caller.f_locals["args"], caller.f_locals["kwargs"])
        return info

    return _get_cache_info


def _inputs_and_intermediates(stock: Callable[..., Any], trace: Any) -> Any:
    """What thunder asks of a finished trace; by now it is known what composites must return."""
    export_leaks(trace)
    mutation.check(trace)
    differentiation.check_undefined(trace)
    return stock(trace)


def _lookaside(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Thunder's way of finding what replaces a call, with the rules asked first."""
    answers: dict[Any, Any] = {torch.is_grad_enabled: interpreter_needs_wrap(_is_grad_enabled)}
    answers[TensorProxy.requires_grad.fget] = interpreter_needs_wrap(_requires_grad)
    answers[TensorProxy.dtype.fget] = interpreter_needs_wrap(corrections.torch_dtype)
    native = {f: interpreter_needs_wrap(f) for f in (save, mark)}
    answers.update(native)
    answers[recompute] = recomputation.recompute
    answers[torch.inference_mode] = partial(interpreter._interpret_call, corrections.inference_mode)

    def general_jit_lookaside(fn: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = answers.get(fn)
        except TypeError:
            answer = None
        if answer is not None:
            return answer
        if (found := identity.lookaside(fn, args)) is not None:
            return found
        if fn is TensorProxy.grad.fget:
            return lookaside_for(_tensor_grad.__get__, None, args, {}) or stock(fn, *args)
        if operations.iterates(fn):
            return None
        if fn is setattr and operations.is_torch_attribute(*args[:2]):
            return operations.assign
        if isinstance(fn, torch.fx.GraphModule):
            compat.realise_graph_module(fn)
        if isinstance(fn, _WrappedCall):
            return partial(interpreter._interpret_call, _module_call(fn, interpreter.unwrap(args[0])))
        if (attribute := attribute_lookup(fn, args)) is not None:
            taken = lookaside_for(attribute, None, args[:1], {}, unsupported=operations.lacking(attribute, attribute))
            return partial(_of_tensor, taken) if taken is not None else stock(fn, *args, **kwargs)
        callee = torch_callee(fn)
        found = lookaside_for(callee, None, args, kwargs, unsupported=operations.lacking(fn, callee))
        found = found or method_lookup(fn, args) or iterator_lookaside(fn, args)
        if found is not None:
            return found
        found = operations.or_opaque(fallback_of(fn) or stock(fn, *args, **kwargs), callee)
        if found is None and interpreter.is_opaque(fn):
            caching.note_read(fn, map(interpreter.unwrap, args))
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
    if isinstance(callee, weakref.ref) and (tensor := identity.referent(callee)) is not None:
        return tensor
    if callee is _function_apply and args:  # unbound already, by the interpreter's LOAD_METHOD
        owner, args = args[0], args[1:]
        callee = owner.value.apply
    elif compat.function_owner(callee) is not None:
        wrapped = fn if isinstance(fn, interpreter.WrappedValue) else interpreter.wrap_const(fn)
        owner = interpreter._interpret_call(getattr, wrapped, interpreter.wrap_const("__self__"))
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
