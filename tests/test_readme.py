"""README.md: each of its blocks is a program of its own and prints what it shows, and its tables say what is so."""

import contextlib
import doctest
import io
import json
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import thunder
import torch

import hookkit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", README, re.DOTALL | re.MULTILINE)
# Older Pythons say that a local variable is not bound in other words.
# Thunder without hookkit knows no method `apply` that is not a Python one, as from torch 2.14.
THUNDER_RUNS_FUNCTIONS = hasattr(torch.autograd.Function.apply, "__func__")
IS_WHERE_THE_README_WAS_WRITTEN = torch.__version__.startswith("2.13.") and sys.version_info >= (3, 11)


def run(block, monkeypatch):
    """Runs a block in a namespace of its own, as the file ``program.py``; returns the namespace and what it prints."""
    source = (len(block), None, block.splitlines(keepends=True), "program.py")
    monkeypatch.setitem(linecache.cache, "program.py", source)
    namespace = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "program.py", "exec", dont_inherit=True), namespace)
    return namespace, printed.getvalue()


@pytest.mark.parametrize(("block", "shown"), BLOCKS)
def test_a_block_runs_by_itself_and_prints_what_is_shown(block, shown, monkeypatch):
    _, printed = run(block, monkeypatch)
    assert doctest.OutputChecker().check_output(shown, printed, doctest.NORMALIZE_WHITESPACE), printed


def test_the_picture_is_that_of_the_report(monkeypatch):
    (block,) = (block for block, _ in BLOCKS if "hookkit.report(current)" in block)
    namespace, _ = run(block, monkeypatch)
    picture = hookkit.report(namespace["current"]).to_svg() + "\n"
    file = ROOT / "docs/_static/report.svg"
    if os.environ.get("HOOKKIT_WRITE_PICTURE"):  # after a change of the picture, and to be looked at
        file.write_text(picture)
    assert file.read_text() == picture


class Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.inside = x.abs() < 1
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.inside


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy() ** 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def gradient(program, compiler):
    x = torch.tensor([0.5, 1.5, -100.0], requires_grad=True)
    compiler(program)(x).sum().backward()
    return x.grad


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
@pytest.mark.parametrize(
    ("words", "program"),
    [("keeps a mask", Mask), ("with `setup_context`", Separate), ("calls NumPy", ByNumpy)],
)
def test_a_function_of_the_table_fails_as_it_says_without_hookkit(words, program):
    torch.testing.assert_close(gradient(program.apply, thunder.jit), gradient(program.apply, lambda f: f))
    hookkit.disable()
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(Exception) as raised:
        gradient(program.apply, thunder.jit)
    kind, message = re.search(rf"^\| .*{words}.* \| (\w+): (.*) \| right \|$", README, re.MULTILINE).groups()
    if IS_WHERE_THE_README_WAS_WRITTEN:
        assert type(raised.value).__name__ == kind
        assert message in re.sub(r"<function \w+\.(\w+) at \w+>", r"\1", str(raised.value))


def test_the_first_program_has_the_wrong_sign_without_hookkit(monkeypatch):
    names = run(BLOCKS[0][0], monkeypatch)[0]
    hookkit.disable()
    if THUNDER_RUNS_FUNCTIONS:
        assert names["gradient"](thunder.jit(names["Reverse"].apply)).tolist() == [1.0, 1.0, 1.0]
    else:  # torch 2.14
        with pytest.raises(Exception, match="KeyError"):
            thunder.jit(names["Reverse"].apply)(torch.ones(3, requires_grad=True))


def test_the_gradient_of_sigmoid_is_nan_without_hookkit():
    assert gradient(torch.sigmoid, thunder.jit)[-1] == gradient(torch.sigmoid, lambda f: f)[-1] == 0
    hookkit.disable()
    assert gradient(torch.sigmoid, thunder.jit)[-1].isnan()


def test_thunder_cannot_be_imported_without_hookkit_where_the_table_says_so():
    environment = {**os.environ, "HOOKKIT_AUTOLOAD": "0"}
    ran = subprocess.run([sys.executable, "-c", "import thunder"], capture_output=True, text=True, env=environment)
    message = re.search(r"^\| `import thunder` \| (.*) \| works \|$", README, re.MULTILINE)[1]
    assert (message in ran.stderr) == (ran.returncode != 0) == (not hasattr(torch.Tensor, "align_as"))


def test_the_table_of_outcomes_counts_the_programs_of_the_contract():
    outcome = r"^\| (right|refused|another error|silently wrong)[^|]* \| ([\d |]+) \|$"
    rows = dict(re.findall(outcome, README, re.MULTILINE))
    count = int(re.search(r"^\| (\d+) programs", README, re.MULTILINE)[1])
    assert len(rows) == 4
    assert all(sum(int(row.split("|")[way]) for row in rows.values()) == count for way in (0, 1))
    found = len(cases.contract_of(ROOT).CASES)
    if hasattr(torch.autograd.Function, "boxed_grads_call"):  # torch 2.13; the contract has fewer programs without
        assert 0.8 * found <= count <= found, "run make cases, and write its counts into README.md"


def test_the_table_of_times_is_that_of_the_benchmark():
    measured = {row["n"]: row for row in json.loads((ROOT / "docs/compile_times.json").read_text())["applications"]}
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    for n, *ratios in rows:
        found = measured[int(n)]
        names = ("custom/plain", "stock/custom", "aot_eager/custom")
        assert [float(r) for r in ratios] == pytest.approx([found[name] for name in names], rel=0.06)


@pytest.mark.parametrize(
    ("pattern", "without", "with_hookkit"),
    [
        ("handed on unchanged", "wrong" if THUNDER_RUNS_FUNCTIONS else "error", "right"),
        ("`mark_non_differentiable`", "error", "right"),
        ("shape depends on values", "error", "refused"),
        ("a wrong number of gradients", "right", "right"),
    ],
)
def test_make_cases_says_what_becomes_of_a_program(pattern, without, with_hookkit):
    (case,) = (case for case in cases.contract_of(ROOT).CASES if pattern in case.point)
    (row,) = cases.rows([case], is_loud=False)
    assert (row["without"][0], row["with"][0]) == (without, with_hookkit)
    assert hookkit.is_enabled()


def test_make_cases_prints_a_table_and_the_program(capsys):
    assert cases.main(["one-tuple", "--show"]) == 0
    printed = capsys.readouterr().out
    alone = "right" if THUNDER_RUNS_FUNCTIONS else "error"
    assert f"Arguments and results: a one-tuple stays a one-tuple\n    thunder       {alone}" in printed
    assert "| def _():" in printed
    assert f"\nright            {int(THUNDER_RUNS_FUNCTIONS)}             1 " in printed
