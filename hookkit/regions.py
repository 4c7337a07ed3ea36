"""The declaration of a region: a function, or the forward of a module class, that is compiled once for many calls."""

from __future__ import annotations

import sys
import types
from typing import Any, TypeVar

import torch

from hookkit.call import Source
from hookkit.declared import Origin
from hookkit.errors import RegistrationError
from hookkit.modes import mode
from hookkit.registry import registry
from hookkit.rule import Rule
from hookkit.targets import CallableTarget, place_of

__all__ = ["region"]

Region = TypeVar("Region", bound=Any)


def region(target: Region) -> Region:
    """Have the calls of a function, or of the modules of a class, compiled once for all that do the same.

    A program that calls one thing many times, as a transformer does its blocks, is compiled by thunder as if each call
    were written out. Of a region forward and backward are compiled once, as a program of their own, and each call is
    one operator of the program. A module's parameters and buffers are inputs of the region, so that all modules of a
    class that do the same with them are calls of one. Calls that differ, in the shapes of their arguments say, are
    calls of different regions.

    A call that cannot be one is compiled as if nothing had been declared, and :func:`hookkit.report` says why: what it
    returns shares memory with what it is given, say.

    Args:
        target: a function; a subclass of ``torch.nn.Module``, its subclasses that do not overwrite ``forward``
            included; or a subclass of ``torch.autograd.Function``, for which it is ``hookkit.mode("region")``.

    Returns:
        The target, so that it can be a decorator.

    Raises:
        RegistrationError: if the target is something else.

    Example:
        >>> import hookkit, thunder, torch
        >>> @hookkit.region
        ... class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(4, 4)
        ...
        ...     def forward(self, x):
        ...         return x + torch.tanh(self.linear(x))
        >>> jitted = thunder.jit(torch.nn.Sequential(Block(), Block(), Block()))
        >>> jitted(torch.ones(2, 4, requires_grad=True)).shape
        torch.Size([2, 4])
        >>> [region.calls for region in hookkit.report(jitted).regions]
        [3]
    """
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return mode("region")(target)
    callee = _callee(target)
    if not any(_stands_for(rule, callee) for rule in registry.current().rules):
        frame = sys._getframe(1)
        made: Rule[..., Any] = Rule(
            name=target.__name__,
            targets=(CallableTarget(callee),),
            forward=callee,
            mode="region",
            priority=-50,  # a rule for the same target, with providers of its own, wins
            declared_at=place_of(callee) or Source(frame.f_code.co_filename, frame.f_lineno),
            is_named=True,
            origin=Origin.of(frame, callee),
        )
        registry.add(made)
    return target


def _stands_for(rule: Rule[..., Any], callee: Any) -> bool:
    return rule.inlines and rule.forward is callee


def _callee(target: Any) -> Any:
    """What the program calls: the function itself, or a class's ``forward``.

    Raises:
        RegistrationError: if there is no such function.
    """
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        target = target.forward
    if isinstance(target, torch.nn.Module):
        raise RegistrationError(
            f"hookkit.region(...) got a module, an instance of {type(target).__qualname__}; give its class, "
            f"{type(target).__qualname__}, or a function"
        )
    if not isinstance(target, types.FunctionType):
        raise RegistrationError(
            f"hookkit.region(...) takes a Python function, a subclass of torch.nn.Module or a subclass of "
            f"torch.autograd.Function; got {target!r}"
        )
    return target
