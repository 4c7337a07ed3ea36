"""torch.ops.higher_order.autograd_function_apply: Dynamo's operator for a custom Function, also called by hand.

The operator has had two forms, told apart by the keywords that are given. Until torch 2.9 it was ``fwd(ctx, *args) ->
(output, saved)`` and ``bwd(ctx, *grads, *saved)``, with ``args_tensor_mask``, and the first ``sum(args_tensor_mask)``
arguments got gradients. Later there is no ctx on either side, and ``saved_for_backward_idx``.
Both forms: the class ``AutogradFunctionApply`` in torch.
"""

from __future__ import annotations

from typing import Any

import hookkit

__all__ = ["autograd_function_apply"]

KEYWORDS = {"args_tensor_mask", "dirty_idx", "non_differentiable_idx", "saved_for_backward_idx"}


@hookkit.rule(
    [
        "torch.ops:higher_order.autograd_function_apply",
        "torch._functorch.autograd_function:autograd_function_apply",
        "thunder.torch:autograd_function_apply",  # what thunderfx makes of it inside a checkpoint
    ],
    pass_call=True,
    track="positional",
    priority=-100,
)
def autograd_function_apply(call: hookkit.Call, fwd: Any, bwd: Any, *args: Any, **keywords: Any) -> Any:
    """Traces ``fwd`` and ``bwd``, in the form that the keywords say."""
    old = takes_ctx(keywords)
    output, saved = fwd(None, *args) if old else fwd(*args)
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    count = sum(keywords["args_tensor_mask"]) if old else len(args)
    return output, hookkit.mark(
        hookkit.save(bwd=bwd, old=old, saved=saved, count=count, total=len(args)),
        non_differentiable=[outputs[i] for i in keywords.get("non_differentiable_idx", ())],
        dirty=[outputs[i] for i in keywords.get("dirty_idx", ())],
    )


@autograd_function_apply.backward
def _(call: hookkit.Call, saved: Any, *grads: Any) -> Any:
    result = saved.bwd(None, *grads, *saved.saved) if saved.old else saved.bwd(*grads, *saved.saved)
    result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    given = result[: saved.count]
    if len(given) < saved.count or any(r is not None for r in result[saved.count :]):
        raise RuntimeError(
            f"autograd_function_apply: the backward returned an incorrect number of gradients (expected "
            f"{saved.count}, got {len(result)})"
        )
    return (None, None, *given, *([None] * (saved.total - saved.count)))


def takes_ctx(keywords: dict[str, Any]) -> bool:
    """Whether the keywords are those of the form that has a ctx argument.

    Raises:
        HookError: if they are of neither form, of both, or unknown.
    """
    for name in keywords:
        if name not in KEYWORDS:
            raise hookkit.HookError(
                f"autograd_function_apply got an unknown keyword {name!r}; the known ones are {sorted(KEYWORDS)}"
            )
    old, new = "args_tensor_mask" in keywords, "saved_for_backward_idx" in keywords
    if old and (new or "dirty_idx" in keywords):
        raise hookkit.HookError(
            "autograd_function_apply got args_tensor_mask, which belongs to the form in which fwd and bwd take a ctx, "
            "and saved_for_backward_idx or dirty_idx, which belong to the form without one; give the keywords of one "
            "form"
        )
    if not old and not new:
        raise hookkit.HookError(
            "autograd_function_apply needs args_tensor_mask (fwd and bwd take a ctx first) or saved_for_backward_idx "
            "and non_differentiable_idx (they do not); got neither"
        )
    if new and "non_differentiable_idx" not in keywords:
        raise hookkit.HookError("autograd_function_apply got saved_for_backward_idx without non_differentiable_idx")
    return old
