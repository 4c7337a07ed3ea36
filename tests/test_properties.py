"""Random programs around random Functions: thunder's results and gradients are eager PyTorch's, or hookkit refuses.

``tests/fuzz.py`` runs the same for as long as one likes.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
from functools import partial
from typing import Any

import pytest
import thunder
import thunder.dynamo
import torch
from grammar import Call, Program, programs
from hypothesis import HealthCheck, given, settings

import hookkit
from hookkit.comparison import structure_of, tensors_of, uneven

pytestmark = pytest.mark.filterwarnings(
    "ignore::hookkit.errors.OpaqueFallbackWarning", "ignore::hookkit.errors.MetaWarning"
)

# What hookkit may refuse that eager PyTorch computes, by a part of the message.
REFUSED = {
    "a branch on values decides about shapes or dtypes": "data-dependent",
    "what shares memory with the result of a call is changed in place": "changes in place what the result of",
}


WAYS = ("traced", "opaque", "region", "traced", "opaque", "thunderfx")
COMPILERS = {
    "traced": thunder.jit,
    "opaque": thunder.jit,
    "region": thunder.jit,
    "thunderfx": thunder.dynamo.thunderfx,
    "dynamo": partial(torch.compile, backend="eager"),
}


def observe(function: Any, program: Program, call: Call, parameters: list[Any]) -> dict[str, Any]:
    """Call a program, and take gradients of the outputs that are to be used; what there is afterwards, by name."""
    arguments = program.arguments(call)
    if program.derivative.startswith("torch"):
        return transformed(function, program.derivative, *arguments)
    output = function(*arguments)
    inputs = list(tensors_of(arguments))
    seen = {"structure of the output": structure_of(output)}
    used = itertools.cycle(program.used)
    roots = [t for t in tensors_of(output) if t.requires_grad and next(used)]
    if roots and program.derivative == "second":
        leaves = [t for t in dict.fromkeys([*inputs, *parameters]) if t.requires_grad]
        seen.update(differentiated_twice(roots, leaves))
    elif roots:
        torch.autograd.backward(roots, [uneven(r) for r in roots])
    for kind, tensors in (("output", tensors_of(output)), ("input", inputs)):
        seen.update({f"{kind} {i}": t.detach().clone() for i, t in enumerate(tensors)})
    for i, leaf in enumerate((*inputs, *parameters)):
        seen[f"gradient {i}"] = leaf.grad if leaf.is_leaf else "no leaf"
    for parameter in parameters:
        parameter.grad = None
    return seen


def differentiated_twice(roots: list[torch.Tensor], leaves: list[torch.Tensor]) -> dict[str, Any]:
    """Take gradients with a graph, and gradients of these: the first ones, and whether the second ones raise."""
    cotangents = [uneven(r).requires_grad_() for r in roots]
    gradients = torch.autograd.grad(roots, leaves, cotangents, create_graph=True, allow_unused=True)
    seen = {f"first gradient {i}": g if g is None else g.detach() for i, g in enumerate(gradients)}
    again = [g for g in gradients if g is not None and g.requires_grad]
    seen["structure of the first gradients"] = structure_of(gradients)
    try:
        if again:
            torch.autograd.backward(again, [uneven(g) for g in again])
    except RuntimeError as error:
        if isinstance(error, hookkit.HookError) and any(re.search(m, str(error)) for m in REFUSED.values()):
            raise
        seen["second gradients"] = "raise"
    for i, cotangent in enumerate(cotangents):
        seen[f"gradient of cotangent {i}"] = cotangent.grad
    return seen


def transformed(function: Any, transform: str, first: torch.Tensor, *others: Any) -> dict[str, Any]:
    """What a transform makes of a program, taken as a function of its first argument."""

    def loss(tensor: torch.Tensor) -> Any:
        outputs = [t for t in tensors_of(function(tensor, *others)) if t.is_floating_point()]
        return sum((t * uneven(t)).sum() for t in outputs)

    def every(tensor: torch.Tensor) -> Any:
        return list(tensors_of(function(tensor, *others)))

    stacked = torch.stack([first, first * 2])
    result = torch.func.grad(loss)(first) if transform == "torch.func.grad" else torch.vmap(every)(stacked)
    return {f"result {i}": t.detach() for i, t in enumerate(tensors_of(result))}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Compare what was seen; gradients are off by whole factors where they are wrong, so tolerances are for float32."""
    for name, wanted in expected.items():
        got = found.get(name)
        assert type(got) is type(wanted), f"{where}, {name}: eager gives {wanted}, compiled {got}"
        if isinstance(wanted, torch.Tensor):
            message = partial("{}, {}: {}".format, where, name)
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3, equal_nan=True, msg=message)
        else:
            assert got == wanted, f"{where}, {name}: eager gives {wanted}, compiled {got}"


def outcome(program: Program, how: str) -> str:
    """Compare a program with itself, compiled in one of the ``WAYS``, call by call; in a few words how that ended.

    Raises:
        AssertionError: if they differ.
    """
    defined = program.load()
    eager = defined["program"]
    parameters = list(eager.parameters()) if isinstance(eager, torch.nn.Module) else []
    try:
        expected = [observe(eager, program, call, parameters) for call in program.calls]
    except Exception as error:
        return f"eager raises {type(error).__name__}"
    opaque = [hookkit.rule(defined[f], mode="opaque", register=False) for f in program.functions]
    torch._dynamo.reset()
    compiled = COMPILERS[how](eager)
    scopes = {"opaque": hookkit.use(*opaque), "region": hookkit.use(mode="region")}
    with scopes.get(how, contextlib.nullcontext()):
        for index, call in enumerate(program.calls):
            try:
                found = observe(compiled, program, call, parameters)
            except hookkit.HookError as error:
                for kind, message in REFUSED.items():
                    if re.search(message, str(error)):
                        return f"refused: {kind}"
                raise
            assert_equal(found, expected[index], f"{how}, call {index + 1}")
    return "same"


def dynamo_differs(program: Program) -> bool:
    """Whether Dynamo alone, without thunder, makes something else of a program than eager PyTorch."""
    try:
        return outcome(program, "dynamo") != "same"
    except Exception:
        return True


def checked(program: Program, how: str) -> str:
    """The outcome; what Dynamo does to a program before thunder gets it does not count.

    Raises:
        AssertionError: if the program differs from eager PyTorch.
    """
    try:
        return outcome(program, how)
    except Exception:
        if how != "thunderfx":
            raise
        if not dynamo_differs(program):
            raise
        return "Dynamo alone differs"


# The same examples each time; the first of the longer runs are those of the shorter.
SHORT = [("traced", 8), ("opaque", 6), ("region", 4), ("thunderfx", 2)]
LONG = [("traced", 30), ("opaque", 30), ("region", 16), ("thunderfx", 8)]


@pytest.mark.parametrize(("how", "examples"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_random_programs_agree(how, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(programs())
    def run(program: Program) -> None:
        outcomes[checked(program, how)] += 1

    outcomes: collections.Counter[str] = collections.Counter()
    run()
    assert outcomes["same"] > examples / 2, outcomes
