"""Which operations of Dynamo's graphs go to thunder: ``thunderfx`` leaves to Inductor what thunder does not know.

A call that a rule stands for is one that thunder knows, so that it is no reason to split a graph. What Inductor makes
of PyTorch's higher-order operators in a part of a graph fails for many, and for some is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from hookkit.patch import Patch, around
from hookkit.registry import registry

__all__ = ["PATCHES", "is_supported"]

# thunderfx looks into the bodies of these by itself.
_KNOWN = ("tag_activation_checkpoint", "autograd_function_apply")


def is_supported(stock: Callable[..., Any], node: torch.fx.Node, options: Any) -> Any:
    """``is_node_supported_by_thunder``: whether a node of a graph is for thunder, and if not, why."""
    target = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return (True, None) if is_hooked(target) else stock(node, options)


def is_hooked(target: Any) -> bool:
    """Whether a rule stands for what a node calls: a user's, or one for a higher-order operator."""
    is_higher_order = isinstance(target, HigherOrderOperator)
    if is_higher_order and target.name() in _KNOWN:
        return False
    return any(is_higher_order or not rule.ships for rule in registry.named(target))


def _patch(module: str) -> Patch:
    return Patch(
        f"{module}:is_node_supported_by_thunder",
        around(is_supported),
        "thunderfx splits graphs at calls that rules stand for, and some higher-order operators fail",
        takes=("node, thunder_options",),
        concerns_thunderfx=True,
    )


# Where graphs are split, and where bodies are looked at.
PATCHES = [_patch("thunder.dynamo.splitter"), _patch("thunder.dynamo.utils")]
