"""hookkit.doctor: the programs of ``python -m hookkit check`` agree with eager PyTorch, and tell when one does not."""

import json

import pytest
import torch

import hookkit
from hookkit import doctor
from hookkit.__main__ import main
from hookkit.doctor import PROGRAMS, Program


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_a_program_agrees_with_eager_pytorch(program):
    for row in doctor.check([program]):
        assert row.outcome == "ok", row
        assert (row.program, row.device) == (program.name, "cpu")


def square(x):
    return x * x


@hookkit.rule(square, register=False)
def wrong(x):
    return x * x, hookkit.save(x=x)


@wrong.backward
def _(saved, grad):
    return {"x": 3 * grad * saved.x}


def fails(x, y):
    raise ValueError("no such thing")


def program_with_a_rule(x, y):
    return square(x) * y


@pytest.fixture
def sabotaged(monkeypatch):
    programs = (
        Program("right", doctor.one_function, compilers=("jit",)),
        Program("a wrong gradient", program_with_a_rule, rule=wrong, compilers=("jit",)),
        Program("an error", fails, eager=doctor.one_function, compilers=("jit",)),
    )
    monkeypatch.setattr(doctor, "PROGRAMS", programs)


def test_what_differs_or_raises_is_a_row_and_the_exit_status_is_one(sabotaged, capsys):
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in printed
    assert "a wrong gradient, jit, cpu: call 1: " in printed
    assert "an error, jit, cpu: ValueError: no such thing" in printed
    assert printed.splitlines()[-1] == "1 of 3 programs agree with eager PyTorch"


def test_as_json(sabotaged, capsys):
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert [row["outcome"] for row in found["programs"]] == ["ok", "differs", "raises"]
