"""Runs thunder's own tests, those in the installed package, with hookkit enabled: ``python scripts/peer_tests.py``.

A test that fails has to be listed below with the reason, or fail without hookkit as well, which is tried. A listed test
that passes is an error. ``--short`` runs only the tests of custom Functions, of the higher-order operator, of custom
operators, of checkpointing and of in-place operations, as the tests of hookkit do; otherwise their whole files run,
which takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

import hookkit

# The names of stock's symbols in a trace. hookkit's are named after the Function, or the operator.
NAMES = "asserts the name of a symbol of stock thunder's"
WORDS = "asserts the words of a refusal of stock thunder's; hookkit refuses in its own"

LISTED = {
    "test_dynamo.py::test_splitter_autograd_function_DynamoThunder_cpu_None[auto]": NAMES,
    "test_dynamo.py::test_splitter_autograd_function_DynamoThunder_cpu_None[dynamic]": NAMES,
    "test_dynamo.py::test_splitter_autograd_function_DynamoThunder_cpu_None[static]": NAMES,
    "test_jit_general.py::test_cache_symbolic_values_constraints": WORDS,
    "test_jit_general.py::test_jitting_through_opaque_torch_symbols_error": WORDS,
}
if not hasattr(torch.Tensor, "align_as"):  # torch 2.13 changed the operator's form with the same release
    LISTED["test_jit_general.py::test_autograd_function_apply"] = (
        "calls the higher-order operator eagerly in a form that this torch no longer has"
    )

SHORT = [
    "test_extend.py",
    "test_grad.py::test_adhoc_executor_grad_torch_cpu_None",
    "test_grad.py::test_inconsistent_output_length_grad_transform",
    "test_grad.py::test_torch_checkpoint",
    "test_inplace_copy.py",
    "test_interpreter.py::test_autograd_function",
    "test_jit_general.py::test_autograd_function_apply",
    "test_jit_general.py::test_autograd_function_apply_with_no_grad",
    "test_jit_general.py::test_autograd_function_empty_forward",
    "test_jit_general.py::test_cache_symbolic_values_reshape_numel",
    "test_jit_general.py::test_custom_autograd_function",
    "test_torch_library_custom_op.py",
    "test_torch_library_custom_op_with_lists.py",
    "test_update_aliases.py",
]
LONG = sorted(
    {name.partition("::")[0] for name in SHORT}
    | {"test_autocast.py", "test_check_trace.py", "test_dynamo.py", "test_examine.py", "test_patterns.py"}
    | {"test_randomness.py", "test_torch_compile_executor.py", "test_transforms.py"}
)
# Of these files the other tests do not concern hookkit: hundreds of the interpreter alone, and of single operations.
PARTS = ("test_grad.py", "test_interpreter.py")


class Outcomes:
    """A plugin for pytest: what became of each test, and what thunder's own conftest.py gives to the tests."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    @pytest.fixture
    def turn_off_tf32_and_set_seed(self) -> Any:
        """The fixture of this name in thunder/tests/conftest.py."""
        torch.manual_seed(42)
        yield
        torch.seed()


def stand_in(name: str, **attributes: Any) -> None:
    """Let thunder's tests import a module that is not installed, and that the selected ones do not use."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def run(selected: list[str]) -> Outcomes:
    """Run tests, given as pytest names them below thunder/tests."""
    spec = importlib.util.find_spec("thunder")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "tests"
    if importlib.util.find_spec("fdm") is None:
        stand_in("fdm")
    if importlib.util.find_spec("expecttest") is None:  # by torch.testing._internal.common_utils
        stand_in("expecttest", TestCase=unittest.TestCase)
    if importlib.util.find_spec("pytest_benchmark") is None:
        stand_in("pytest_benchmark", fixture=None)
        stand_in("pytest_benchmark.fixture", BenchmarkFixture=object)
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as settings:
        empty = Path(settings) / "pytest.ini"
        empty.write_text("[pytest]\n")
        options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", str(empty), "--rootdir", str(folder)]
        options += ["-k", "not torchcompile"]  # those need a C++ compiler
        options += ["--continue-on-collection-errors", "-W", "ignore", "--timeout", "300"]
        status = pytest.main([*options, *(str(folder / name) for name in selected)], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {status!r}")
    return outcomes


def fail_without_hookkit(names: list[str]) -> list[str]:
    """Which of these tests fail with an unchanged thunder as well."""
    if not names:
        return []
    with tempfile.NamedTemporaryFile("r") as written:
        command = [sys.executable, __file__, "--without-hookkit", written.name, *names]
        subprocess.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False)
        return written.read().splitlines()


def main() -> int:
    """Run the tests; 1 if one that is not listed fails because of hookkit, or one that is listed passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only the tests that hookkit's own tests run")
    parser.add_argument("--without-hookkit", metavar="FILE", help="disable hookkit; write which tests fail to a file")
    parser.add_argument("tests", nargs="*", help="tests to run instead, as in test_grad.py::test_torch_checkpoint")
    options = parser.parse_args()
    whole = [name for name in LONG if name not in PARTS]
    selected = options.tests or (SHORT if options.short else [*whole, *(s for s in SHORT if s.startswith(PARTS))])
    if options.without_hookkit:
        hookkit.disable()
        Path(options.without_hookkit).write_text("\n".join(run(selected).failed))
        return 0
    outcomes = run(selected)
    unlisted = [name for name in outcomes.failed if name not in LISTED]
    also_without = fail_without_hookkit(unlisted)
    wrong = [f"fails with hookkit only: {name}" for name in unlisted if name not in also_without]
    wrong += [f"is listed, and passes: {name}" for name in outcomes.passed if name in LISTED]
    listed = [name for name in outcomes.failed if name in LISTED]
    print(len(outcomes.passed), "passed,", len(listed), "fail and are listed,", len(also_without), "fail without, too")
    for line in [*(f"{LISTED[name]}: {name}" for name in listed), *wrong]:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
