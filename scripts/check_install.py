"""Runs, with the hookkit that is installed, what the README and the contract promise: check_install.py ROOT.

ROOT is a checkout, from which only README.md and docs/contract.py are read. Prints what failed, and a closing line;
exits with 1 if anything did.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
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


def run_readme(root: Path) -> Iterator[str]:
    """Run the README's blocks, each as a program of its own; yield what failed."""
    for number, block in enumerate(readme_blocks(root), 1):
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


def main(root: Path) -> int:
    """Run everything; return the exit status."""
    assert not Path(hookkit.__file__).is_relative_to(root / "hookkit"), "the checkout is imported, not the package"
    warnings.simplefilter("ignore")
    failures = list(run_readme(root))
    count = len(readme_blocks(root))
    cases = contract_of(root).CASES
    for name, compile_, chosen in (("jit", thunder.jit, cases), ("thunderfx", thunder.dynamo.thunderfx, cases[::8])):
        for case in chosen:
            count += 1
            difference = run_case(case, compile_)
            if difference is not None:
                failures.append(f"{name}: {case.group}, {case.point}: {' '.join(difference.split())[:400]}")
    for failure in failures:
        print(failure)
    print(f"torch {torch.__version__}: {count - len(failures)} of {count} programs agree with eager PyTorch")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
