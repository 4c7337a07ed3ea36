"""python -m hookkit: the summary, the rules, and explain."""

import json
import sys

import pytest
import torch

import hookkit
from hookkit import patch
from hookkit.__main__ import main

PROGRAM = """
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100

def program(x, y=None):
    return Twice.apply(x)

def broken(x):
    raise ValueError("out of order")

example_inputs = (torch.ones(3, requires_grad=True),)

def two_inputs():
    return torch.ones(3), torch.ones(3)

one_input = torch.ones(3)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "hookkit_cli_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    yield "hookkit_cli_program"
    sys.modules.pop("hookkit_cli_program", None)


@pytest.fixture
def lazy_rule():
    """A rule for what is never imported."""
    return hookkit.rule("no.such.module:operation", mode="opaque", priority=4)


def test_a_summary_has_versions_compat_measures_entry_points_and_what_waits(capsys, lazy_rule):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in printed
    assert "Python    3." in printed
    assert "thunder   0." in printed
    assert f"hookkit   {hookkit.__version__}, enabled" in printed
    assert "compat measures:\n  " in printed
    assert "entry points 'hookkit.rules':" in printed
    assert "\n  operation; no.such.module is not imported\n" in printed
    assert f"\n  {len(hookkit.rules())} rules are in force: " in printed
    assert "autograd_function:" not in printed


def test_a_summary_is_as_wide_as_the_terminal(capsys, monkeypatch):
    gone = patch.Patch("thunder:gone", lambda stock: stock, "many words " * 30)
    monkeypatch.setattr(patch, "left_out", [patch.LeftOut(gone, "thunder:gone is not there")])
    monkeypatch.setenv("COLUMNS", "72")
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("many") == 30
    assert max(map(len, printed.partition("left out")[2].splitlines())) <= 72


def test_rules_are_listed(capsys, lazy_rule):
    assert main(["--rules"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(hookkit.rules())
    assert "autograd_function: torch.autograd.function.Function (mode auto, priority -100, declared at " in printed
    assert "operation: no.such.module:operation (mode opaque, priority 4, declared at " in printed
    assert "); no.such.module is not imported" in printed


@pytest.mark.parametrize("pattern", ["autograd_function", "autograd_func*ion", "torch.autograd.function.Function"])
def test_rules_are_listed_by_name_pattern_or_target(capsys, pattern):
    assert main(["--rules", pattern]) == 0
    names = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert "autograd_function" in names
    assert "autograd_function_apply" not in names


def test_a_pattern_that_no_rule_is_like_is_said_to_be_one(capsys):
    assert main(["--rules", "nothing*"]) == 0
    assert capsys.readouterr().out == "no rule's name or target is like 'nothing*'\n"


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{hookkit.__version__}\n"


def test_a_program_is_explained_with_the_example_inputs_of_its_module(capsys, module):
    assert main(["explain", f"{module}:program"]) == 0
    assert "Twice() at " in capsys.readouterr().out


@pytest.mark.parametrize("inputs", ["two_inputs", "one_input"])
def test_example_inputs_can_be_named(capsys, module, inputs):
    assert main(["explain", f"{module}:program", "--inputs", f"{module}:{inputs}"]) == 0
    assert "taken by autograd_function" in capsys.readouterr().out


def test_an_explanation_can_be_json(capsys, module):
    assert main(["explain", f"{module}:program", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"][0]["name"] == "Twice"


def test_a_program_that_cannot_be_traced_gives_status_one(capsys, module):
    assert main(["explain", f"{module}:broken"]) == 1
    assert "tracing stopped here: ValueError: out of order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no colon"], "is not of the form module:name"),
        (["no_such_module_at_all:f"], "'no_such_module_at_all:f' is not there: No module named"),
        (["hookkit_cli_program:nothing"], "has no attribute 'nothing'"),
        (["math:sqrt"], "called example_inputs in the program's module, or named with --inputs"),
    ],
)
def test_what_is_not_there_gives_status_two_and_says_what_to_do(capsys, module, arguments, message):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_the_installed_versions_is_listed(monkeypatch, capsys):
    gone = patch.Patch("thunder:gone", lambda stock: stock, "nothing is lost")
    monkeypatch.setattr(patch, "left_out", [patch.LeftOut(gone, "thunder:gone is not there")])
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "left out, as it does not fit:\n  thunder:gone is not there; without the patch nothing is lost\n" in printed
