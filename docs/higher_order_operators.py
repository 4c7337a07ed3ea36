"""PyTorch's higher-order operators: small programs, and what becomes of each under thunder.jit and through thunderfx.

``tests/test_higher_order_operators.py`` runs every program against eager PyTorch and holds its states; the directive
``operators-table`` makes the table of the reference from the same list.

The states: *traced*, the operations of the body stand in the trace; *opaque*, the call is one operator, which PyTorch
runs and differentiates; *PyTorch*, ``thunderfx`` leaves that part of the program to PyTorch, compiled by Inductor or
not; *refused*, hookkit, or Dynamo, raises an error that says why. Where eager PyTorch raises an error, as it does for
gradients of ``flex_attention`` on a CPU, the compiled program raises that one. *On a GPU*: not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton_kernels
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

ops = torch.ops.higher_order
functions: Any = torch._higher_order_ops

CASES: list[Case] = []

# What no program calls: the passes of torch.compile, of torch.export and of other runtimes put it into graphs that
# thunder does not see.
INTERNAL = {
    "control_deps": "Inductor orders operations so",
    "_export_tracepoint": "marks places in graphs of torch.export",
    "aoti_call_delegate": "stands in graphs of torch.export for what AOTInductor has compiled",
    "auto_functionalized": "Inductor writes operators that mutate so",
    "auto_functionalized_v2": "Inductor writes operators that mutate so",
    "custom_function_call": "torch.func's form of a custom Function's apply",
    "executorch_call_delegate": "stands in graphs of torch.export for a part that ExecuTorch runs",
    "flat_apply": "torch.compile's form of a call with values that are no tensors",
    "flex_attention_backward": "the backward of flex_attention",
    "graphsafe_run_with_rng_state": "the partitioner of AOTAutograd writes recomputed random numbers so",
    "inductor_compiled_code": "stands for what Inductor has compiled",
    "run_and_save_rng_state": "the partitioner of AOTAutograd writes recomputed random numbers so",
    "run_dtensor_rng_op": "random numbers of DTensor, in graphs of AOTAutograd",
    "run_with_rng_state": "the partitioner of AOTAutograd writes recomputed random numbers so",
    "triton_kernel_wrapper_functional": "Inductor writes launches of Triton's kernels so",
    "trace_wrapped": "compiled autograd's form of a hook",
    "while_loop_stack_output": "what the backward of while_loop runs",
}

# What programs call, and no program here: each needs what is not everywhere.
OTHERS = {
    "invoke_leaf_function": "a function that torch.compile leaves alone, by `torch._dynamo.decorators.leaf_function`",
    "call_torchbind": "a method of an object of a C++ class",
    "flex_gemm": "on a GPU only",
    "inline_asm_elementwise": "on a GPU only",
    "invoke_quant": "is called by InvokeQuant, as `invoke_quant_packed`",
    "local_map_hop": "a part of a program on each device of a mesh",
    "wrap_activation_checkpoint": "stands in Dynamo's graphs for `tag_activation_checkpoint`",
}


@dataclass(frozen=True)
class Case:
    """A program that calls a higher-order operator.

    Attributes:
        operator: its name in ``torch.ops.higher_order``.
        point: what the program does, in Markdown.
        jit: what becomes of it under thunder.jit.
        fx: what becomes of it through thunderfx.
        make: returns the program and its arguments.
        exists: whether this torch has what the program calls.
    """

    operator: str
    point: str
    jit: str
    fx: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    exists: bool


def case(
    operator: str, point: str, jit: str = "opaque", fx: str = "opaque", *, exists: bool = True
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a program."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(operator, point, jit, fx, make, exists and has(operator)))
        return make

    return add


def has(operator: str) -> bool:
    """Whether this torch has an operator."""
    return hasattr(ops, operator)


def vector(n: int = 4) -> Tensor:
    """A tensor that requires grad."""
    return (torch.arange(1, n + 1, dtype=torch.float32) / 4).requires_grad_()


def weight(n: int = 4) -> Tensor:
    """Another one."""
    return torch.linspace(1, 2, n).requires_grad_()


class Scale(nn.Module):
    """A module with a parameter, whose ``forward`` calls a function with the module's own method."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))
        self.call = call

    def scaled(self, x: Tensor) -> Tensor:
        """The body."""
        return x.sin() * self.weight

    def forward(self, x: Tensor) -> Any:
        """The program."""
        return self.call(self.scaled, x)


# ----------------------------------------------------------------------------------------------------------------- cond


@case("cond", "`torch.cond`, the first branch")
def _():
    def program(x, w):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 3, lambda x: x.cos(), (x * w,)) * 2

    return program, (vector(), weight())


@case("cond", "`torch.cond`, the second branch, which uses a captured tensor of the program; the first uses another")
def _():
    def program(x, w):
        y, z = x.sin(), w.exp()
        return torch.cond(x.sum() < 0, lambda x: x * y, lambda x: x * z, (x,))

    return program, (vector(), weight())


@case("cond", "`torch.cond` with a module's method, whose parameter it captures")
def _():
    return Scale(lambda body, x: torch.cond(x.sum() > 0, body, lambda x: x.cos(), (x,))), (vector(),)


@case("cond", "`torch.cond` with a predicate that is known while the program is traced", "traced", "traced")
def _():
    return lambda x: torch.cond(x.shape[0] > 2, lambda x: x.sin(), lambda x: x.cos(), (x,)), (vector(),)


@case("cond", "`torch.cond` in a loop, with branches that use its variable")
def _():
    def program(x, w):
        for k in range(3):
            x = torch.cond(x.sum() > 0, lambda x: x * k + w, lambda x: x.cos(), (x,))  # noqa: B023
        return x

    return program, (vector(), weight())


@case("cond", "`torch.cond` in a branch of another, in a checkpoint, under autocast")
def _():
    def program(x, w):
        def inner(x):
            return torch.cond(x.sum() > 1, lambda x: x[None] @ w[:, None], lambda x: x[None] @ x[:, None], (x,))

        def outer(x):
            return torch.cond(x.sum() > 0, inner, lambda x: x.sum()[None, None].to(torch.bfloat16), (x,)).float()

        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(outer, x, use_reentrant=False)

    return program, (vector(), weight())


@case("cond", "`torch.cond` under `torch.vmap`", fx="PyTorch")
def _():
    def program(x, w):
        def row(r):
            return torch.cond(r.sum() > 1, lambda r: r.sin(), lambda r: r.cos(), (r,))

        return torch.vmap(row)(x.outer(w)) * x

    return program, (vector(), weight())


@case("cond", "by hand")
def _():
    return lambda x: ops.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,)), (vector(),)


@case("switch", "`torch._higher_order_ops.switch`, the last branch, with a captured tensor", exists=has("switch"))
def _():
    def program(x, w):
        branches = [lambda x: x.sin(), lambda x: x.cos(), lambda x: x * w]
        return functions.switch((x > 0).sum() - 2, branches, (x,))

    return program, (vector(), weight())


# ---------------------------------------------------------------------------------------------------------------- loops


@case("while_loop", "`torch._higher_order_ops.while_loop` with a captured tensor")
def _():
    def program(x, w):
        count = torch.tensor(0)
        return functions.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * w), (count, x))

    return program, (vector(), weight())


@case("while_loop", "by hand")
def _():
    def program(x):
        return ops.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x), ())

    return program, (vector(),)


@case("scan", "`torch._higher_order_ops.scan` with a captured tensor")
def _():
    def program(x, w):
        return functions.scan(lambda carry, x: (carry + x * w, carry * x), torch.zeros(4), x.outer(w))

    return program, (vector(3), weight())


@case("scan", "`scan` along another dimension, backwards, of several tensors")
def _():
    def step(carry, row):
        return {"sum": carry["sum"] + row[0]}, (row[0] * row[1], carry["sum"].sin())

    def program(x, w):
        rows = (x.outer(w), w * x.outer(w))
        return functions.scan(step, {"sum": torch.zeros(3)}, rows, dim=1, reverse=True)

    return program, (vector(3), weight())


@case("scan", "a scan with `torch.cond` in its step")
def _():
    def program(x, w):
        def step(carry, row):
            return torch.cond(carry.sum() > 4, lambda c: c * row, lambda c: c + row * w, (carry,)), row * carry

        return functions.scan(step, torch.ones(4), x.outer(w))

    return program, (vector(3), weight())


@case("scan", "by hand; Dynamo takes it with a partial only", fx="refused")
def _():
    def program(x):
        return ops.scan(lambda carry, x: (carry + x, carry * x), (torch.zeros(()),), (x,), ())

    return program, (vector(),)


@case("associative_scan", "`torch._higher_order_ops.associative_scan` with a captured tensor", fx="PyTorch")
def _():
    def program(x, w):
        def combine(a, b):
            return a + b * w

        return functions.associative_scan(combine, x.outer(w), 0, combine_mode="generic")

    return program, (vector(5), weight())


@case("associative_scan", "by hand")
def _():
    return lambda x: ops.associative_scan(lambda a, b: (a * b,), (x,), ()), (vector(),)


@case("map_impl", "`torch._higher_order_ops.map` with a captured tensor and another argument")
def _():
    def program(x, w):
        return functions.map(lambda row, x: row.sin() * w * x[0], x.outer(w), x)

    return program, (vector(), weight())


@case("map_impl", "by hand")
def _():
    return lambda x: ops.map_impl(lambda x: (x.sin(),), (x,), ()), (vector(),)


# ------------------------------------------------------------------------------------------------------------ attention


def heads(seed: int) -> Tensor:
    """Queries, keys or values: two heads, eight positions of sixteen numbers."""
    return torch.rand(1, 2, 8, 16, generator=torch.Generator().manual_seed(seed))


@case("flex_attention", "`flex_attention`, without gradients", fx="PyTorch")
def _():
    return lambda q, k, v: flex_attention(q, k, v), tuple(map(heads, range(3)))


@case("flex_attention", "`flex_attention` with a `score_mod` that captures a tensor", fx="PyTorch")
def _():
    def program(q, k, v, bias):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[i - j + 8])

    return program, (*map(heads, range(3)), torch.linspace(-1, 1, 17))


MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")


@case("flex_attention", "`flex_attention` with a `block_mask` from outside", fx="PyTorch")
def _():
    return lambda q, k, v: flex_attention(q, k, v, block_mask=MASK), tuple(map(heads, range(3)))


# -------------------------------------------------------------------------------------------------------------- regions


@case(
    "invoke_subgraph",
    "`torch.compiler.nested_compile_region`, called twice",
    "traced",
    "traced",
    exists=hasattr(torch.compiler, "nested_compile_region"),
)
def _():
    @torch.compiler.nested_compile_region
    def region(x, w):
        return x.sin() * w

    return lambda x, w: region(region(x, w), w), (vector(), weight())


@case("wrap", "by hand", "traced", "traced")
def _():
    return lambda x, w: ops.wrap(lambda x: x.sin() * w, x), (vector(), weight())


@case("wrap_with_set_grad_enabled", "by hand, off", "traced", "traced")
def _():
    return lambda x: ops.wrap_with_set_grad_enabled(False, lambda x: x.sin(), x) * x, (vector(),)


@case("wrap_with_set_grad_enabled", "by hand, on", "traced", "traced")
def _():
    def program(x, w):
        with torch.no_grad():
            return ops.wrap_with_set_grad_enabled(True, lambda x: x.sin() * w, x)

    return program, (vector(), weight())


@case("wrap_with_autocast", "by hand", fx="PyTorch")
def _():
    def program(x, w):
        return ops.wrap_with_autocast("cpu", torch.bfloat16, True, False, lambda x: x[None] @ w[:, None], x)

    return program, (vector(), weight())


@case("hints_wrapper", "by hand; eager PyTorch has no gradient of it")
def _():
    return lambda x: ops.hints_wrapper(lambda x: (x.sin(),), (x,), {}, hints={"a": 1}), (vector().detach(),)


@case("strict_mode", "`torch._higher_order_ops.strict_mode`; eager PyTorch has no gradient of it")
def _():
    return lambda x, w: functions.strict_mode(lambda x: x.sin() * w, (x,)), (vector().detach(), weight().detach())


@case("strict_mode", "by hand")
def _():
    return lambda x: ops.strict_mode(lambda x: (x.sin(),), (x,)), (vector().detach(),)


CONSTANT_GRAPH = torch.fx.symbolic_trace(lambda x: (x.sin(),))


@case("run_const_graph", "by hand; eager PyTorch has no gradient of it", fx="traced")
def _():
    return lambda x: ops.run_const_graph(CONSTANT_GRAPH, (x,)), (vector().detach(),)


@case("dynamo_bypassing_wrapper", "by hand; Dynamo takes it with a function from outside only", fx="refused")
def _():
    return lambda x: ops.dynamo_bypassing_wrapper(lambda f: f, lambda x: (x.sin(),), x), (vector(),)


@case(
    "invoke_quant_packed",
    "`torch._higher_order_ops.InvokeQuant`",
    fx="PyTorch",
    exists=hasattr(functions, "InvokeQuant"),
)
def _():
    quantised = functions.InvokeQuant()
    return lambda x: quantised(lambda x: (x.sin(),), x), (vector(),)


# ----------------------------------------------------------------------------------------------------------- operations


@case("out_dtype", "`torch._higher_order_ops.out_dtype`; eager PyTorch has no gradient of it")
def _():
    def program(a, b):
        return functions.out_dtype(torch.ops.aten.mm.default, torch.int32, a, b)

    integers = torch.arange(16, dtype=torch.int8).reshape(4, 4)
    return program, (integers, integers.T.contiguous())


@case("foreach_map", "`torch._higher_order_ops.foreach_map`")
def _():
    return lambda x, w: functions.foreach_map(torch.add, [x, w], [w, w]), (vector().detach(), weight().detach())


@case("with_effects", "by hand, with a token that is a tensor", fx="PyTorch")
def _():
    return lambda x: ops.with_effects(torch.zeros(0), torch.ops.aten.sin.default, x), (vector(),)


@case("print", "by hand, of a number")
def _():
    def program(x):
        ops.print("{}", 1)
        return x.sin()

    return program, (vector(),)


@case("register_hook", "`Tensor.register_hook` on a tensor that the program makes", "refused", "PyTorch")
def _():
    def program(x):
        y = x.sin()
        y.register_hook(lambda grad: grad * 100)
        return y * x

    return program, (vector(),)


@case(
    "triton_kernel_wrapper_mutation",
    f"a launch of a kernel of {triton_kernels.NAME}, inside of a Function",
    fx="on a GPU",
)
def _():
    return lambda x: Launched.apply(x).sin(), (vector(),)


# -------------------------------------------------------------------------------------------------- autograd, recompute


@case("tag_activation_checkpoint", "`torch.utils.checkpoint.checkpoint`, not reentrant", "traced", "traced")
def _():
    def program(x, w):
        return checkpoint(lambda x: (x.sin() * w).exp(), x, use_reentrant=False)

    return program, (vector(), weight())


@case("tag_activation_checkpoint", "by hand, with a graph module", "traced", "traced")
def _():
    return lambda x: ops.tag_activation_checkpoint(BODY, x, use_reentrant=False), (vector(),)


BODY = torch.fx.symbolic_trace(lambda x: x.sin().exp())
BODY.meta = {}


class Launched(torch.autograd.Function):
    """A Function with a kernel, and a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        """Thrice."""
        return triton_kernels.scaled(x, 3)

    @staticmethod
    def backward(ctx, grad):
        """A hundred times."""
        return triton_kernels.scaled(grad, 100)


class Hundred(torch.autograd.Function):
    """A Function with a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        """A hundred times."""
        return grad * 100


@case("autograd_function_apply", "what Dynamo makes of a custom Function", "traced", "traced")
def _():
    return lambda x: Hundred.apply(x).sin(), (vector(),)
