"""What hookkit corrects where a compiled program meets PyTorch's autograd at run time.

thunder connects the outputs of a program by one autograd Function. It reads an output that nothing used as zeros, and
it is differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from torch import Tensor
from torch.nn import Parameter

from hookkit.engine import reach
from hookkit.errors import HookError

__all__ = ["Functions", "backward", "connect", "hand_over"]


_NODES = (ThunderFunction, ThunderOutputFunction)


class Functions(str):
    """The names of the calls that hookkit took over in a program, if any; travels with what the forward saves.

    Attributes:
        reach: for each argument of the program to which of its outputs it leads; empty if that does not matter.
        unreached: the places of arguments that lead to none.
        undefined: in a backward, which of the outputs have no gradient.
    """

    reach: Sequence[frozenset[int]] = ()
    unreached: Sequence[int] = ()
    undefined: Sequence[bool] = ()


class _Saved(tuple[Any, ...]):
    """What a forward saves beside tensors.

    Attributes:
        origin: what leads where those of the program's arguments come from that are no leaves, if there are any.
    """

    origin: torch.Tensor | None = None


class _Origin(torch.autograd.Function):
    """Makes a tensor without elements that leads to others, and keeps nothing of them but their place in the graph."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise AssertionError("it is behind the refusal of a second derivative")


def _origin(arguments: Sequence[Any]) -> torch.Tensor | None:
    # parameters, which are most of them, are leaves
    made = [a for a in arguments if type(a) is not Parameter and isinstance(a, Tensor) and a.grad_fn is not None]
    if not made:
        return None
    with torch.enable_grad():
        return _Origin.apply(*made)  # type: ignore[no-any-return,no-untyped-call]


def connect(stock: Callable[..., Any], **connection: Any) -> Any:
    """Connect a program's outputs to autograd, and note in its backward which gradients are undefined.

    Args:
        stock: ``thunder.executors.torch_autograd.connect_to_autograd``.
        **connection: its arguments.
    """
    others = connection["saved_other"] = _Saved(connection["saved_other"])
    others.origin = _origin(connection["flat_args"])
    names = next((o for o in reversed(others) if isinstance(o, Functions)), None)
    if names is None:
        return stock(**connection)
    undefined: list[bool] = []
    of_this_call = Functions(names)
    of_this_call.reach, of_this_call.undefined = names.reach, undefined
    connection["saved_other"] = _Saved(of_this_call if o is names else o for o in others)
    connection["saved_other"].origin = others.origin
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
    if not torch.is_grad_enabled():
        return _first_derivative(stock, ctx, names, gradients)
    # with create_graph=True; thunder empties the list of the gradients
    received = [g for g in (ctx.side_channel or {}).get("bw", gradients) if isinstance(g, torch.Tensor)]
    return _refuse_second(ctx, names, received, _first_derivative(stock, ctx, names, gradients))


def hand_over(stock: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """Hand the gradients of a program's outputs over to its backward, also those of a batch (``is_grads_batched``).

    thunder makes a random tensor to stand for them, which PyTorch's vmap refuses to do.

    Args:
        stock: ``thunder.executors.torch_autograd.ThunderOutputFunction.backward``.
        ctx: its ctx.
        *gradients: its gradients.
    """
    if not _in_a_batch():
        return stock(ctx, *gradients)
    torch._C._vmapmode_decrement_nesting()
    try:
        return stock(ctx, *gradients)
    finally:
        torch._C._vmapmode_increment_nesting()


def _in_a_batch() -> bool:
    """Whether PyTorch runs one backward for a batch of gradients (``torch._vmap_internals``, which tells nobody)."""
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level > 1


def _first_derivative(stock: Callable[..., Any], ctx: Any, names: Functions | None, gradients: Any) -> Any:
    if names is None:
        return stock(ctx, *gradients)
    with reach.running(names.undefined):
        result = stock(ctx, *gradients)
        if names.reach and any(names.undefined) and len(names.reach) <= len(result):
            leading = len(result) - len(names.reach)
            kept = [None if reach.none_used(r) else g for r, g in zip(names.reach, result[leading:], strict=True)]
            result = (*result[:leading], *kept)
    return result


def _refuse_second(ctx: Any, names: Functions | None, received: list[torch.Tensor], result: Any) -> Any:
    """The gradients that a program's backward returns, with the refusal of what is computed from them backwards.

    It lies on the way from them to all that they depend on: the program's inputs, and the gradients that it got.
    """
    inputs = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
    inputs += [g for g in (*received, getattr(ctx.saved_other, "origin", None)) if g is not None and g.requires_grad]
    tensors = [g for g in result if isinstance(g, torch.Tensor)]
    if not tensors or not inputs:
        return result
    # of a batch, in vmap, the graph is made of operations; sparse gradients cannot be added to
    batched = _in_a_batch()
    passed = [torch.zeros(())] if batched else tensors
    refused = torch._C._functions.DelayedError("", len(passed) + len(inputs))(*passed, *inputs)
    refused[0].grad_fn.register_prehook(partial(_raise_refusal, names))
    iterator = iter([g + refused[0] for g in tensors] if batched else refused)
    return tuple(next(iterator) if isinstance(g, torch.Tensor) else g for g in result)


def _raise_refusal(names: Functions | None, gradients: Any) -> NoReturn:
    raise HookError(
        f"the second derivative {f'through {names} ' if names else ''}is not supported in a program compiled by thunder, "
        "which is differentiable once (once_differentiable); compute it (create_graph=True, or "
        "torch.autograd.functional.hessian, hvp and others) with the function as it is, outside the compiled program"
    )
