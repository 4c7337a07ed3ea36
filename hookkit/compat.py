"""Every difference between the supported versions of torch and thunder, behind one name each.

The rest of hookkit never asks for a version: what is here probes for the feature. Each part says which version
needs it and what to delete when that version goes. torch is imported here, thunder is not: a part of this module
runs while thunder is being imported (see ``hookkit.autoload``).
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = [
    "active_measures",
    "addresses_refused",
    "apply_of",
    "autograd_registration",
    "batched_depth",
    "clamp_has_gradient_at_bounds",
    "composite_kernel",
    "dual_level",
    "dynamo_traces_in_steps",
    "function_owner",
    "gradient_edge",
    "graph_is_kept",
    "higher_order_apply_targets",
    "importing_thunder",
    "is_optimized",
    "nodes_need_owners",
    "outside_of_transforms",
    "realise_graph_module",
    "transforms_are_active",
]


def importing_thunder(module: ModuleType) -> AbstractContextManager[None]:
    """Give torch, while a module of thunder is imported, what the module names and newer torch lacks.

    Afterwards torch is as it was, also if the import fails: stand-ins that stay would change the libraries that ask
    ``hasattr(torch.Tensor, ...)``.

    Args:
        module: The module that is about to be executed; one that needs nothing gets nothing.

    Returns:
        A context manager to execute the module in.
    """
    match module.__name__:
        case "thunder.torch.default_torch_ops":
            return _removed_tensor_methods(module)
        case "thunder.core.jit_ext":
            return _python_function_apply()
        case _:
            return nullcontext()


# torch 2.13 removed named tensors; thunder 0.2.6 names these methods in thunder/torch/default_torch_ops.py. Delete
# this, and its case above, when the oldest supported thunder no longer names them.
_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


@contextmanager
def _removed_tensor_methods(default_torch_ops: ModuleType) -> Iterator[None]:
    missing = [name for name in _TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    with _attributes(torch.Tensor, dict.fromkeys(missing, _removed)):
        yield
    # Left in this list, the stand-ins would be registered by thunder/torch/__init__.py as methods of TensorProxy:
    # `hasattr(x, "rename")` would be true in a traced program and false in eager.
    if missing:
        operations = default_torch_ops.torch_auto_registered_ops[torch.Tensor]
        operations[:] = [operation for operation in operations if operation is not _removed]


def _removed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("torch has removed named tensors")


# From torch 2.14 `Function.apply` is a C classmethod; thunder 0.2.6 registers its lookaside for it as
# `Function.apply.__func__` (thunder/core/jit_ext.py). The lookaside stays under the stand-in, which nothing calls
# once it is off. Delete this, and its case above, when the oldest supported thunder no longer asks for `__func__`.
@contextmanager
def _python_function_apply() -> Iterator[None]:
    if hasattr(Function.apply, "__func__"):
        yield
        return
    c_classmethod = inspect.getattr_static(Function, "apply")

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return c_classmethod.__get__(None, cls)(*args, **kwargs)

    with _attributes(Function, {"apply": classmethod(apply)}):
        yield


@contextmanager
def _attributes(owner: type, attributes: dict[str, Any]) -> Iterator[None]:
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


def function_owner(function: Callable[..., Any]) -> type[Function] | None:
    """Find the ``autograd.Function`` subclass whose ``apply`` a callable is.

    A class's own ``apply`` that overrides ``Function.apply`` is not meant: it is code of the program, and calls the
    inherited one if it wants to.

    Args:
        function: Any callable.

    Returns:
        The subclass, or None if the callable is something else.

    Example:
        >>> class Double(Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        >>> function_owner(Double.apply) is Double
        True
        >>> function_owner(torch.sin) is None
        True
    """
    # Up to torch 2.13 `Function.apply` is a Python classmethod, and its bound methods share one `__func__`. Delete
    # the first branch when torch 2.14 is the oldest supported.
    if type(function) is MethodType:
        if function.__func__ is not getattr(Function.apply, "__func__", None):
            return None
    elif type(function) is not BuiltinMethodType or function.__name__ != "apply":
        return None
    owner = function.__self__
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


def realise_graph_module(module: object) -> None:
    """Compile the ``forward`` of a graph module, and of those inside it, if torch has put that off.

    From torch 2.13 Dynamo hands out graph modules whose code is generated at the first call
    (torch/fx/_lazy_graph_module.py). thunder's interpreter cannot run the generator: it dies with "MappingKeysView has
    no len()". To be deleted when thunder makes them real itself.

    Args:
        module: A graph module; anything else is left alone.
    """
    if isinstance(module, GraphModule):
        for part in module.modules():
            if isinstance(part, _LazyGraphModule):
                part.real_recompile()


def higher_order_apply_targets() -> tuple[Callable[..., Any], ...]:
    """List the callables that mean the higher-order operator ``autograd_function_apply`` on this torch.

    The name under ``torch.ops`` and the one that programs import from torch's module are one object in torch 2.13.
    Where they differ both are listed.
    """
    # A torch that lacks either place has one target, or none; delete the defaults when no supported one does.
    from torch._functorch import autograd_function

    found = (
        getattr(torch.ops.higher_order, "autograd_function_apply", None),
        getattr(autograd_function, "autograd_function_apply", None),
    )
    return tuple(dict.fromkeys(target for target in found if target is not None))


def dynamo_traces_in_steps() -> bool:
    """Whether Dynamo traces a Function in steps that can be looked at, each with what it returns.

    Up to torch 2.10 it traces it at one go, and loses on the way what the Function writes that was there before it,
    and gradients that are too many. Delete this when all supported versions have the steps.
    """
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

    return hasattr(AutogradFunctionApplyVariable, "trace_forward_graph")


@contextmanager
def addresses_refused() -> Iterator[None]:
    """Within it a tensor that is made without data, in the FakeTensorMode around it, refuses to tell its address.

    By default PyTorch answers 0 and warns, which a launcher of kernels, or a C++ extension, would read through.
    """
    # torch 2.7 to 2.15 have the option, private here: its public form, in torch._functorch.config, is read where a mode
    # is made. It does not cover `const_data_ptr`, of torch 2.11. A torch that always refuses needs neither.
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        yield
        return
    allowed, mode._allow_unsafe_data_ptr_access = mode._allow_unsafe_data_ptr_access, False
    try:
        with _attributes(FakeTensor, {"const_data_ptr": _has_no_address}):
            yield
    finally:
        mode._allow_unsafe_data_ptr_access = allowed


def _has_no_address(self: torch.Tensor) -> int:
    raise NotImplementedError("a tensor without data has no const_data_ptr")


def accumulates(node: Any) -> bool:
    """Whether the backward that is running adds to a leaf's ``grad``, and does not hand the gradient to who asked.

    Args:
        node: the leaf's node in the autograd graph.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))  # private; torch 2.7 to 2.15 have it
    except RuntimeError:  # what it says of a leaf in `torch.autograd.grad`
        return False


def graph_is_kept() -> bool:
    """Whether the backward that is running keeps its graph (``retain_graph=True``); False outside a backward."""
    # torch 2.7 to 2.15 have both; they are private, and there is no public way to ask.
    if torch._C._current_graph_task_id() == -1:
        return False
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def transforms_are_active() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    # torch 2.7 to 2.15 have it; torch.autograd.Function.apply asks it.
    return torch._C._are_functorch_transforms_active()


def batched_depth() -> int:
    """In how many ``is_grads_batched=True`` the backward runs: they use the vmap that was there before torch.func."""
    # torch 2.7 to 2.15: torch/_vmap_internals.py. The depth is told by what changes it only.
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return depth


def dual_level() -> int:
    """How many levels of forward-mode AD are entered, less one."""
    # torch 2.7 to 2.15 have it; torch/autograd/forward_ad.py. There is no public way to ask.
    return forward_ad._current_level


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """The time in which no transform is active, whatever is active around it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    depth = batched_depth()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()


def apply_of(function: type[Function]) -> Callable[..., Any]:
    """How PyTorch applies a Function to positional arguments that are complete, outside of functorch's transforms.

    Up to torch 2.13 ``Function.apply`` is Python around a C method: it binds defaults for ``setup_context``, and asks
    for the transforms. Where it is C itself this is that; then the probe can go.
    """
    if hasattr(Function.apply, "__func__"):
        return super(Function, function).apply  # type: ignore[no-any-return, misc]
    return function.apply


class _Probe(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@functools.cache
def nodes_need_owners() -> bool:
    """Whether the node of a custom Function frees what it saved when the Function's outputs are gone.

    It does with torch 2.9.1, and does not with 2.13 and 2.15. Delete this when the oldest supported torch is of those.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = _Probe.apply(torch.ones((), requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
    try:
        return len(node.saved_tensors) != 1
    except RuntimeError:
        return True


@functools.cache
def clamp_has_gradient_at_bounds() -> bool:
    """Whether ``torch.clamp`` hands the gradient on where the input is at a bound that is a number.

    It does up to torch 2.13; from 2.14 on it is zero there. Delete this when the oldest supported torch is of those.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(max=1.0), x)[0])


class _OwningEdge(GradientEdge):
    """A gradient edge of a torch whose edges hold no more than the node, with what keeps the node from being freed."""

    owner: Any


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """A tensor's place in the autograd graph; the node lives as long as the edge, and the tensor need not.

    Up to torch 2.8 an edge does not own the node of a custom Function: asked for anything once the tensor is gone it
    raises, or ends the process. Delete this, and its class, when torch 2.9 is the oldest supported.
    """
    edge = get_gradient_edge(tensor)
    if "ownership_token" in edge._fields or not isinstance(edge.node, torch._C._FunctionBase):
        return edge
    owning = _OwningEdge(*edge)
    with torch.inference_mode(False), torch.enable_grad():
        owning.owner = tensor.view_as(tensor).grad_fn  # a view's node owns the node before it
    return owning


def autograd_registration(operator: OpOverload) -> Any:
    """What holds the functions with which ``register_autograd`` was called for an operator, as torch names them.

    That is an object with ``_setup_context_fn`` and ``_backward_fn``, either of which may be None; or None where it is
    not found: the operator is differentiated by PyTorch then.
    """
    # torch keeps them in closures: the `info` of `make_autograd_impl`, torch/_library/autograd.py. Delete this, and
    # what is below, when there is a public way to ask.
    frame = _first_frame(operator, "Autograd")
    backward = getattr(frame.get("Generated"), "backward", None) if frame is not None else None
    while isinstance(backward, FunctionType):
        variables = inspect.getclosurevars(backward).nonlocals
        if "info" in variables:
            return variables["info"]
        backward = variables.get("orig_backward")  # of `supports_tensorlist`
    return None


def composite_kernel(operator: OpOverload) -> FunctionType | None:
    """The Python function that was registered for an operator as ``CompositeImplicitAutograd``, or None."""
    frame = _first_frame(operator, "CompositeImplicitAutograd")
    if frame is None:
        return None
    code = frame["__code__"]
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__code__ is code:
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            if all(frame.get(name, cell) is cell.cell_contents for name, cell in cells):
                return function
    return None


class _FrameFound(Exception):
    pass


def _first_frame(operator: OpOverload, key: str) -> dict[str, Any] | None:
    """The variables of the Python function that a call of an operator comes to first, which does not run.

    torch can be asked whether there is a kernel, and not which. A function that the dispatcher calls is seen by
    Python's profiling hook.

    Args:
        operator: the operator.
        key: the dispatch key for which a kernel must be registered.

    Returns:
        The variables, and the function's code as ``__code__``; None if no function of Python is called.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        return None
    arguments = [_example(a) for a in operator._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    keywords = {a.name: _example(a) for a in operator._schema.arguments if a.kwarg_only and not a.has_default_value()}
    found: dict[str, Any] = {}

    def stop(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.update(frame.f_locals, __code__=frame.f_code)
            raise _FrameFound

    profile = sys.getprofile()
    call = operator._op
    with torch.no_grad():
        sys.setprofile(stop)
        try:
            call(*arguments, **keywords)
        except (_FrameFound, RuntimeError, TypeError, ValueError):  # or what the dispatcher says of such arguments
            pass
        finally:
            sys.setprofile(profile)
    return found or None


def _example(argument: torch.Argument) -> Any:
    """A value of the type of an operator's argument, without data."""
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [torch.empty(0, device="meta")] if "Tensor" in kind else []
    return {"Tensor": torch.empty(0, device="meta"), "str": "", "Device": torch.device("meta")}.get(kind, 0)


def active_measures() -> list[str]:
    """Say which parts of this module make a difference with this torch, for bug reports."""
    measures = []
    missing = [name for name in _TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    if missing:
        measures.append(f"stand-ins for torch.Tensor.{', '.join(missing)} while thunder is imported")
    if not hasattr(Function.apply, "__func__"):
        measures.append("a Python classmethod Function.apply while thunder is imported")
    if len(higher_order_apply_targets()) != 1:
        measures.append(f"{len(higher_order_apply_targets())} callables mean autograd_function_apply")
    measures.append("lazily compiled graph modules are made real before they are interpreted")
    return measures


@contextmanager
def without_dynamo() -> Iterator[None]:
    """The time in which what ``torch.compile`` returned runs uncompiled.

    Dynamo compiles nothing under modes, and remembers that of the code, which would not be compiled afterwards either.
    """
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() in (None, False):
        with _uncompiled:
            yield
    else:  # inside of what Dynamo runs no other stance can be taken
        yield


class _Uncompiled:
    """Dynamo's stance, which is that of the process: the first thread to come takes another, the last restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._inside += 1

    def __exit__(self, *raised: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(*raised)


_uncompiled = _Uncompiled()


def is_compiled_operator(frame: FrameType) -> bool:
    """Whether a frame is one in which Dynamo begins with what a higher-order operator, as torch.cond, has compiled."""
    if frame.f_code.co_name != "_callback_from_stance" or frame.f_locals.get("callback") in (None, False):
        return False
    caller = frame.f_back and frame.f_back.f_back  # torch/_dynamo/eval_frame.py is called by the operator
    return caller is not None and "_higher_order_ops" in caller.f_code.co_filename


def stacks_along_dim(scan: FunctionType) -> bool:
    """Whether ``scan`` stacks rows along the dimension that it scans; before torch 2.13 always along the first."""
    inner = [code for code in scan.__code__.co_consts if isinstance(code, CodeType)]
    return any("movedim" in code.co_names for code in inner)


def is_optimized(function: Any) -> bool:
    """Whether a function is what ``torch.compile`` or ``torch.compiler.disable`` returned; it calls the given one."""
    return isinstance(function, FunctionType) and "_torchdynamo_orig_callable" in vars(function)
