"""The import hook that brings hookkit and thunder together, in whichever order the program imports them.

While thunder is imported the hook gives torch what thunder needs and newer torch lacks (``hookkit.compat``); as soon
as thunder is imported it enables the rules (``hookkit.install``). ``import hookkit`` puts it in place, and so does
``import torch``, through the entry point ``torch.backends``. Every torch program runs this module: at module level it
imports the standard library only.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["disable", "enable", "install", "is_enabled"]


def install() -> None:
    """Put the import hook in place: what torch calls at the end of ``import torch``.

    Does nothing if the environment variable ``HOOKKIT_AUTOLOAD`` is 0. Never raises: a fault becomes a warning.

    Example:
        >>> from hookkit import autoload
        >>> autoload.install()
    """
    try:
        if os.environ.get("HOOKKIT_AUTOLOAD") != "0":
            _put_hook()
        elif _hook not in sys.meta_path:
            # To get here torch has imported the package. An `import hookkit` in the program, which does enable the
            # rules, must not find it imported already.
            del sys.modules["hookkit"], sys.modules["hookkit.autoload"]
    except Exception as error:
        warnings.warn(f"hookkit's import hook for thunder is not in place: {error!r}", RuntimeWarning, stacklevel=2)


def package_imported() -> None:
    """Put the import hook in place: what ``hookkit/__init__.py`` calls."""
    # While torch is being imported, it is torch that imports the package, to call `install`.
    if not _is_importing("torch"):
        _hook.explicit = True
        _put_hook()


def enable(*, mends: bool | None = None) -> None:
    """Use hookkit's rules in every later compilation: from now on, or from when the program imports thunder.

    ``import hookkit`` does this by itself; the function undoes `disable`.

    Args:
        mends: whether faults of thunder's that have nothing to do with rules are mended, too. By default they are,
            unless the environment variable ``HOOKKIT_MENDS`` is 0; where hookkit is enabled, that stays as it is.

    Warns:
        PluginWarning: where a part of hookkit does not fit the installed torch or thunder, and is left out.

    Example:
        >>> import hookkit
        >>> hookkit.enable()
        >>> hookkit.is_enabled()
        True
    """
    _hook.wanted, _hook.mends = True, mends
    _enable_when_imported()


def disable() -> None:
    """Leave thunder as it is without hookkit, or put it back to that; programs compiled before are not changed.

    Before thunder is imported this means that its import does not enable the rules. thunder can be imported all the
    same on a torch that it does not support by itself.

    Example:
        >>> import hookkit
        >>> hookkit.disable()
        >>> hookkit.is_enabled()
        False
        >>> hookkit.enable()
    """
    _hook.wanted = False
    if "hookkit.install" in sys.modules:
        _installer().disable()


def is_enabled() -> bool:
    """Tell whether hookkit's rules are in force, or will be when the program imports thunder.

    Returns:
        Whether they are.

    Example:
        >>> import hookkit
        >>> hookkit.is_enabled()
        True
    """
    if "hookkit.install" in sys.modules:
        return bool(_installer().is_enabled())
    return _hook.wanted


def _installer() -> Any:
    from hookkit import install  # imports thunder

    return install


def _put_hook() -> None:
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
        _enable_when_imported()


class _Hook:
    """A finder that leaves the finding to those after it and changes what they find for thunder's modules."""

    def __init__(self) -> None:
        self.wanted = True
        self.mends: bool | None = None  # whether faults of thunder's are mended, if the program has said so
        self.explicit = False  # the program itself imports hookkit, and must not run without it unawares

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "thunder" and name not in _NEED_STAND_INS:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if spec := finder.find_spec(name, path, target):
                if name == "thunder":
                    _enable_after(spec)
                else:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


_hook = _Hook()

# See hookkit.compat.importing_thunder.
_NEED_STAND_INS = ("thunder.torch.default_torch_ops", "thunder.core.jit_ext")


class _Loader:
    """The loader of a thunder module that needs stand-ins; once it has done its work the module has its own again."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        from hookkit import compat  # imports torch

        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        with compat.importing_thunder(module):
            self._loader.exec_module(module)


def _enable_when_imported() -> None:
    """Enable the rules, if thunder is imported, as soon as no module of thunder or hookkit is half imported.

    thunder is half imported where its own import brings in torch or hookkit, and a module of hookkit where its import
    brings in thunder: ``hookkit.install``, which enables the rules, could then not be imported.
    """
    if not _hook.wanted or "thunder" not in sys.modules:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] in ("thunder", "hookkit") and _is_importing(name):
            _enable_after(sys.modules[name].__spec__)
            return
    _installer().enable(mends=_hook.mends)


def _is_importing(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _enable_after(spec: Any) -> None:
    spec.__class__ = _WatchedSpec


def _enable_after_import() -> None:
    try:
        _enable_when_imported()
    except Exception as error:
        _hook.wanted = False
        if _hook.explicit:
            raise
        warnings.warn(
            f"hookkit's rules are not in force, thunder runs without them: {error!r}. "
            "hookkit.enable() raises this error with its traceback.",
            RuntimeWarning,
            stacklevel=2,
        )


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose end of import is awaited.

    importlib (_bootstrap._load_unlocked, Python 3.10 to 3.13) sets ``_initializing`` to True before it executes a
    module and to False afterwards, whether or not that succeeded. Nothing public tells the end of an import that has
    begun already.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _enable_after_import()
