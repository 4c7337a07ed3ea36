"""Runs the Python blocks of the pages in docs/, and the examples of docstrings.

The blocks of one page share a namespace. What a block prints has to be what the next ``text`` block of the page shows;
``...`` in it stands for anything, and runs of blanks count as one.
"""

import contextlib
import doctest
import io
from typing import Any

from sybil import Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

import hookkit

pytest_plugins = ["pytester"]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PRINTED = "__printed__"
RULES = "__rules__"


def run(example: Example) -> None:
    """Runs a block and keeps what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    example.namespace[PRINTED] = printed.getvalue()


def compare(example: Example) -> str | None:
    """Compares a ``text`` block with what the block before it printed, if it printed anything."""
    printed = example.namespace.pop(PRINTED, "")
    if not printed or doctest.OutputChecker().check_output(example.parsed, printed, OPTIONS):
        return None
    return f"the page shows\n\n{example.parsed}\nand the block before it printed\n\n{printed}"


def enable(namespace: dict[str, Any]) -> None:
    """Begins a page: with hookkit enabled, and with note of the rules that are registered."""
    hookkit.enable()
    namespace[RULES] = hookkit.rules()


def unregister(namespace: dict[str, Any]) -> None:
    """Ends a page: the rules that it declared are unregistered."""
    for rule in hookkit.rules():
        if rule not in namespace[RULES]:
            rule.unregister()


class PythonBlocks(PythonCodeBlockParser):
    """Python blocks, those with ``>>>`` as doctests."""

    def __init__(self) -> None:
        super().__init__(doctest_optionflags=OPTIONS)
        self.codeblock_parser = CodeBlockParser("python", run)


pages = Sybil(
    parsers=[PythonBlocks(), CodeBlockParser("text", compare), SkipParser()],
    patterns=["docs/*.md", "docs/*/*.md"],
    excludes=["docs/_build/*.md"],
    setup=enable,
    teardown=unregister,
)
docstrings = Sybil(
    parsers=[DocTestParser(OPTIONS)],
    patterns=["hookkit/*.py", "hookkit/*/*.py"],
    document_types={".py": PythonDocStringDocument},
    setup=enable,
    teardown=unregister,
)
pytest_collect_file = (pages + docstrings).pytest()
