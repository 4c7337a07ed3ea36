"""Runs, with the hookkit that is installed, what the README and the contract promise: check_install.py ROOT.

ROOT is a checkout, from which only README.md and docs/contract.py are read. The doctor comes first, then the README,
then the programs of the contract. Prints what failed, and a closing line; exits with 1 if anything did, and with 77 if
nothing did but there was no time for all of it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import thunder
import thunder.dynamo
import torch

import hookkit
from hookkit.testing import assert_same


def readme_blocks(root: Path) -> list[str]:
    """Return the Python blocks of the README."""
    return re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), flags=re.M | re.S)


def run_readme(number: int, block: str) -> Iterator[str]:
    """Run one of the README's blocks as a program of its own; yield what failed."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "readme.py"
        program.write_text(block)
        ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    if ran.returncode:
        yield f"README.md, block {number}: {ran.stderr.strip().splitlines()[-1]}"


def contract_of(root: Path) -> ModuleType:
    """Import docs/contract.py."""
    sys.path.insert(0, str(root / "docs"))  # it imports what lies beside it
    spec = importlib.util.spec_from_file_location("contract", root / "docs" / "contract.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["contract"] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return module


def run_case(case: Any, compile_: Any) -> str | None:
    """Compare a program of the contract with eager PyTorch; say what differs.

    A case that is refused must be refused by hookkit; one that is as in eager must raise what that raises.
    """
    program, arguments = case.make()
    arguments = tuple(a for a in arguments if not callable(a))
    try:
        assert_same(copy.deepcopy(program), *arguments, jit=compile_)
    except hookkit.HookError as error:
        return None if case.state == "refused" else f"is refused: {error}"
    except AssertionError as error:
        return str(error)
    except Exception as error:
        # Some of what hookkit refuses a newer PyTorch refuses, too.
        as_eager = case.state in ("as eager", "refused") and raised_eagerly(program, arguments) is not None
        return None if as_eager else f"{type(error).__name__}: {error}"
    return None


def raised_eagerly(program: Any, arguments: tuple[Any, ...]) -> Exception | None:
    """What eager PyTorch raises, in the forward or in the backward."""
    try:
        output = copy.deepcopy(program)(*arguments)
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        torch.autograd.backward([t.sum() for t in tensors if t.requires_grad])
    except Exception as error:
        return error
    return None


def run_doctor() -> Iterator[str]:
    """Run the doctor, which prints its table; yield what is to be said if something differs."""
    if subprocess.run([sys.executable, "-m", "hookkit", "check"], check=False).returncode:
        yield "python -m hookkit check: see its table"


def run_contract(compile_: Any, name: str, case: Any) -> Iterator[str]:
    """Run a program of the contract; yield what failed."""
    difference = run_case(case, compile_)
    if difference is not None:
        yield f"{name}: {case.group}, {case.point}: {' '.join(difference.split())[:400]}"


def checks(root: Path) -> list[Callable[[], Iterator[str]]]:
    """Everything that there is to run, each yielding what failed."""
    cases = contract_of(root).CASES
    ways = (("jit", thunder.jit, cases), ("thunderfx", thunder.dynamo.thunderfx, cases[::8]))
    programs = [partial(run_contract, compile_, name, case) for name, compile_, chosen in ways for case in chosen]
    blocks = [partial(run_readme, number, block) for number, block in enumerate(readme_blocks(root), 1)]
    return [run_doctor, *blocks, *programs]


def main(arguments: list[str] | None = None) -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to begin nothing more")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    assert not Path(hookkit.__file__).is_relative_to(root / "hookkit"), "the checkout is imported, not the package"
    warnings.simplefilter("ignore")
    started, failed, done = time.monotonic(), 0, 0
    todo = checks(root)
    for check in todo:
        if time.monotonic() - started > given.seconds:
            break
        failures = list(check())
        print(*failures, sep="\n", end="\n" * bool(failures), flush=True)
        failed += bool(failures)
        done += 1
    print(f"torch {torch.__version__}: {done - failed} of {done} programs agree with eager PyTorch")
    if done < len(todo):
        print(f"for {len(todo) - done} more there was no time")
    return 1 if failed else 77 if done < len(todo) else 0


if __name__ == "__main__":
    sys.exit(main())
