"""torch.autograd.Function: ``forward``, ``setup_context`` and ``backward`` of the class stand for ``apply``.

The contract of ctx is that of ``FunctionCtx`` in torch/autograd/function.py.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit

__all__ = ["Context", "autograd_function"]

Function = torch.autograd.Function


class Context:
    """The ctx of a traced call."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for backward; the last call wins."""
        self.to_save = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Accepted; forward-mode derivatives are not computed here."""
        self.saved_for_forward = tensors

    def mark_dirty(self, *args: Any) -> None:
        """Say which arguments the forward changed in place."""
        self.dirty_tensors = args

    def mark_non_differentiable(self, *args: Any) -> None:
        """Say which outputs do not require grad."""
        self.non_differentiable = args

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether backward gets zeros, or None, for unused outputs."""
        self.materialize_grads = value


@hookkit.rule(Function, pass_call=True, track="positional", opaque_callee=True, priority=-100)
def autograd_function(call: hookkit.Call, *args: Any) -> Any:
    """Traces the class's ``forward`` and ``backward``; ``setup_context`` and ``vjp``, too, where it has them."""
    function: Any = call.function
    ctx = Context(call.needs)
    if function.setup_context is Function.setup_context:
        output = function.forward(ctx, *args)
    else:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
    ctx.saved_tensors = getattr(ctx, "to_save", ())
    for i, saved in enumerate(ctx.saved_tensors):
        if saved is not None and not isinstance(saved, torch.Tensor):
            kind = type(saved).__name__
            raise TypeError(f"save_for_backward can only save variables, but argument {i} is of type {kind}")
    if isinstance(output, tuple):
        output = tuple(output)
    return output, hookkit.mark(
        hookkit.save(ctx=ctx),
        non_differentiable=ctx.non_differentiable,
        dirty=ctx.dirty_tensors,
        materialize_grads=ctx.materialize_grads,
    )


@autograd_function.backward
def _(call: hookkit.Call, saved: Any, *grads: Any) -> Any:
    function: Any = call.function
    backward = function.backward
    if function.vjp is not Function.vjp:
        if backward is not Function.backward:
            raise RuntimeError("Implementing both 'backward' and 'vjp' for a custom Function is not allowed.")
        backward = function.vjp
    boxed = hasattr(Function, "boxed_grads_call") and function.boxed_grads_call  # torch up to 2.12 does not know it
    result = backward(saved.ctx, list(grads)) if boxed else backward(saved.ctx, *grads)
    if isinstance(result, list):
        raise RuntimeError(
            f"{function.__name__}.backward returned a list, which PyTorch takes for one gradient (expected a tuple of "
            f"{len(call.args)}); return a tuple"
        )
    return result
