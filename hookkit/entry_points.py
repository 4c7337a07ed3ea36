"""The entry points of installed packages that bring rules."""

from __future__ import annotations

import importlib.metadata
import os
import re

__all__ = ["ENTRY_POINT_GROUP", "entry_points"]

ENTRY_POINT_GROUP = "hookkit.rules"


def entry_points() -> list[tuple[importlib.metadata.EntryPoint, bool]]:
    """The entry points ``hookkit.rules`` of installed packages, and whether ``HOOKKIT_DISABLE_PLUGINS`` names each.

    The variable holds names, separated by commas, of entry points or of distributions.
    """
    named = {_normalised(n) for n in os.environ.get("HOOKKIT_DISABLE_PLUGINS", "").split(",") if n.strip()}
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return [
        (point, bool({_normalised(point.name), _normalised(point.dist.name if point.dist else "")} & named))
        for point in found
    ]


def _normalised(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
