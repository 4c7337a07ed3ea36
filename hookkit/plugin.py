"""Puts hookkit in place, and takes it out again: installs the patches that each module declares.

Each patch is installed by itself. One that does not fit the installed torch or thunder is left out and named in a
warning; where one is left out without which nothing can be right, `thunder.jit` refuses in words.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import thunder
import torch

from hookkit import patch
from hookkit.errors import HookError, PluginWarning
from hookkit.patch import Installed, LeftOut, Misfit, Patch

__all__ = ["disable", "enable", "is_enabled"]

# The modules that declare patches, in `PATCHES`, and what is lost where one cannot be imported.
_ALL: dict[str, Any] = {"lost": "no program is right", "needed": True}
_SPEED: dict[str, Any] = {"lost": "programs take longer to compile"}
_THUNDERFX: dict[str, Any] = {"lost": "Dynamo makes something else of a Function", "concerns_thunderfx": True}
SOURCES: dict[str, dict[str, Any]] = {
    "hookkit.engine.dispatch.lookaside": _ALL,
    "hookkit.engine.opaque.overwritten": _ALL,
    "hookkit.engine.trace.recomputation": _ALL,
    "hookkit.engine.dispatch.takeover": _ALL,
    "hookkit.engine.trace.functionalize": _ALL,
    "hookkit.engine.joint.autograd_link": _ALL,
    "hookkit.engine.joint.transforms": _ALL,
    "hookkit.mends.threads": _ALL,
    "hookkit.engine.interpreter.cache_guards": _ALL,
    "hookkit.engine.opaque.opaque_calls": _ALL,
    "hookkit.mends.buffers": _ALL,
    "hookkit.mends.wrong_answers": _ALL,
    "hookkit.mends.tensor_identity": _ALL,
    "hookkit.mends.fast_paths": _SPEED,
    "hookkit.mends.dynamo": _THUNDERFX,
}

_lock = threading.RLock()
_installed: list[Installed] = []
_warned: set[str] = set()


def is_enabled() -> bool:
    """Whether hookkit's rules take part in ``thunder.jit``, ``thunder.compile`` and ``thunderfx``."""
    return bool(_installed)


def enable() -> None:
    """Let the rules take part in every later ``thunder.jit``, ``thunder.compile`` and ``thunderfx``.

    ``import hookkit`` does this. Enabling twice is the same as once.

    Warns:
        PluginWarning: if a part of hookkit does not fit the installed torch or thunder, and is left out.

    Example:
        >>> import hookkit
        >>> hookkit.enable()
        >>> hookkit.is_enabled()
        True
    """
    with _lock:
        if _installed:
            return
        fitting = _those_that_fit(_patches())
        if any(left.patch.concerns_thunderfx for left in patch.left_out):
            fitting += _those_that_fit([_REFUSE_GRAPHS])
        if any(left.patch.needed for left in patch.left_out):
            fitting = [_refusing()]
        for fit in fitting:
            _installed.append(fit.install())
    _warn_once()


def disable() -> None:
    """Take the rules out of thunder, which is afterwards exactly as it was.

    Example:
        >>> import hookkit
        >>> hookkit.disable()
        >>> hookkit.is_enabled()
        False
        >>> hookkit.enable()
    """
    with _lock:
        while _installed:
            _installed.pop().remove()
        patch.left_out.clear()


class Plugin(thunder.Plugin):  # type: ignore[misc]
    """What ``thunder.compile(model, plugins="hookkit")`` asks for: the rules."""

    def setup_executors(self) -> None:
        """Enable the rules; thunder calls this before it compiles."""
        enable()


PATCHES = [
    Patch(
        "thunder.plugins:names_to_plugins[hookkit]",
        lambda _: Plugin,
        'thunder.compile(..., plugins="hookkit") does not know the name',
        adds=True,
    )
]


def _patches() -> list[Patch]:
    """All that hookkit replaces."""
    found = list(PATCHES)
    for name, lost in SOURCES.items():
        try:
            found += importlib.import_module(name).PATCHES
        except Exception as error:  # whatever it is, programs that do not use thunder must not suffer
            reason = f"{name} cannot be imported ({type(error).__name__}: {error})"
            patch.left_out.append(LeftOut(Patch(name, lambda _: None, **lost), reason))
    return found


def _those_that_fit(patches: list[Patch]) -> list[Patch]:
    fitting = []
    for candidate in patches:
        try:
            if candidate.is_wanted():
                fitting.append(candidate)
        except Misfit as misfit:
            patch.left_out.append(LeftOut(candidate, str(misfit)))
    return fitting


def _refusing() -> Patch:
    """What refuses every program, where one is compiled; or earlier, if that is not there."""
    ways = [Patch(f"thunder:{name}", patch.around(_refuse_program), "") for name in ("thunder_general_jit", "jit")]
    return next(way for way in ways if _is_there(way))


def _is_there(candidate: Patch) -> bool:
    try:
        return candidate.is_wanted()
    except Misfit:
        return False


def _refuse_program(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """What compiling comes to where nothing can be right."""
    needed = "\n  ".join(str(left) for left in patch.left_out if left.patch.needed)
    raise HookError(
        f"hookkit cannot work with {patch.versions()}:\n  {needed}\n"
        "Use versions that it is known to work with, or run thunder without hookkit: hookkit.disable()."
    )


def _refuse_graph(compiler: Any, stock: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    """What thunderfx comes to where Dynamo may make something else of a custom Function, or of a hook."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    names = {str(node.target) for part in parts for node in part.graph.nodes}
    if names.isdisjoint({"autograd_function_apply", "register_hook"}):
        return stock(compiler, graph, *args, **kwargs)
    concerned = "\n  ".join(str(left) for left in patch.left_out if left.patch.concerns_thunderfx)
    raise HookError(
        f"thunderfx is not known to be right for this program with {patch.versions()}:\n  {concerned}\n"
        "Use thunder.jit, or versions that hookkit is known to work with."
    )


_REFUSE_GRAPHS = Patch(
    "thunder.dynamo.compiler:ThunderCompiler.__call__",
    patch.around_method(_refuse_graph),
    "a graph of Dynamo's that may be wrong is not refused",
    takes=("self, gm, sample_args", "self, gm, sample_args, **compile_options"),
    needed=True,
)


def _warn_once() -> None:
    """Name what is left out, once in a process."""
    if not patch.left_out:
        return
    listed = "\n".join(f"  {left}" for left in patch.left_out)
    if listed not in _warned:
        _warned.add(listed)
        warnings.warn(
            f"hookkit leaves out what does not fit {patch.versions()}; python -m hookkit lists it:\n{listed}",
            PluginWarning,
            stacklevel=3,
        )
