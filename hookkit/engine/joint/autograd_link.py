"""What hookkit corrects where a compiled program meets PyTorch's autograd at run time.

thunder connects the outputs of a program by one autograd Function. It reads an output that nothing used as zeros, and
it is differentiable once; where more is asked for, the program runs again (``hookkit/engine/joint/run_again.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction

from hookkit import compat
from hookkit.engine.joint.run_again import GeneratorStates, Kept, NotAgain, Program
from hookkit.engine.pytorch.dynamo_graphs import never_compiled
from hookkit.engine.pytorch.provider_function import refusing
from hookkit.engine.trace import reachability
from hookkit.patch import Patch, around

__all__ = ["PATCHES", "Functions", "backward", "connect", "is_to_have_graph", "refuse_derivative"]


_NODES = (ThunderFunction, ThunderOutputFunction)


class Functions(str):
    """The names of the calls that hookkit took over in a program, if any; travels with what the forward saves.

    Attributes:
        reach: for each argument of the program what its gradient is made from; empty if that does not matter.
        unreached: the places of arguments that lead to none.
        undefined: in a backward, which of the outputs have no gradient.
        program: the program before it was differentiated.
        kept: what a run of it keeps for second derivatives.
    """

    reach: Sequence[reachability.Reach | None] = ()
    unreached: Sequence[int] = ()
    undefined: Sequence[bool] = ()
    program: Program | None = None
    kept: Kept | None = None


def connect(stock: Callable[..., Any], **connection: Any) -> Any:
    """Connect a program's outputs to autograd, and note in its backward which gradients are undefined.

    Args:
        stock: ``thunder.executors.torch_autograd.connect_to_autograd``.
        **connection: its arguments.
    """
    others = connection["saved_other"]
    names = _functions(others)
    if names is None:
        return stock(**connection)
    undefined: list[bool] = []
    of_this_call = Functions(names)
    of_this_call.reach, of_this_call.undefined = names.reach, undefined
    if names.program is not None:
        draws = next((o for o in reversed(others) if isinstance(o, GeneratorStates)), None)
        of_this_call.kept = Kept(names.program, connection["flat_args"], draws)
    connection["saved_other"] = tuple(of_this_call if o is names else o for o in others)
    if names.unreached:  # PyTorch would run what made them, without a gradient
        arguments = connection["flat_args"] = list(connection["flat_args"])
        for place in names.unreached:
            arguments[place] = arguments[place].detach()
    connection["is_differentiable_outputs"] = None  # thunderfx states it for all; `flat_output` has those that are
    stock(**connection)
    if not names and not names.reach:
        return None
    # an input that the program returns keeps the node that it has
    nodes = (o.grad_fn for o in connection["flat_output"] if isinstance(o, torch.Tensor))
    node = next((n for n in nodes if getattr(n, "_forward_cls", None) in _NODES), None)
    if node is None:
        return None

    def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
        undefined[:] = [g is None for g in gradients]

    node.register_prehook(note)
    return None


def _functions(others: Sequence[Any] | None) -> Functions | None:
    for other in reversed(others or ()):  # at each step, twice: no generator
        if type(other) is Functions:
            return other
    return None


@never_compiled
def backward(stock: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """Run a program's backward: what thunder compiled; where the gradients are to have a graph, PyTorch's.

    Args:
        stock: ``thunder.executors.torch_autograd.ThunderFunction.backward``.
        ctx: its ctx.
        *gradients: its gradients.
    """
    names = _functions(ctx.saved_other)
    obstacle = "thunder differentiated it in a way that hookkit does not know"
    if is_to_have_graph():
        try:
            if names is not None and names.kept is not None:
                return _backward_again(ctx, names, gradients)
        except NotAgain as error:
            obstacle = str(error)
        kept = names.kept if names is not None else None
        inputs = (kept.inputs if kept is not None else None) or ()
        received = [*(ctx.side_channel or {}).get("bw", gradients)]  # thunder empties the list of the gradients
        return refuse_derivative(obstacle, [*inputs, *received], _backward_once(stock, ctx, names, gradients))
    return _backward_once(stock, ctx, names, gradients)


def is_to_have_graph() -> bool:
    """Whether the backward that is running is asked for gradients that have a graph, or for many at once."""
    return torch.is_grad_enabled() or _in_transform()


def _in_transform() -> bool:
    return compat.transforms_are_active() or compat.batched_depth() > 0


@never_compiled
def hand_on(stock: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """``ThunderOutputFunction.backward``, which makes a random number: under vmap it must not.

    It stands for a gradient, on the device ``meta``, which anomaly mode cannot look at.
    """
    with compat.outside_of_transforms() if _in_transform() else contextlib.nullcontext():
        dummy, *others = stock(ctx, *gradients)
    return (None if torch.is_anomaly_enabled() else dummy, *others)


def _backward_once(stock: Callable[..., Any], ctx: Any, names: Functions | None, gradients: tuple[Any, ...]) -> Any:
    """The gradients from the backward that thunder compiled."""
    if names is None:
        return stock(ctx, *gradients)
    if names.kept is not None and not compat.graph_is_kept():
        names.kept.release()
    with reachability.running(names.undefined, ctx):
        result = stock(ctx, *gradients)
        if names.reach and reachability.anything_undefined() and len(names.reach) <= len(result):
            leading = len(result) - len(names.reach)
            kept = [
                None if reachability.none_defined(r) else g for r, g in zip(names.reach, result[leading:], strict=True)
            ]
            result = (*result[:leading], *kept)
    return result


def _backward_again(ctx: Any, names: Functions, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients from PyTorch, which runs the program again.

    Raises:
        NotAgain: if it cannot.
    """
    assert names.kept is not None
    if ctx.return_none_instead_of_grads:
        raise NotAgain("its gradients are not synchronised (no_sync)")
    cotangents = ctx.side_channel["bw"] if ctx.side_channel is not None else gradients
    leading = len(ctx.needs_input_grad) - names.kept.count
    found = names.kept.gradients(ctx.needs_input_grad[leading:], cotangents, names.undefined)
    if ctx.side_channel is not None:
        ctx.side_channel.clear()
    if not compat.graph_is_kept():
        names.kept.release()
    return (*[None] * leading, *found)


def refuse_derivative(obstacle: str, depends_on: list[Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients whose own derivative is refused: on the way from them to all that they depend on."""
    message = (
        f"the second derivative of a program compiled by thunder cannot be computed: {obstacle}. PyTorch would have to "
        "run the program again; compute the derivative (create_graph=True) of the function that is not compiled"
    )
    return refusing(message, result, [t for t in depends_on if isinstance(t, torch.Tensor) and t.requires_grad])


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
    Patch(
        "thunder.executors.torch_autograd:ThunderOutputFunction.backward",
        lambda stock: staticmethod(partial(hand_on, stock)),
        "gradients for many cotangents at once (is_grads_batched=True) are refused",
        takes=("ctx, *args",),
    ),
]
