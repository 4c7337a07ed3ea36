"""Functions that ``hookkit.opaque`` has made operators."""

from __future__ import annotations

import hookkit
from hookkit.opaque_function import run_opaque

__all__ = ["opaque_function"]

opaque_function = hookkit.rule(run_opaque, mode="opaque", priority=-100)
