"""Operations of torch that thunder lacks, or lacks in the form in which a program calls them.

The interpreter asks here what thunder is going to refuse. The call is then offered to the rules once more, with the
reason in ``Call.unsupported``; the shipped rule in ``hookkit/rules/operations.py`` takes it.
"""

from __future__ import annotations

import inspect
import itertools
import types
from typing import Any

import torch
from thunder.core import jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import is_complex_dtype
from thunder.core.interpreter import INTERPRETER_SIGNALS, get_interpreterruntimectx, unwrap, wrap_const
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.transforms import _get_gradfn_and_executor, augmented_forward_impls, is_constant_for_vjp
from thunder.torch import _torch_to_thunder_function_map
from thunder.torch.default_torch_ops import torch_auto_registered_ops

from hookkit.engine.dispatch.takeover import lookaside_for
from hookkit.engine.dispatch.tensor_methods import TensorMethod, is_attribute
from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.trace import gradflow
from hookkit.engine.values.wrapping import wrap_result
from hookkit.errors import HookError

__all__ = ["assign", "is_torch_attribute", "iterates", "lacking", "or_opaque"]

# thunder registers these by a list. Their gradients run the operation again, all their results count as differentiable,
# and an operation that fails does so long after the program was traced.
_AUTOMATIC = frozenset(f for functions in torch_auto_registered_ops.values() for f in functions)

# Functions of torch that are written in Python and that thunder has operations for.
_PYTHON_FUNCTIONS = {
    function: name
    for module in (torch, torch.nn.functional)
    for name, function in vars(module).items()
    if isinstance(function, types.FunctionType) and function in _AUTOMATIC.union(_torch_to_thunder_function_map)
}
_PYTHON_METHODS = {f: name for name, f in vars(torch.Tensor).items() if isinstance(f, types.FunctionType)}
_ITERATORS = frozenset(v for v in vars(itertools).values() if isinstance(v, type))
_MODULES = frozenset({"torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special"})

# About the tensor object, its memory or its place in the autograd graph, not about its value: an operator, which is
# given another tensor object, would answer for that one.
IDENTITY = frozenset(
    {
        *("_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_post_accumulate_grad_hooks", "_version"),
        *("grad", "grad_dtype", "grad_fn", "is_leaf", "name", "names", "output_nr", "requires_grad", "retains_grad"),
        *("__array__", "__cuda_array_interface__", "__dlpack__", "__torch_dispatch__", "__torch_function__"),
        *("__deepcopy__", "__reduce_ex__", "__setstate__", "_is_view", "_use_count", "_view_func", "as_subclass"),
        *("backward", "const_data_ptr", "data_ptr", "detach_", "is_set_to", "record_stream", "register_hook"),
        *("register_post_accumulate_grad_hook", "reinforce", "requires_grad_", "resize_", "resize_as_", "retain_grad"),
        *("set_", "set_data", "share_memory_", "storage", "untyped_storage", "_typed_storage"),
    }
)
# What turns a tensor's data into Python values. thunder's own refusal says it best.
TO_PYTHON = frozenset(
    {
        *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "__iter__", "__len__"),
        *("__long__", "__nonzero__", "__reversed__", "__hash__", "__repr__", "__str__", "__format__"),
        *("__getattr__", "item", "numpy", "tolist", "is_nonzero"),
    }
)


def lacking(function: Any, callee: Any) -> str | None:
    """Why thunder cannot do a call, judged by what is called; None if it can try, or if no operation is called.

    Args:
        function: what the interpreter is about to call.
        callee: the same as torch names it.
    """
    name = _operation_name(callee)
    if name is None or name in IDENTITY or name in TO_PYTHON:
        return None
    if callee in _AUTOMATIC and name != "detach":  # its gradient: hookkit.engine.joint.differentiation
        return f"thunder runs PyTorch's {name}, and does not know its gradient, nor what its result depends on"
    if type(function) is TensorMethod:
        return None if function.is_known else f"thunder has no tensor method {name}"
    if isinstance(callee, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if _is_registered(function):
            return None
        function = callee  # not what `torch.library.custom_op` made of it
    if function is not callee or _is_known(function):
        return None
    return f"thunder has no operation {name}"


def or_opaque(stock: Any, callee: Any) -> Any:
    """What thunder does with a call of an operation and, where it refuses, what a rule does.

    Args:
        stock: thunder's own answer to the call.
        callee: the operation as torch names it; anything else is left alone.
    """
    name = _operation_name(callee)
    if name is None or name in IDENTITY or name in TO_PYTHON or not callable(stock):
        return stock

    def operation(*args: Any, **kwargs: Any) -> Any:
        trace = jit_ext.get_jit_ctx().computation_trace
        scopes, scope = len(trace.scopes), trace.peek_scope()
        assert scope is not None
        recorded = len(scope)
        result = stock(*args, **kwargs)
        runtime = get_interpreterruntimectx()
        error = runtime.curexc
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            reason = f"{type(error).__name__}: {error}"
        else:
            lacks = _lacks_gradient(trace, scope[recorded:])
            if lacks is None:
                return _named(name, result)
            reason = f"{lacks} {name}"
        taken = lookaside_for(callee, None, args, kwargs, unsupported=reason)
        if taken is None:
            return result
        # thunder does not close the scopes of an operation that raises (Symbol.__call__)
        del trace.scopes[scopes:]
        del scope[recorded:]
        runtime.curexc = None
        return taken(*args, **kwargs)

    return operation


def _lacks_gradient(trace: Any, bsyms: list[Any]) -> str | None:
    """What is wrong if recorded operations need a gradient that thunder does not know.

    Where they need none the results are marked: thunder would look for the gradient all the same.
    """
    without, is_complex = any(map(_is_without_gradient, bsyms)), any(map(_is_complex, bsyms))
    if not without and not is_complex:
        return None
    if any(gradflow.requires_grad(trace, a) for b in bsyms for a in b.flat_proxy_args):
        return "thunder does not know the gradient of" if without else "thunder does not conjugate in the gradient of"
    for bsym in bsyms if without else ():
        for out in bsym.flat_proxy_outs:
            out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return None


def _is_complex(bsym: Any) -> bool:
    """Whether complex numbers are computed with; thunder's gradients are those for real ones."""
    proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    return any(isinstance(p, TensorProxy) and is_complex_dtype(p.dtype) for p in proxies)


def _is_without_gradient(bsym: Any) -> bool:
    if is_constant_for_vjp(bsym) or bsym.sym.id in augmented_forward_impls or _get_gradfn_and_executor(bsym)[0]:
        return False
    return bool(bsym.sym.is_prim) or any(map(_is_without_gradient, bsym.subsymbols))


def _named(name: str, result: Any) -> Any:
    """A wrapped result with names for its items, where PyTorch gives them: ``x.max(0).values``."""
    value, named = unwrap(result), getattr(torch.return_types, name, None)
    if type(value) is not tuple or named is None or named.n_sequence_fields != len(value):
        return result
    return wrap_result(named(value), result)


def is_torch_attribute(tensor: Any, name: Any) -> bool:
    """Whether an attribute that torch defines is meant, of a wrapped tensor.

    Args:
        tensor: the wrapped object.
        name: the wrapped name.
    """
    if not isinstance(tensor.value, TensorProxy):
        return False
    return inspect.getattr_static(torch.Tensor, name.value, None) is not None


def assign(tensor: Any, name: Any, value: Any) -> Any:
    """Assign to an attribute that torch defines, of a wrapped tensor; what a program cannot see is done.

    thunder would set the attribute of a proxy, and nothing would come of it. ``x.requires_grad = True`` makes a leaf of
    a tensor that the program has made, whose gradient nobody can ask for.
    """
    trace = jit_ext.get_jit_ctx().computation_trace
    if name.value == "requires_grad":
        before, after = gradflow.requires_grad(trace, tensor.value), bool(unwrap(value))
        if after and not before:
            gradflow.note_made_leaf(trace, tensor.value)
        if before == after or (after and tensor.value.history is None):
            return wrap_const(None)
    return raise_in_program(
        HookError(f"the program assigns to the attribute {name.value!r} of a tensor, which a compiled program cannot")
    )


def iterates(function: Any) -> bool:
    """Whether a callable makes one of Python's iterators, which thunder takes for an operation on what it goes over."""
    return getattr(function, "__name__", None) == "__new__" and getattr(function, "__self__", None) in _ITERATORS


def _operation_name(callee: Any) -> str | None:
    """The name of a function, method or attribute of torch that computes, or None for anything else."""
    if isinstance(callee, types.BuiltinFunctionType):
        owner = callee.__self__
        named = owner.__name__ if isinstance(owner, types.ModuleType) else callee.__qualname__.partition(".")[0]
        return callee.__name__ if named in _MODULES or named == "_VariableFunctionsClass" else None
    if isinstance(callee, types.MethodDescriptorType | types.WrapperDescriptorType):
        return callee.__name__ if callee.__objclass__ in torch.Tensor.__mro__[:-1] else None
    if is_attribute(callee):
        return str(callee.__self__.__name__)
    if isinstance(callee, types.FunctionType):
        return _PYTHON_FUNCTIONS.get(callee) or _PYTHON_METHODS.get(callee)
    if isinstance(callee, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(callee)
    return None


def _is_registered(operator: Any) -> bool:
    """Whether thunder's own registration of an operator serves a call: one of the packet, with an executor for it."""
    symbol = _torch_to_thunder_function_map.get(operator)
    if symbol is None or not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    return any(symbol.id in executor.implmap for executor in get_compile_data().executors_list)


def _is_known(function: Any) -> bool:
    jit = jit_ext.get_jit_ctx()
    tables = (jit._executor_lookasides, jit.ad_hoc_executor._lookasides, jit_ext._general_jit_lookaside_map)
    return any(function in table for table in tables) or isinstance(function, types.FunctionType)
