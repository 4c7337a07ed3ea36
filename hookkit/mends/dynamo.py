"""Custom Functions that Dynamo, which ``thunderfx`` runs first, would make something else of than eager PyTorch.

Dynamo traces forward and backward into the operator ``autograd_function_apply``, and takes some of what a Function may
do for something else, whatever the backend. Where that is seen it leaves the Function to eager PyTorch: it breaks its
graph, and the Function runs between two compiled graphs. What Dynamo does for other backends stays as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NoReturn

import thunder.dynamo.compiler
import torch
from torch._dynamo.exc import TorchDynamoException, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable, ListVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable
from torch._dynamo.variables.tensor import TensorVariable

from hookkit import compat
from hookkit.engine.dispatch.graphs import left_to_pytorch, operations_of
from hookkit.engine.joint import transforms
from hookkit.engine.pytorch.dynamo_graphs import drop_contexts, is_once_differentiable, never_compiled, write_no_grad
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around, around_method

__all__ = ["MENDS", "apply", "compile_graph"]


def _is_for_thunder() -> bool:
    """Whether what Dynamo traces goes to thunder."""
    backend = InstructionTranslator.current_tx().output.compiler_fn
    while wrapped := getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None):
        backend = wrapped
    return isinstance(backend, thunder.dynamo.compiler.ThunderCompiler)


def compile_graph(compiler: Any, stock: Callable[..., Any], graph: Any, sample_args: Any, **options: Any) -> Any:
    """``ThunderCompiler.__call__``; a graph with a transform of ``torch.func`` in it or around it runs eagerly.

    So does one with forward-mode differentiation. Their tensors stand for more than their data, which a trace would
    lose, and so would inductor, to which ``thunderfx`` gives what thunder does not support.
    """
    if transforms.active() or any(_is_of_transform(n.target) for n in graph.graph.nodes):
        reason = "a transform of torch.func, or forward-mode differentiation, is in it or around it"
        left = left_to_pytorch.setdefault(compiler, [])
        left.append((len(compiler.subgraph_infos), operations_of(graph), reason))
        return graph.forward
    drop_contexts(graph)
    return stock(compiler, graph, sample_args, **options)


def _is_of_transform(target: Any) -> bool:
    """Whether a function of one of Dynamo's graphs belongs to ``torch.func``, or to forward-mode differentiation."""
    name = f"{getattr(target, '__module__', None)}.{getattr(target, '__name__', None)}"
    return any(part in name for part in ("_functorch", "forward_ad", "_dual_level", "_make_dual", "_unpack_dual"))


def apply(function: Any, stock: Callable[..., Any], tx: Any, args: Any, kwargs: Any) -> Any:
    """``AutogradFunctionVariable.call_apply``; an error of Dynamo's own breaks the graph."""
    owner = function.fn_cls
    if not _is_for_thunder():
        return stock(function, tx, args, kwargs)
    if hasattr(torch.autograd.Function, "boxed_grads_call") and owner.boxed_grads_call:
        _leave(owner.__name__, "its backward takes one list of gradients")
    if function.source is None and getattr(sys.modules.get(owner.__module__), owner.__name__, None) is not owner:
        _leave(owner.__name__, "Dynamo does not know where the class comes from, and takes it for a global")
    if not compat.dynamo_traces_in_steps() and any(
        _has_own_values(f) for f in (owner.forward, owner.setup_context) if isinstance(f, FunctionType)
    ):
        _leave(owner.__name__, "its forward closes over values, which Dynamo takes for constants")
    if transforms.active():
        _leave(owner.__name__, "Dynamo traces its forward alone inside of a transform, as of torch.func")
    if any(_is_within(outer.backward, tx) for outer, _ in _applied):
        # Dynamo would trace its forward alone, as grad mode is off there; a second derivative asks for its backward
        _leave(owner.__name__, "the backward of another Function applies it")
    installed = set(tx.output.nn_modules)
    _applied.append((owner, args))
    try:
        result = stock(function, tx, args, kwargs)
        if is_once_differentiable(owner):
            _write_no_grad(tx.output.nn_modules, installed)
        return result
    except Unsupported as error:
        _skip(owner)
        if "Data-dependent" in error.msg:  # of which Dynamo prints its graph; it fails at one without operations
            _leave(owner.__name__, "what it does depends on the values of tensors", error)
        raise
    except TorchDynamoException:  # what it says to itself, or to the user
        raise
    except Exception as error:
        _skip(owner)
        _leave(owner.__name__, f"Dynamo fails with {type(error).__name__}: {error}", error)
    finally:
        _applied.pop()


def _has_own_values(function: Any) -> bool:
    """Whether a function, or one that it closes over, closes over what is neither a function, a class nor a module."""
    seen: list[Any] = []
    functions = [function]
    while functions:
        function = functions.pop()
        if function in seen:
            continue
        seen.append(function)
        try:
            variables = inspect.getclosurevars(function).nonlocals.values()
        except ValueError:  # one has no value yet
            return True
        functions += [v for v in variables if isinstance(v, FunctionType)]
        if not all(isinstance(v, (FunctionType, BuiltinFunctionType, type, ModuleType)) for v in variables):
            return True
    return False


# The Functions that Dynamo is about to trace and their arguments, each in one that applies it; it traces in one thread
# at a time.
_applied: list[tuple[type[Any], Any]] = []


def _is_within(function: Any, tx: Any) -> bool:
    """Whether Dynamo is tracing a call of a function."""
    code = getattr(function, "__code__", None)
    while tx is not None:
        if tx.f_code is code:
            return True
        tx = getattr(tx, "parent", None)
    return False


def _write_no_grad(modules: dict[str, Any], before: set[str]) -> None:
    """Let a backward that is once differentiable switch grad mode off: Dynamo leaves that out where it is off already.

    ``graph_modules.as_function`` knows it by that.
    """
    name = next((n for n in reversed(modules) if n not in before and n.startswith("bwd_body")), None)
    if name is None:
        _leave("a Function", "its backward is once_differentiable, and Dynamo puts it where hookkit does not look")
    write_no_grad(modules[name])


def _skip(owner: type[Any]) -> None:
    """Keep Dynamo from compiling a Function's methods by themselves, when eager PyTorch calls them: it may fail again.

    Nor its base classes' methods, which those may call, nor what those call: an interpreter of kernels, say.
    """
    for base in owner.__mro__:
        for name in ("forward", "setup_context", "backward", "vjp"):
            method = getattr(vars(base).get(name), "__func__", None)
            if isinstance(method, FunctionType) and base is not torch.autograd.Function:
                never_compiled(method)


def read_attribute(ctx: Any, stock: Callable[..., Any], tx: Any, name: str) -> Any:
    """``AutogradFunctionContextVariable``'s way to an attribute, for methods that it makes nothing of, or forgets."""
    if name == "set_materialize_grads" and _is_for_thunder():
        _leave("a Function", "it calls set_materialize_grads")
    if name == "mark_non_differentiable" and not ctx.inference and _is_for_thunder():
        _leave("a forward", "it marks outputs as non-differentiable, and is compiled by itself")
    # up to torch 2.12 it forgets which arguments are; delete this when all supported versions have the attribute
    if name == "mark_dirty" and not hasattr(ctx, "dirty_tensors") and _is_for_thunder():
        _leave("a Function", "it calls mark_dirty")
    return stock(ctx, tx, name)


def call_method(ctx: Any, stock: Callable[..., Any], tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """``AutogradFunctionContextVariable.call_method``, which lets numbers be saved, where PyTorch raises an error."""
    if name == "save_for_backward" and _is_for_thunder():
        saved = [argument.realize() for argument in args]
        if not all(isinstance(s, TensorVariable) or _is_none(s) for s in saved):
            _leave("a Function", "it saves what is no tensor")
    return stock(ctx, tx, name, args, kwargs)


def trace_forward_graph(call: Any, stock: Callable[..., Any], tx: Any, ctx: Any, *rest: Any) -> Any:
    """``AutogradFunctionApplyVariable.trace_forward_graph``; what PyTorch does not track is no output."""
    traced = stock(call, tx, ctx, *rest)
    if not _is_for_thunder():
        return traced
    output = traced[1]
    items = [output] if output.is_tensor() else output.items
    if any(_tensors(item) for item in items if not item.is_tensor()):
        _leave("a Function", "its forward returns tensors inside of a container, which PyTorch does not track")
    outputs = {item.as_proxy() for item in items if item.is_tensor()}
    if not outputs.issuperset(ctx.non_differentiable or ()):
        _leave("a Function", "it marks as non-differentiable what Dynamo does not take for an output")
    return traced


def rewire_bwd_graph_outputs(
    call: Any, stock: Callable[..., Any], freevars: Any, output: Any, graph: Any, bwd_freevars: Any, args: Any
) -> None:
    """``AutogradFunctionApplyVariable.rewire_bwd_graph_outputs``, which drops gradients without an input."""
    gradients = list(output.items) if output.python_type() is tuple else [output]
    fits = len(gradients) >= len(args) and all(
        _is_none(gradient) or (gradient.is_tensor() and i < len(args) and args[i].is_tensor())
        for i, gradient in enumerate(gradients)
    )
    if not fits and _is_for_thunder():
        _leave("a Function", "its backward does not return a tensor or None for each input")
    stock(call, freevars, output, graph, bwd_freevars, args)


def speculate_subgraph(
    stock: Callable[..., Any], tx: Any, function: Any, inputs: Any, *rest: Any, **options: Any
) -> Any:
    """``speculate_subgraph`` of a Dynamo that traces a Function at one go: it drops gradients that are too many."""
    traced = stock(tx, function, inputs, *rest, **options)
    if _applied and getattr(function, "fn", None) is _applied[-1][0].backward:
        output, arguments = traced[0][0], _applied[-1][1]
        if isinstance(output, ListVariable):
            _leave("a Function", "its backward returns a list, which PyTorch takes for one gradient")
        if isinstance(output, BaseListVariable) and not all(_is_none(g) for g in output.items[len(arguments) :]):
            _leave("a Function", "its backward returns more gradients than there are inputs")
    return traced


def check_allowed_side_effect(effects: Any, stock: Callable[..., Any], item: Any) -> Any:
    """``SideEffects.check_allowed_side_effect`` of such a Dynamo: it forgets what a Function does besides."""
    if _applied and not isinstance(item, AutogradFunctionContextVariable) and _was_there(item):
        _leave("a Function", "it writes what was there before it was applied")
    return stock(effects, item)


def _was_there(item: Any) -> bool:
    """Whether a variable of Dynamo's stands for what the Function that is traced did not make."""
    if getattr(item.mutation_type, "scope", None) == 0:
        return True
    found: list[Any] = []
    VariableTracker.visit(found.append, _applied[-1][1])
    return any(part is item for part in found)


def register_hook(variable: Any, stock: Callable[..., Any], *args: Any) -> Any:
    """``TensorVariable._method_register_hook``: a hook of the gradient of a tensor that the graph has used already.

    A Dynamo that cannot write the hook down breaks the graph: the hook then misses the gradients of the uses before.
    """
    can_write_it = len(args) == 3  # it takes its translator too
    if not (can_write_it or variable.source) and variable.as_proxy().node.users and _is_for_thunder():
        root: Any = InstructionTranslator.current_tx().output.root_tx
        root.should_compile_partial_graph = lambda: False
        root.current_speculation = None  # nor from an earlier statement on
        _leave("this frame", "it registers a hook on a tensor after it has been used")
    return stock(variable, *args)


def import_source(tx: Any, stock: Callable[..., Any], module_name: str) -> Any:
    """``InstructionTranslatorBase.import_source``; the frame is left to eager PyTorch if there is no such module.

    Dynamo imports the module of a function that a transform calls, by its name; a file that was run under a name that
    nobody can import has none.
    """
    try:
        return stock(tx, module_name)
    except ImportError as error:
        if not _is_for_thunder():
            raise
        root: Any = InstructionTranslator.current_tx().output.root_tx
        root.should_compile_partial_graph = lambda: False
        root.current_speculation = None
        _leave("this frame", f"it calls a function of the module {module_name!r}, which cannot be imported", error)


def _tensors(value: Any) -> list[Any]:
    found: list[Any] = []
    VariableTracker.visit(lambda part: found.append(part) if part.is_tensor() else None, value)
    return found


def _is_none(value: Any) -> bool:
    return value.is_python_constant() and value.as_python_constant() is None


def _leave(name: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise Unsupported(f"hookkit leaves {name} to eager PyTorch: {why}") from cause


def _patch(target: str, function: Callable[..., Any], *takes: str, optional: bool = False) -> Patch:
    lost = "Dynamo may make something else of a Function than eager PyTorch"
    replace = around_method(function)
    return Patch(target, replace, lost, takes=takes, optional=optional, concerns_thunderfx=True)


_FUNCTION = "torch._dynamo.variables.misc:AutogradFunctionVariable"
_CONTEXT = "torch._dynamo.variables.misc:AutogradFunctionContextVariable"
_APPLY = "torch._dynamo.variables.higher_order_ops:AutogradFunctionApplyVariable"
_TOO_MANY = Patch(
    "torch._dynamo.variables.higher_order_ops:speculate_subgraph",
    around(speculate_subgraph),
    "gradients that are too many are dropped",
    concerns_thunderfx=True,
)
GRAPHS = Mend(
    "transforms of torch.func under thunderfx",
    "A graph of Dynamo's with a transform of `torch.func` in it, or around it, fails, or loses the transform.",
    program="""
f = thunder.dynamo.thunderfx(lambda x: torch.func.grad(lambda y: (y * y).sum())(x))
print(f(torch.ones(1)).tolist())
""",
    stock="",
    eager="[2.0]",
    patches=(
        Patch(
            "thunder.dynamo.compiler:ThunderCompiler.__call__",
            around_method(compile_graph),
            "a transform of torch.func in a program of thunderfx may be lost",
            takes=("self, gm, sample_args", "self, gm, sample_args, **compile_options"),
            concerns_thunderfx=True,
        ),
        Patch(
            "torch._dynamo.symbolic_convert:InstructionTranslatorBase.import_source",
            around_method(import_source),
            "a transform of a function in a module that cannot be imported fails",
            takes=("self, module_name",),
            optional=True,
            concerns_thunderfx=True,
        ),
    ),
)
FUNCTIONS = Mend(
    "Functions that Dynamo cannot trace",
    "Dynamo takes a custom Function that the program makes for a global, and fails inside of it; "
    "and drops `once_differentiable`.",
    program="""
def scaled(factor):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * 10 * factor

    return Scaled.apply

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(lambda x: scaled(2)(x))(x).sum().backward()
print(x.grad.tolist())
""",
    stock="",
    eager="[20.0]",
    patches=(_patch(f"{_FUNCTION}.call_apply", apply, "self, tx, args, kwargs"),),
)
CONTEXTS = Mend(
    "what a Function says to its ctx under thunderfx",
    "Dynamo makes nothing of `ctx.set_materialize_grads`, and forgets what a forward marks.",
    program="""
class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first * 20 if second is None else second * 30

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(lambda x: Two.apply(x)[0])(x).sum().backward()
print(x.grad.tolist())
""",
    stock="",
    eager="[20.0]",
    patches=(
        _patch(f"{_CONTEXT}.var_getattr|tp_getattro_impl", read_attribute, "self, tx, name"),
        _patch(f"{_CONTEXT}.call_method", call_method, "self, tx, name, args, kwargs"),
    ),
)
OUTPUTS = Mend(
    "what a Function returns under thunderfx",
    "Dynamo takes a tensor inside of a container that a forward returns for an output, which PyTorch does not.",
    program="""
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, [x * 3]

    @staticmethod
    def backward(ctx, first, second):
        return first * 20

def f(x):
    first, (second,) = Both.apply(x)
    return first + second

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(f)(x).sum().backward()
print(x.grad.tolist())
""",
    stock="",
    eager="[20.0]",
    # Newer PyTorch traces a Function in steps.
    patches=(
        _patch(
            f"{_APPLY}.trace_forward_graph",
            trace_forward_graph,
            "self, tx, ctx, fwd_tracer, args, kwargs",
            optional=True,
        ),
    ),
)
GRADIENTS = Mend(
    "gradients that a Function has too many of under thunderfx",
    "Dynamo drops what a backward returns for an input that is no tensor, where PyTorch raises an error.",
    program="""
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 20, grad

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(lambda x: Scaled.apply(x, 2))(x).sum().backward()
print(x.grad.tolist())
""",
    stock="",
    eager="RuntimeError: function ScaledBackward returned a gradient different than None at position 2",
    patches=(
        _patch(
            f"{_APPLY}.rewire_bwd_graph_outputs",
            rewire_bwd_graph_outputs,
            "self, fwd_freevars, bwd_out, bwd_graph, bwd_freevars, orig_fwd_args",
            optional=True,
        ),
        *([] if compat.dynamo_traces_in_steps() else [_TOO_MANY]),
    ),
)
HOOKS = Mend(
    "hooks under thunderfx",
    "A hook on a tensor that has been used misses the gradients of the uses before, or stands at a break of the graph.",
    program="""
def f(x):
    y = x * 2
    z = y * 3
    y.register_hook(lambda grad: grad * 10)
    return z

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(f)(x).sum().backward()
print(x.grad.tolist())
""",
    stock="",
    eager="[60.0]",
    patches=(
        _patch(
            "torch._dynamo.variables.tensor:TensorVariable._method_register_hook",
            register_hook,
            "self, name, hook",
            "self, tx, name, hook",
        ),
    ),
)
STATE = Mend(
    "state that a Function writes under thunderfx",
    "Dynamo forgets what a Function does besides computing, as to a list that was there before.",
    program="""
shapes = []

class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        shapes.append(x.shape)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 20

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(lambda x: Noting.apply(x))(x).sum().backward()
print(len(shapes), x.grad.tolist())
""",
    stock="",
    eager="1 [20.0]",
    patches=(
        _patch(
            "torch._dynamo.side_effects:SideEffects.check_allowed_side_effect", check_allowed_side_effect, "self, item"
        ),
    ),
)
MENDS = [GRAPHS, FUNCTIONS, CONTEXTS, OUTPUTS, GRADIENTS, HOOKS]
if not compat.dynamo_traces_in_steps():
    MENDS.append(STATE)
