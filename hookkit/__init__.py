"""Rules for lightning-thunder: say which call is matched and which forward and backward stand for it.

``import hookkit`` enables the shipped rules for every later ``thunder.jit``, ``thunder.compile`` and
``thunder.dynamo.thunderfx``. The public names are here and nothing else is; each is imported when it is first used, so
that the import itself brings in neither torch nor thunder.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookkit import autoload

if TYPE_CHECKING:
    from hookkit import testing
    from hookkit.answers import Decline, decline
    from hookkit.autoload import disable, enable, is_enabled
    from hookkit.call import Call, Source
    from hookkit.custom_gradient import CustomFunction, custom_gradient
    from hookkit.declare import Declaration, rule
    from hookkit.engine.dispatch.inspection import CompiledCall
    from hookkit.errors import (
        ConflictError,
        DataDependencyError,
        GradientError,
        HookError,
        MetaError,
        MetaWarning,
        OpaqueFallbackWarning,
        PluginWarning,
        RegistrationError,
        RegistrationWarning,
        TargetWarning,
        TransformWarning,
        UntraceableError,
    )
    from hookkit.forms import forms
    from hookkit.modes import mode
    from hookkit.opaque_function import opaque
    from hookkit.operators import Operator
    from hookkit.regions import region
    from hookkit.registry import rules
    from hookkit.reporting import ExplainedCall, Explanation, Report, explain, report
    from hookkit.residuals import Residuals, mark, recompute, save
    from hookkit.rule import Rule
    from hookkit.scopes import use
    from hookkit.targets import where

__version__ = "0.1.0"

__all__ = [
    "Call",
    "CompiledCall",
    "ConflictError",
    "CustomFunction",
    "DataDependencyError",
    "Declaration",
    "Decline",
    "ExplainedCall",
    "Explanation",
    "GradientError",
    "HookError",
    "MetaError",
    "MetaWarning",
    "OpaqueFallbackWarning",
    "Operator",
    "PluginWarning",
    "RegistrationError",
    "RegistrationWarning",
    "Report",
    "Residuals",
    "Rule",
    "Source",
    "TargetWarning",
    "TransformWarning",
    "UntraceableError",
    "custom_gradient",
    "decline",
    "disable",
    "enable",
    "explain",
    "forms",
    "is_enabled",
    "mark",
    "mode",
    "opaque",
    "recompute",
    "region",
    "report",
    "rule",
    "rules",
    "save",
    "testing",
    "use",
    "where",
]

# Where each public name comes from.
_MODULES = {
    "answers": ("Decline", "decline"),
    "autoload": ("disable", "enable", "is_enabled"),
    "call": ("Call", "Source"),
    "custom_gradient": ("CustomFunction", "custom_gradient"),
    "declare": ("Declaration", "rule"),
    "engine.dispatch.inspection": ("CompiledCall",),
    "errors": (
        "ConflictError",
        "DataDependencyError",
        "GradientError",
        "HookError",
        "MetaError",
        "MetaWarning",
        "OpaqueFallbackWarning",
        "PluginWarning",
        "RegistrationError",
        "RegistrationWarning",
        "TargetWarning",
        "TransformWarning",
        "UntraceableError",
    ),
    "forms": ("forms",),
    "modes": ("mode",),
    "registry": ("rules",),
    "opaque_function": ("opaque",),
    "operators": ("Operator",),
    "regions": ("region",),
    "reporting": ("ExplainedCall", "Explanation", "Report", "explain", "report"),
    "residuals": ("Residuals", "mark", "recompute", "save"),
    "rule": ("Rule",),
    "scopes": ("use",),
    "targets": ("where",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


class _Package(ModuleType):
    """A module that imports its public names when they are first used.

    ``rule`` and ``rules`` are public functions and also the names of a submodule and a subpackage, which the import
    system would put in the functions' place. ``from hookkit.rule import ...`` and ``from hookkit.rules import ...``
    still reach those.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif name in __all__:
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle knows modules by their exact class only.
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
autoload.package_imported()
