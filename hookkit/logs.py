"""The loggers: what rules did with each call, what fell back to an opaque operator, and what is compiled again and why.

They are loggers of Python's ``logging``, below ``hookkit``. The environment variable ``HOOKKIT_LOGS`` switches them on
and has them print, as ``TORCH_LOGS`` does for PyTorch's.
"""

from __future__ import annotations

import logging
import os

from hookkit.errors import warn_user

__all__ = ["FALLBACKS", "RECOMPILES", "RULES", "switch_on"]

RULES = logging.getLogger("hookkit.rules")
FALLBACKS = logging.getLogger("hookkit.fallbacks")
RECOMPILES = logging.getLogger("hookkit.recompiles")

_KNOWN = {
    "rules": "each call that a rule takes, and what becomes of it; with +rules also which rules declined it, and why",
    "fallbacks": "each call that cannot be traced and becomes one opaque operator, and why",
    "recompiles": "each program that is compiled again, and what differs from before",
}


def switch_on(setting: str) -> None:
    """Have loggers print to standard error.

    Args:
        setting: names, separated by commas; with ``+`` in front of one it says more. ``all`` is all of them, and
            ``help`` prints what there is.

    Warns:
        UserWarning: if there is no logger of a name.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    for wanted in filter(None, (part.strip() for part in setting.split(","))):
        name = wanted.lstrip("+")
        if name == "help":
            print("HOOKKIT_LOGS:", *(f"{known:<12}{what}" for known, what in _KNOWN.items()), sep="\n  ")
        elif name not in (*_KNOWN, "all"):
            warn_user(f"HOOKKIT_LOGS={setting}: {name!r} is none of {', '.join(_KNOWN)}, all, help", UserWarning)
        for known in _KNOWN if name == "all" else {name} & set(_KNOWN):
            logger = logging.getLogger(f"hookkit.{known}")
            logger.setLevel(logging.DEBUG if wanted.startswith("+") else logging.INFO)
            logger.handlers, logger.propagate = [handler], False


switch_on(os.environ.get("HOOKKIT_LOGS", ""))
