"""Puts hookkit in place, and takes it out again: installs the patches that each module declares.

Each patch is installed by itself. One that does not fit the installed torch or thunder is left out and named in a
warning; where one is left out without which nothing can be right, `thunder.jit` refuses in words.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import thunder
import torch

from hookkit import patch
from hookkit.engine.dispatch import extensions
from hookkit.engine.dispatch.extensions import Extension
from hookkit.errors import HookError, PluginWarning, warn_user
from hookkit.patch import Installed, LeftOut, Misfit, Patch
from hookkit.registry import registry

if TYPE_CHECKING:
    from hookkit.mends.mend import Mend

__all__ = ["disable", "enable", "is_enabled"]

# The modules that declare patches, in `PATCHES`, and what is lost where one cannot be imported.
_ALL: dict[str, Any] = {"lost": "no program is right", "needed": True}
_SPEED: dict[str, Any] = {"lost": "programs take longer to compile"}
_THUNDERFX: dict[str, Any] = {"lost": "Dynamo makes something else of a Function", "concerns_thunderfx": True}
FRAMEWORK: dict[str, dict[str, Any]] = {
    "hookkit.engine.dispatch.lookaside": _ALL,
    "hookkit.engine.opaque.overwritten": _ALL,
    "hookkit.engine.trace.recomputation": _ALL,
    "hookkit.engine.dispatch.takeover": _ALL,
    "hookkit.engine.trace.functionalize": _ALL,
    "hookkit.engine.joint.autograd_link": _ALL,
    "hookkit.engine.joint.transforms": _ALL,
    "hookkit.engine.joint.inductor_parts": _THUNDERFX,
    "hookkit.engine.interpreter.cache_guards": _ALL,
    "hookkit.engine.opaque.opaque_calls": _ALL,
    "hookkit.engine.dispatch.splits": {"lost": "thunderfx splits graphs at calls of rules", "concerns_thunderfx": True},
}
# The modules that declare mends, in `MENDS`.
MENDS: dict[str, dict[str, Any]] = {
    "hookkit.mends.threads": _ALL,
    "hookkit.mends.attributes": _ALL,
    "hookkit.mends.written_globals": _ALL,
    "hookkit.mends.buffers": _ALL,
    "hookkit.mends.wrong_answers": _ALL,
    "hookkit.mends.data_dependence": _ALL,
    "hookkit.mends.tensor_identity": _ALL,
    "hookkit.mends.iterators": _ALL,
    "hookkit.mends.containers": _ALL,
    "hookkit.mends.generators": _ALL,
    "hookkit.mends.partials": _ALL,
    "hookkit.mends.interpreter_shortcuts": _SPEED,
    "hookkit.mends.dynamo": _THUNDERFX,
    "hookkit.mends.grad_mode": _THUNDERFX,
}

_lock = threading.RLock()
_installed: list[Installed] = []
_extensions: list[Extension] = []
_warned: set[str] = set()


def is_enabled() -> bool:
    """Whether hookkit's rules take part in ``thunder.jit``, ``thunder.compile`` and ``thunderfx``."""
    return bool(_installed)


def enable(mends: bool | None = None) -> None:
    """Let the rules take part in every later ``thunder.jit``, ``thunder.compile`` and ``thunderfx``.

    ``import hookkit`` does this. Enabling twice is the same as once.

    Args:
        mends: whether thunder's faults that have nothing to do with rules are mended, too; by default they are, unless
            the environment variable ``HOOKKIT_MENDS`` is 0, and where hookkit is enabled that stays as it is.

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
            if mends is None or mends == registry.mends:
                return
            disable()
        registry.mend(os.environ.get("HOOKKIT_MENDS") != "0" if mends is None else mends)
        fitting = _those_that_fit(_patches())
        if any(left.patch.concerns_thunderfx for left in patch.left_out):
            fitting += _those_that_fit([_REFUSE_GRAPHS])
        if any(left.patch.needed for left in patch.left_out):
            fitting = [_refusing()]
        for fit in fitting:
            _installed.append(fit.install())
        for mend in _mends() if registry.mends else ():
            if mend.extension is not None:
                extensions.add(mend.extension)
                _extensions.append(mend.extension)
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
        while _extensions:
            extensions.remove(_extensions.pop())
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
    """All that hookkit replaces; what cannot be imported is left out."""
    found = list(PATCHES)
    for name, lost in FRAMEWORK.items():
        found += _declared(name, "PATCHES", lost)
    if registry.mends:
        found += [patch for mend in _mends() for patch in mend.patches]
    return found


def _mends() -> list[Mend]:
    """The mends that have something to install."""
    return [mend for name, lost in MENDS.items() for mend in _declared(name, "MENDS", lost)]


def mends() -> list[Mend]:
    """Each mend that hookkit knows, those that are rules last."""
    return [*_mends(), *importlib.import_module("hookkit.mends.rules").MENDS]


def _declared(name: str, kind: str, lost: dict[str, Any]) -> list[Any]:
    """What a module declares; nothing, where it cannot be imported."""
    try:
        return list(getattr(importlib.import_module(name), kind))
    except Exception as error:  # whatever it is, programs that do not use thunder must not suffer
        reason = f"{name} cannot be imported ({type(error).__name__}: {error})"
        if all(left.reason != reason for left in patch.left_out):
            patch.left_out.append(LeftOut(Patch(name, lambda _: None, **lost), reason))
        return []


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
        warn_user(
            f"hookkit leaves out what does not fit {patch.versions()}; python -m hookkit lists it:\n{listed}",
            PluginWarning,
        )
