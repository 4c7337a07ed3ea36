"""hookkit.opaque: any function is one operator, with PyTorch's values and gradients."""

import inspect

import numpy as np
import pytest
import thunder
import torch
from agreement import assert_agrees, assert_same, run
from thunder.dynamo import thunderfx

import hookkit

WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)


def vector():
    return torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)


def branch(x, factor=2):
    """Branch on a value."""
    return x * factor if x.sum() > 0 else x.clone()


opaque_branch = hookkit.opaque(branch)


@hookkit.opaque
def with_item(x):
    return x * x.sum().item() * WEIGHT


@hookkit.opaque
def with_numpy(x):
    return torch.from_numpy(np.sort(x.detach().numpy())).clone()


@hookkit.opaque
def with_cond(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() * WEIGHT, lambda x: x.cos(), (x,))


compiled = torch.compile(lambda x: x.sin() * WEIGHT, backend="aot_eager")


@hookkit.opaque
def with_compiled(x):
    return compiled(x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 4))
        self.count = 0

    @hookkit.opaque
    def step(self, x):
        self.count += 1
        return x * self.weight if x.sum() > 0 else x.clone()

    def forward(self, x):
        return self.step(x).sin()


PROGRAMS = {
    "a branch on a value": lambda x: opaque_branch(x, factor=3) * 2,
    "called twice": lambda x: opaque_branch(opaque_branch(x)),
    "item, and a global": lambda x: with_item(x),
    "NumPy": lambda x: with_numpy(x) * x,
    "torch.cond inside": lambda x: with_cond(x),
    "a compiled function inside": lambda x: with_compiled(x),
    "made in the program": lambda x: hookkit.opaque(lambda a: a * x.sum().item())(x),
    "a module": hookkit.opaque(torch.nn.Linear(4, 4)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_function_is_one_operator(program):
    jitted = assert_agrees(program, vector())
    assert {call.outcome for call in hookkit.report(jitted).calls} == {"opaque"}


def test_a_method_gives_gradients_to_parameters_and_changes_its_object():
    model, eager, x = Model(), Model(), vector()
    jitted = thunder.jit(model)
    for _ in range(2):
        found = torch.autograd.grad((jitted(x) * x).sum(), (x, model.weight))
        expected = torch.autograd.grad((eager(x) * x).sum(), (x, eager.weight))
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted)
    assert model.count == eager.count == 2


def test_a_probe_leaves_dynamo_able_to_compile_what_it_ran():
    x = vector()
    expected = with_cond(x)
    thunder.jit(lambda x: with_cond(x))(x)
    torch.testing.assert_close(with_cond(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(with_cond(x), expected)


def test_a_derivative_that_pytorch_has_not_is_refused_where_another_way_leads_to_the_input():
    @hookkit.opaque
    def function(x):
        cut_off = torch._C._functions.DelayedError("there is no such derivative", 1)(x.detach().requires_grad_())
        return cut_off * 2 + x

    for program in (function, thunder.jit(lambda x: function(x))):
        with pytest.raises(RuntimeError, match="there is no such derivative"):
            program(vector()).sum().backward()


def test_the_call_has_the_name_and_the_place_of_the_function():
    jitted = thunder.jit(lambda x: opaque_branch(x))
    jitted(vector())
    (call,) = hookkit.report(jitted).calls
    assert call.name == "branch" and call.source.file == __file__
    assert "branch(" in str(thunder.last_traces(jitted)[0])


def test_it_looks_like_the_function():
    assert opaque_branch.__name__ == "branch" and opaque_branch.__doc__ == branch.__doc__
    assert inspect.signature(opaque_branch) == inspect.signature(branch)
    torch.testing.assert_close(opaque_branch(WEIGHT), branch(WEIGHT))


def test_through_thunderfx_it_is_the_function_itself():
    program = PROGRAMS["a branch on a value"]
    assert_same(run(thunderfx(program), (vector(),)), run(program, (vector(),)))


def test_shapes_that_depend_on_values_are_refused():
    chosen = hookkit.opaque(lambda x: x[x > 0.25])
    with pytest.raises(hookkit.MetaError, match="data-dependent"):
        thunder.jit(lambda x: chosen(x))(vector())


@pytest.mark.parametrize("value", [3, torch.nn.Linear], ids=["no callable", "a class"])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(hookkit.RegistrationError, match="takes a function"):
        hookkit.opaque(value)


def test_the_ways_out_that_the_error_for_a_branch_on_a_value_names_are_right():
    def decide(x):
        return x * 2 if x.sum() > 0 else x.clone()

    with pytest.raises(hookkit.DataDependencyError) as refused:
        thunder.jit(decide)(vector())
    opaque = hookkit.opaque(decide)
    ways = {
        "torch.where(condition, a, b)": lambda x: torch.where(x.sum() > 0, x * 2, x),
        "torch.cond(condition, f, g, (x,))": lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, torch.clone, (x,)),
        "hookkit.opaque(function)": lambda x: opaque(x),
    }
    for name, program in ways.items():
        assert name in str(refused.value)
        assert_same(run(thunder.jit(program), (vector(),)), run(decide, (vector(),)))
    assert "thunderfx" in str(refused.value)
    assert_same(run(thunderfx(decide), (vector(),)), run(decide, (vector(),)))


def test_a_mask_in_an_opaque_function_is_right():
    masked = hookkit.opaque(lambda x: x[x > 0.25].sum())
    with pytest.raises(hookkit.MetaError, match=r"hookkit.opaque\(function\)"):
        thunder.jit(lambda x: x[x > 0.25].sum())(vector())
    assert_agrees(lambda x: masked(x), vector())
