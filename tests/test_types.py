"""A rule keeps the type of its provider, so that type checkers check its calls; mypy is asked.

Every type that an author writes in an annotation is a public name.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import torch
import hookkit


def swish(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)


@hookkit.rule(swish)
def traced(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return x


@traced.backward
def _(saved: hookkit.Residuals, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": grad * saved.x}


@traced.when
def _(x: torch.Tensor, beta: float = 1.0) -> bool | hookkit.Decline:
    return x.ndim == 1 or hookkit.decline("no vector")


@hookkit.rule(swish, mode="opaque")
def opaque(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return x


@hookkit.custom_gradient
def defined(x: torch.Tensor, beta: float = 1.0) -> tuple[torch.Tensor, hookkit.Residuals]:
    return x, hookkit.save(x=x)


def is_norm(call: hookkit.Call) -> bool | hookkit.Decline:
    place: hookkit.Source | None = call.source
    operator: hookkit.Operator | None = call.operator
    return place is not None and operator is None


statement: hookkit.Rule[..., torch.Tensor] = hookkit.rule(swish, mode="opaque")
several: list[hookkit.Rule[..., torch.Tensor]] = hookkit.rules("swish")
predicated: hookkit.Declaration = hookkit.rule(hookkit.where(is_norm))
explained: hookkit.ExplainedCall = hookkit.explain(swish, torch.ones(2)).calls[0]
compiled: hookkit.CompiledCall = hookkit.report(swish).calls[0]

for_each_of_them: torch.Tensor = traced(torch.ones(2), beta=2.0)
for_each_of_them = opaque(torch.ones(2), 2.0)
for_each_of_them = defined(torch.ones(2))
"""
WRONG = ['traced("a")', "traced(torch.ones(2), gamma=1)", 'opaque("a")', 'defined("a")', "hookkit.rule(swish, mode=3)"]


def test_type_checkers_check_the_calls_of_a_rule(tmp_path):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(WRONG) + "\n")
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache'}"]
    out, errors, _ = api.run([*options, str(program)])
    first = PROGRAM.count("\n") + 1
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", out)}
    assert found == set(range(first, first + len(WRONG))), out + errors
