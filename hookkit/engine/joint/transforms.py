"""Transforms around a compiled program: where one is active, PyTorch runs the program, eagerly.

A program is compiled for plain tensors. Under ``torch.func.grad``, ``vmap`` and the like, and with dual tensors of
forward-mode AD, tensors stand for more than their data; the program that was not compiled knows what to do with them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import thunder
import torch
from thunder.core.module import ThunderModule
from thunder.dynamo.compiler import ThunderFXCompiledObject

from hookkit import compat
from hookkit.errors import TransformWarning, warn_user
from hookkit.patch import Patch, around, around_method

__all__ = ["PATCHES", "active", "eager_runs_of"]

_warned: set[str] = set()

# For the statistics of a compiled program, or the backend of one of thunderfx, how often which transform was active.
_eager_runs: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def active() -> str:
    """The transform that is active, in words; empty if there is none."""
    if compat.transforms_are_active():
        return "a transform of torch.func"
    if compat.dual_level() >= 0:
        return "forward-mode AD"
    return ""


def eager_runs_of(compiled: Any) -> dict[str, int]:
    """How often PyTorch ran a compiled program, by the transform that was active around it.

    Args:
        compiled: what ``thunder.jit`` or ``thunderfx`` returned.
    """
    backend = getattr(compiled, "_backend", None)
    return dict(_eager_runs.get(thunder.compile_stats(compiled) if backend is None else backend, {}))


def _note(program: Any) -> None:
    """Remember that PyTorch runs a program; None if it is not known which."""
    if program is not None:
        _eager_runs.setdefault(program, Counter())[active()] += 1


def leaves_to_pytorch(stock: Callable[[], bool]) -> bool:
    """Whether a compiled program that is called runs in eager PyTorch.

    Args:
        stock: ``thunder.is_tracing``: thunder does it for a compiled program that is called while it traces another.
    """
    return stock() or bool(active())


def leave(stock: Callable[[], None]) -> None:
    """``_recursive_jit_call_warning``, which a compiled program calls before it runs in eager PyTorch.

    Args:
        stock: what thunder says where the reason is that it traces another program.
    """
    if not active():
        stock()
        return
    _note(_calling_program())
    _warn()


def _calling_program() -> Any:
    """The statistics of the compiled program that calls; None if thunder has no variable of that name any more."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals is not vars(thunder):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals.get("cs") if frame is not None else None


def _warn() -> None:
    """Say why a compiled program runs in eager PyTorch, once for each reason."""
    reason = active()
    if reason not in _warned:
        _warned.add(reason)
        warn_user(
            f"{reason} is active around a program compiled by thunder, which is compiled for plain tensors: PyTorch "
            "runs the program that was not compiled, with the same result and eager PyTorch's speed and memory. To "
            "be without this warning give the transform the program that is not compiled",
            TransformWarning,
        )


def call_graphs(compiled: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``ThunderFXCompiledObject.__call__``; under a transform Dynamo has nothing to do.

    Args:
        compiled: what ``thunderfx`` returned.
        stock: its method.
        *args: what it is called with.
        **kwargs: the same, by keyword.
    """
    if not active() or torch.compiler.is_compiling():
        return stock(compiled, *args, **kwargs)
    _note(compiled._backend)
    _warn()
    with compat.without_dynamo():
        return stock(compiled, *args, **kwargs)


def functional_call(stock: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.func.functional_call``; of a compiled module the one that was not compiled is called.

    A compiled module looks its parameters up elsewhere, and would not see those that it is to be called with.

    Args:
        stock: what it comes to, in ``torch.nn.utils.stateless``.
        module: the module.
        *args: the parameters, and what the module is called with.
        **kwargs: the same, by keyword.
    """
    if isinstance(module, ThunderModule):
        module = module._model
    elif isinstance(module, ThunderFXCompiledObject):
        module = getattr(module._func, "_orig_mod", module)  # as torch.compile names it
    return stock(module, *args, **kwargs)


PATCHES = [
    Patch(
        "torch.nn.utils.stateless:_functional_call",
        around(functional_call),
        "torch.func.functional_call of a compiled module may use the module's own parameters",
        takes=("module, parameters_and_buffers, args, kwargs, tie_weights, strict",),
    ),
    Patch(
        "thunder:is_tracing",
        around(leaves_to_pytorch),
        "a transform of torch.func around a compiled program fails, and forward-mode AD ignores a Function's jvp",
        takes=("",),
        needed=True,
    ),
    Patch(
        "thunder:_recursive_jit_call_warning",
        around(leave),
        "the warning that a program runs in eager PyTorch is missing, and the reason in its report",
    ),
    Patch(
        "thunder.dynamo.compiler:ThunderFXCompiledObject.__call__",
        around_method(call_graphs),
        "forward-mode AD around a program of thunderfx ignores a Function's jvp",
        takes=("self, *args, **kwargs",),
        concerns_thunderfx=True,
    ),
]
