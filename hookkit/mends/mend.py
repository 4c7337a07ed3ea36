"""Mend: one fault of thunder's, or of Dynamo's in front of it, with a program that shows it, and what mends it."""

from __future__ import annotations

from typing import Any

import attrs

from hookkit.engine.dispatch.extensions import Extension
from hookkit.patch import Patch
from hookkit.rule import Rule

__all__ = ["Mend"]


@attrs.frozen(eq=False)
class Mend:
    """One fault, and what mends it.

    Attributes:
        name: a name for it.
        fault: what thunder does wrong, in a sentence.
        program: what shows it, by what it prints or the error that it raises; ``torch`` and ``thunder`` are imported.
            Empty where nothing is wrong but the time it takes.
        stock: what it prints with thunder alone, or how the error begins; empty where that depends on torch.
        eager: what it prints where ``thunder.jit`` and ``thunderfx`` return the function that they are given.
        refused: how the error begins by which hookkit refuses the program, where it can do no better.
        seen_in: the versions of thunder that have been seen to need it.
        patches: what it replaces.
        extension: what it adds to what the interpreter does.
        rules: the rules that it consists of.
    """

    name: str
    fault: str
    program: str
    stock: str
    eager: str
    refused: str = ""
    seen_in: tuple[str, ...] = ("0.2.6",)
    patches: tuple[Patch, ...] = ()
    extension: Extension | None = None
    rules: tuple[Rule[..., Any], ...] = ()
