"""Operators of torch.library: the backward that ``register_autograd`` was given is traced, the operator itself runs.

The contract is that of ``make_autograd_impl`` in torch/_library/autograd.py. An operator that is registered as
``CompositeImplicitAutograd`` is traced through. What has neither, or cannot be traced, is one operator that PyTorch
runs and differentiates (``hookkit/rules/operations.py``).
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit
from hookkit.rules.autograd_function import Context

__all__ = ["composite_operator", "custom_operator"]


def has_formula(call: hookkit.Call) -> bool:
    """Whether an operator of which thunder knows nothing has a backward of its own."""
    return call.unsupported is not None and call.operator is not None and call.operator.backward is not None


def is_composite(call: hookkit.Call) -> bool:
    """Whether an operator of which thunder knows nothing is written in operations of PyTorch."""
    return call.unsupported is not None and call.operator is not None and call.operator.composite is not None


@hookkit.rule(hookkit.where(has_formula), pass_call=True, opaque_callee=True, priority=-150)
def custom_operator(call: hookkit.Call, *inputs: Any, **keywords: Any) -> Any:
    """Runs the operator, traces its ``setup_context``, and later the backward that ``register_autograd`` was given."""
    output = call.callable(*inputs, **keywords)
    ctx = Context(tuple([needs_gradient(i) for i in inputs]))
    setup_context: Any = call.operator.setup_context  # type: ignore[union-attr]
    if setup_context is not None and keywords:
        setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output)
    elif setup_context is not None:
        setup_context(ctx=ctx, inputs=inputs, output=output)
    ctx.saved_tensors = getattr(ctx, "to_save", ())
    return output, hookkit.mark(
        hookkit.save(ctx=ctx),
        non_differentiable=ctx.non_differentiable,
        materialize_grads=ctx.materialize_grads,
    )


@custom_operator.backward
def _(call: hookkit.Call, saved: Any, *grads: Any) -> Any:
    backward: Any = call.operator.backward  # type: ignore[union-attr]
    result = backward(saved.ctx, *grads)
    result = result if isinstance(result, tuple) else (result,)
    # An operator is called without the arguments that have their default values, and needs no gradients for them.
    missing = call.args[len(result) :]
    return result if holds_tensor(missing) else (*result, *([None] * len(missing)))


@hookkit.rule(hookkit.where(is_composite), pass_call=True, opaque_callee=True, priority=-150)
def composite_operator(call: hookkit.Call, *inputs: Any, **keywords: Any) -> Any:
    """Traces the function that is registered for the operator."""
    composite: Any = call.operator.composite  # type: ignore[union-attr]
    return composite(*inputs, **keywords)


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a list with one."""
    if isinstance(value, (list, tuple)):
        return any([holds_tensor(v) for v in value])
    return isinstance(value, torch.Tensor)


def needs_gradient(value: Any) -> Any:
    """What ``ctx.needs_input_grad`` says of an argument: a bool, or a list of them."""
    if isinstance(value, (list, tuple)):
        return [needs_gradient(v) for v in value]
    return isinstance(value, torch.Tensor) and value.requires_grad
