"""PyTorch's higher-order operators, those that programs call: control flow, and what wraps a region of a program.

What only runs its body is interpreted, so that the body is traced. Control flow on values, and loops, are one operator
that PyTorch runs and differentiates; what such a call returns is known from its body, run on tensors without data. What
the bodies close over PyTorch lifts to arguments, and so does hookkit (``hookkit/engine/values/captured.py``).
What each operator is: the modules of ``torch._higher_order_ops``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import hookkit
from hookkit import compat
from hookkit.rules._names import of_torch

__all__ = [
    "associative_scan",
    "compiled",
    "cond",
    "cond_of_a_number",
    "flex_attention",
    "higher_order_operator",
    "map_over_slices",
    "nested_region",
    "printed",
    "regions",
    "run_by_pytorch",
    "scan",
    "scan_operator",
    "set_grad_enabled_region",
    "strict_mode",
    "subgraph",
    "switch",
    "while_loop",
]

PRIORITY = -100
HIGHER_ORDER = tuple({base for kind in of_torch("ops.higher_order.cond") for base in type(kind).__mro__[1:2]})


def operators(*names: str) -> list[Any]:
    """Those of ``torch.ops.higher_order`` that this torch has."""
    return of_torch(*(f"ops.higher_order.{name}" for name in names))


def functions(*names: str) -> list[Any]:
    """Those of ``torch._higher_order_ops`` that this torch has; of some, older ones have but the module."""
    return [found for found in of_torch(*(f"_higher_order_ops.{name}" for name in names)) if callable(found)]


# ------------------------------------------------------------------------------------------------------- control flow

cond = hookkit.rule([torch.cond, *operators("cond")], mode="opaque", priority=PRIORITY, name="cond")


@cond.meta
def _(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Return what the first branch returns; PyTorch compares the two."""
    return fresh(true_fn(*operands))


@hookkit.rule([torch.cond, *operators("cond")], mode="inline", priority=PRIORITY + 1)
def cond_of_a_number(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Calls the branch that is taken, where that is known while the program is traced."""
    return true_fn(*operands) if pred else false_fn(*operands)


@cond_of_a_number.when
def _(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return isinstance(pred, bool | int | float) or hookkit.decline("the predicate is a tensor")


SWITCHES = [*functions("switch"), *operators("switch")]  # from torch 2.15
switch = hookkit.rule(SWITCHES, mode="opaque", priority=PRIORITY, name="switch")


@switch.meta
def _(index: Any, branches: Any, operands: Any = ()) -> Any:
    """Return what the first branch returns; PyTorch compares them."""
    return fresh(branches[0](*operands))


LOOPS = [*functions("while_loop"), *operators("while_loop")]
while_loop = hookkit.rule(LOOPS, mode="opaque", priority=PRIORITY, name="while_loop")


@while_loop.meta
def _(cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any = ()) -> Any:
    """Return tensors like those that are carried."""
    return fresh(carried_inputs)


scan = hookkit.rule(functions("scan"), mode="opaque", priority=PRIORITY, name="scan")


@scan.meta
def _(combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    """Stack what one step returns."""
    place = dim % first(xs).ndim
    carry, rows = combine_fn(init, each(lambda x: x.select(place, 0), xs))
    along = place if compat.stacks_along_dim(*functions("scan")) else 0

    def stacked(row: torch.Tensor) -> torch.Tensor:
        return row.new_empty((first(xs).shape[place], *row.shape)).movedim(0, along if along <= row.ndim else 0)

    return fresh(carry), each(stacked, rows)


scan_operator = hookkit.rule(operators("scan"), mode="opaque", priority=PRIORITY, name="scan_operator")


@scan_operator.meta
def _(combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    """Stack what one step returns."""
    flat = list(combine_fn(*init, *(x[0] for x in xs), *additional_inputs))
    carry, rows = flat[: len(init)], flat[len(init) :]
    return (*fresh(carry), *(row.new_empty((xs[0].shape[0], *row.shape)) for row in rows))


map_over_slices = hookkit.rule([*functions("map")], mode="opaque", priority=PRIORITY, name="map_over_slices")


@map_over_slices.meta
def _(f: Any, xs: Any, *args: Any) -> Any:
    """Stack what one slice gives."""
    rows = f(each(lambda x: x[0], xs), *args)
    return each(lambda row: row.new_empty((first(xs).shape[0], *row.shape)), rows)


associative_scan = hookkit.rule(
    functions("associative_scan"), mode="opaque", priority=PRIORITY, name="associative_scan"
)


@associative_scan.meta
def _(combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """Return tensors like those that are scanned."""
    return fresh(xs)


FLEX = "torch.nn.attention.flex_attention:flex_attention"
flex_attention = hookkit.rule(FLEX, mode="opaque", priority=PRIORITY, name="flex_attention")


@flex_attention.meta
def _(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return what attention returns, with a row of statistics where that is asked for."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    row = query.new_empty(query.shape[:-1], dtype=dtype)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        wanted = {name: torch.empty_like(row) for name in ("lse", "max_scores") if getattr(return_aux, name, False)}
        return out, AuxOutput(**wanted)
    return (out, row) if return_lse else out


# ------------------------------------------------------------------------------------------ regions: a body that is run


@hookkit.rule(operators("wrap"), mode="inline", priority=PRIORITY)
def regions(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the body."""
    return func(*args, **kwargs)


# That of torch 2.7 takes a list of operands, and is run by PyTorch.
SUBGRAPHS = [o for o in operators("invoke_subgraph") if "*operands" in str(inspect.signature(o))]


@hookkit.rule(SUBGRAPHS, mode="region", priority=PRIORITY)
def subgraph(subgraph: Any, identifier: Any, *operands: Any) -> Any:
    """Runs the body of a nested_compile_region, which is compiled once for all calls that do the same."""
    return subgraph(*operands)


HAS_NESTED_REGIONS = hasattr(torch.compiler, "nested_compile_region")  # torch 2.8


@hookkit.rule(
    ["torch._higher_order_ops.invoke_subgraph:invoke_subgraph_placeholder"] if HAS_NESTED_REGIONS else [],
    mode="region",
    priority=PRIORITY,
)
def nested_region(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the body of a nested_compile_region, which is compiled once for all calls that do the same."""
    return func(*args, **kwargs)


@hookkit.rule(torch.compile, mode="inline", priority=PRIORITY)
def compiled(model: Any = None, **options: Any) -> Any:
    """Leaves what a program would compile to thunder, which compiles the program."""
    return model if model is not None else lambda decorated: decorated


@hookkit.rule(operators("wrap_with_set_grad_enabled"), mode="inline", priority=PRIORITY)
def set_grad_enabled_region(enable_grad: bool, wrapped_func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the body with grad mode on or off."""
    with torch.set_grad_enabled(enable_grad):
        return wrapped_func(*args, **kwargs)


strict_mode = hookkit.rule(functions("strict_mode"), mode="opaque", priority=PRIORITY, name="strict_mode")


@strict_mode.meta
def _(callable: Any, operands: Any) -> Any:
    """Return what the body returns."""
    return fresh(callable(*operands))


printed = hookkit.rule(operators("print"), mode="opaque", priority=PRIORITY, name="printed")


@printed.meta
def _(format_str: str, *args: Any, **kwargs: Any) -> None:
    """Return nothing."""
    return None


def is_higher_order(call: hookkit.Call) -> bool:
    """Whether a higher-order operator is called."""
    return isinstance(call.callable, HIGHER_ORDER)


# Those of which eager PyTorch knows no gradient, those that make something else of their body, and autocast, under
# which thunder casts fewer operations. Through thunderfx they go to thunder, too.
REGIONS = ("wrap_with_autocast", "hints_wrapper", "strict_mode", "run_const_graph", "dynamo_bypassing_wrapper")
OPERATIONS = ("associative_scan", "map_impl", "out_dtype", "foreach_map")
run_by_pytorch = hookkit.rule(
    operators(*REGIONS, *OPERATIONS), mode="opaque", priority=PRIORITY, name="higher_order_by_pytorch"
)

# All others; through thunderfx Inductor has them, such as attention and Triton's kernels, for which it has its own.
higher_order_operator = hookkit.rule(
    hookkit.where(is_higher_order), mode="opaque", priority=-150, name="higher_order_operator"
)


def each(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A tree with a function applied to its tensors."""
    if isinstance(tree, dict):
        return type(tree)((key, each(function, item)) for key, item in tree.items())
    if isinstance(tree, list | tuple):
        items = [each(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def first(tree: Any) -> torch.Tensor:
    """The first tensor in a tree."""
    found: list[torch.Tensor] = []
    each(found.append, tree)
    return found[0]


def fresh(tree: Any) -> Any:
    """New tensors like those in a tree."""
    return each(torch.empty_like, tree)
