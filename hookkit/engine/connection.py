"""What hookkit corrects where a compiled program meets PyTorch's autograd at run time.

thunder connects the outputs of a program by one autograd Function. It reads an output that nothing used as zeros, and
it is differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction

from hookkit.engine import reach
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "Functions", "backward", "connect"]


_NODES = (ThunderFunction, ThunderOutputFunction)


class Functions(str):
    """The names of the calls that hookkit took over in a program, if any; travels with what the forward saves.

    Attributes:
        reach: for each argument of the program what its gradient is made from; empty if that does not matter.
        unreached: the places of arguments that lead to none.
        undefined: in a backward, which of the outputs have no gradient.
    """

    reach: Sequence[reach.Reach | None] = ()
    unreached: Sequence[int] = ()
    undefined: Sequence[bool] = ()


def connect(stock: Callable[..., Any], **connection: Any) -> Any:
    """Connect a program's outputs to autograd, and note in its backward which gradients are undefined.

    Args:
        stock: ``thunder.executors.torch_autograd.connect_to_autograd``.
        **connection: its arguments.
    """
    others = connection["saved_other"]
    names = next((o for o in reversed(others) if isinstance(o, Functions)), None)
    if names is None:
        return stock(**connection)
    undefined: list[bool] = []
    of_this_call = Functions(names)
    of_this_call.reach, of_this_call.undefined = names.reach, undefined
    connection["saved_other"] = tuple(of_this_call if o is names else o for o in others)
    if names.unreached:  # PyTorch would run what made them, without a gradient
        arguments = connection["flat_args"] = list(connection["flat_args"])
        for place in names.unreached:
            arguments[place] = arguments[place].detach()
    connection["is_differentiable_outputs"] = None  # thunderfx states it for all; `flat_output` has those that are
    stock(**connection)
    # an input that the program returns keeps the node that it has
    nodes = (o.grad_fn for o in connection["flat_output"] if isinstance(o, torch.Tensor))
    node = next((n for n in nodes if getattr(n, "_forward_cls", None) in _NODES), None)
    if node is None:
        return None

    def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
        undefined[:] = [g is None for g in gradients]

    node.register_prehook(note)
    return None


def backward(stock: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """Run a program's backward; a second derivative is refused where eager PyTorch would compute it.

    Args:
        stock: ``thunder.executors.torch_autograd.ThunderFunction.backward``.
        ctx: its ctx.
        *gradients: its gradients.
    """
    names = next((o for o in reversed(ctx.saved_other or ()) if isinstance(o, Functions)), None)
    if names is None:
        return stock(ctx, *gradients)
    with reach.running(names.undefined):
        result = stock(ctx, *gradients)
        if names.reach and reach.anything_undefined() and len(names.reach) <= len(result):
            leading = len(result) - len(names.reach)
            kept = [None if reach.none_defined(r) else g for r, g in zip(names.reach, result[leading:], strict=True)]
            result = (*result[:leading], *kept)
    if not names or not torch.is_grad_enabled():
        return result
    message = (
        f"the second derivative through {names} is not supported in a program compiled by thunder, which is "
        "differentiable once (once_differentiable); compute it (create_graph=True) outside the compiled program"
    )
    tensors = [g for g in result if isinstance(g, torch.Tensor)]
    # the refusal must lie on the way from the gradients to the program's inputs
    inputs = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
    inputs += [g for g in gradients if isinstance(g, torch.Tensor) and g.requires_grad]
    refused = torch._C._functions.DelayedError(message, len(tensors) + len(inputs))(*tensors, *inputs)
    iterator = iter(refused if isinstance(refused, tuple) else (refused,))
    return tuple(next(iterator) if isinstance(g, torch.Tensor) else g for g in result)


PATCHES = [
    Patch(
        "thunder:connect_to_autograd",
        around(connect),
        "a gradient that is undefined is zeros to the backward of a call",
        takes=(
            "backward_fn, flat_args, flat_output, saved_tensors, saved_other, return_none_instead_of_grads, "
            "disable_split_autograd, is_differentiable_outputs",
        ),
        needed=True,
    ),
    Patch(
        "thunder.executors.torch_autograd:ThunderFunction.backward",
        lambda stock: staticmethod(partial(backward, stock)),
        "a gradient that is undefined is zeros to the backward of a call, and second derivatives are lost",
        takes=("ctx, *raw_args",),
        needed=True,
    ),
]
