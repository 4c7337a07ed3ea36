"""hookkit.mends: each has a program that shows thunder's fault; the framework works without all of them."""

import contextlib
import io
import linecache
import os
import subprocess
import sys
import types

import pytest
import thunder
import thunder.dynamo
import torch

import hookkit
from hookkit import compat, install
from hookkit.engine.dispatch import extensions

MENDS = install.mends()
SHOWN = [pytest.param(mend, id=mend.name) for mend in MENDS if mend.program]
NAME = "program_of_a_mend"
EAGER = types.SimpleNamespace(jit=lambda f: f, dynamo=types.SimpleNamespace(thunderfx=lambda f: f))


def outcome(mend, of_thunder):
    """What the program of a mend prints, or the error that it raises."""
    module = types.ModuleType(NAME)
    vars(module).update(torch=torch, thunder=of_thunder)
    torch._dynamo.reset()
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch:
        # thunder looks up classes in their modules, and lines of code in linecache
        monkeypatch.setitem(sys.modules, NAME, module)
        monkeypatch.setitem(linecache.cache, NAME, (1, None, mend.program.splitlines(keepends=True), NAME))
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(mend.program, NAME, "exec"), vars(module))
        except Exception as error:
            found = innermost(error)
            return f"{type(found).__name__}: {found}"
    return printed.getvalue().strip()


def innermost(error):
    """The error of the program, in those that thunder's interpreter and Dynamo make of it."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    return error


# Of these eager PyTorch itself is what thunder is, up to torch 2.9.
MENDED_BY_PYTORCH = {"atan2", "take_along_dim with negative indices"}
MENDED_BY_THUNDER = {"Python's max and min"}  # after what `seen_in` names


def is_shown(mend, eager):
    """Whether thunder alone has the fault here: with this PyTorch, whose Dynamo stands before it, and this thunder."""
    if mend.name in MENDED_BY_PYTORCH and not eager.startswith(mend.eager):
        return False
    if not mend.stock and not compat.dynamo_traces_in_steps():  # it leaves the program to eager PyTorch
        return False
    if mend.name in MENDED_BY_THUNDER and thunder.__version__ not in mend.seen_in:
        return False
    return not mend.patches or any(patch.is_wanted() for patch in mend.patches)


@pytest.mark.filterwarnings("ignore")  # of thunder's, among them that it falls back
@pytest.mark.parametrize("mend", SHOWN)
def test_thunder_alone_has_the_fault_and_with_hookkit_it_is_mended(mend):
    eager = outcome(mend, EAGER)
    assert eager.startswith(mend.eager) or mend.name in MENDED_BY_PYTORCH
    hookkit.disable()
    alone = outcome(mend, thunder)
    if is_shown(mend, eager):
        assert alone.startswith(mend.stock)
        assert not alone.startswith(mend.eager)
    hookkit.enable()
    assert outcome(mend, thunder).startswith(mend.refused or eager)


def test_each_mend_has_a_name_of_its_own_and_does_something():
    assert len({mend.name for mend in MENDS}) == len(MENDS)
    assert all(mend.patches or mend.extension or mend.rules for mend in MENDS)


def test_extensions_are_there_while_hookkit_is_enabled_and_are_taken_out():
    installed = [mend.extension for mend in install._mends() if mend.extension is not None]
    assert extensions._in_force == installed
    assert extensions._answers.keys() == {callee for extension in installed for callee in extension.answers}
    hookkit.disable()
    assert extensions._in_force == [] and extensions._answers == {}
    hookkit.enable(mends=False)
    assert extensions._in_force == []
    hookkit.enable()
    assert extensions._in_force == []
    hookkit.enable(mends=True)
    assert extensions._in_force == installed


def test_without_mends_their_patches_and_rules_are_not_in_force():
    of_mends = {rule.name for rule in hookkit.rules() if rule.is_mend}
    targets = {str(patch) for mend in install._mends() for patch in mend.patches}
    assert {"relu", "sigmoid"} <= of_mends
    try:
        hookkit.enable(mends=False)
        assert of_mends.isdisjoint(rule.name for rule in hookkit.rules())
        assert {str(installed.patch) for installed in install._installed}.isdisjoint(targets)
    finally:
        hookkit.enable(mends=True)
    assert of_mends <= {rule.name for rule in hookkit.rules()}


def test_a_program_is_compiled_again_when_mends_come_or_go():
    nan = torch.tensor([float("nan")], requires_grad=True)
    compiled = thunder.jit(lambda x: torch.relu(x))
    try:
        found = [compiled(nan).isnan().item()]
        hookkit.enable(mends=False)
        found.append(compiled(nan).isnan().item())
    finally:
        hookkit.enable(mends=True)
    assert [*found, compiled(nan).isnan().item()] == [True, False, True]


# Tests of the framework that no fault of thunder's keeps from passing.
FRAMEWORK = [
    "tests/test_rule.py",
    "tests/test_replay.py",
    "tests/test_residuals.py",
]
# But for these: a program that writes a global, which thunder loses.
NEEDS_A_MEND = ["tests/test_replay.py::test_a_global_that_the_program_changes_between_two_calls_is_read_again"]

WITHOUT = {**os.environ, "HOOKKIT_MENDS": "0"}


@pytest.mark.long
def test_the_framework_works_without_mends(request):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FRAMEWORK]
    command += [f"--deselect={test}" for test in NEEDS_A_MEND]
    done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True, env=WITHOUT)
    assert done.returncode == 0, done.stdout
