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


def convert_checkpointed(stock: Callable[..., Any], graph: torch.fx.GraphModule) -> None:
    """Put thunder's operations into a checkpointed body, which it can be without where one of them is a rule's."""
    if not any(is_hooked(node.target) for node in graph.graph.nodes if node.op == "call_function"):
        stock(graph)


def _patch(target: str, replacement: Callable[..., Any], takes: str) -> Patch:
    lost = "thunderfx splits graphs at calls that rules stand for, and some higher-order operators fail"
    return Patch(target, around(replacement), lost, takes=(takes,), concerns_thunderfx=True)


PATCHES = [
    # Where graphs are split, and where the bodies of checkpoints and of Functions are looked at.
    _patch("thunder.dynamo.splitter:is_node_supported_by_thunder", is_supported, "node, thunder_options"),
    _patch("thunder.dynamo.utils:is_node_supported_by_thunder", is_supported, "node, thunder_options"),
    _patch("thunder.dynamo.utils:_checkpoint_function_converter", convert_checkpointed, "gm"),
]
