"""Tensors that a callable given to an opaque call leads to: they have values and gradients as in eager PyTorch."""

import functools

import pytest
import thunder
import torch
from agreement import assert_agrees

import hookkit
from hookkit.engine.values.captured import Captured, paths
from hookkit.engine.values.wrapping import Slot

WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
HELD = [WEIGHT, {"a": WEIGHT}]
PARTIAL = functools.partial(torch.mul, WEIGHT)


def vector():
    return torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)


def apply(function, *args):
    return function(*args)


@pytest.fixture(autouse=True)
def opaque():
    hookkit.rule(apply, mode="opaque")


class Scale:
    def __init__(self, weight):
        self.weight = weight

    def scaled(self, x):
        return x * self.weight

    __call__ = scaled


scale = Scale(WEIGHT)


def uses_a_global(x):
    return x * WEIGHT


def closure(x):
    y = x.sin()
    return apply(lambda a: a * y, x)


def closure_of_a_closure_in_a_partial(x):
    y = x.sin()

    def inner(a):
        return a * y

    return apply(functools.partial(lambda a, b: inner(a) + b, b=x), x)


def partial_of_a_tensor(x):
    return apply(functools.partial(torch.mul, x.sin()), x)


def default_values(x):
    y = x.sin()

    def inner(a, b=y, *, c={"many": [y]}):  # noqa: B006
        return a * b * c["many"][0]

    return apply(inner, x)


def function_that_calls_itself(x):
    y = x.sin()

    def power(a, n):
        return a if n == 0 else power(a * y, n - 1)

    return apply(power, x, 3)


def method_of_an_object_that_the_program_makes(x):
    return apply(Scale(x.sin()).scaled, x)


def without_gradient(x):
    y = x.detach() * 2
    return apply(lambda a: a * y, x)


def other_shapes_in_the_same_function(x):
    results = []
    for n in (1, 2):
        y = x[:n]
        results.append(apply(lambda a: torch.cat([a, y]), x))  # noqa: B023
    return results


@pytest.mark.parametrize(
    "program",
    [
        closure,
        closure_of_a_closure_in_a_partial,
        partial_of_a_tensor,
        default_values,
        function_that_calls_itself,
        method_of_an_object_that_the_program_makes,
        without_gradient,
        other_shapes_in_the_same_function,
    ],
    ids=lambda program: program.__name__,
)
def test_an_opaque_call_has_the_values_and_gradients_of_what_its_argument_leads_to(program):
    jitted = assert_agrees(program, vector())
    assert {call.outcome for call in hookkit.report(jitted).calls if call.rule == "apply"} == {"opaque"}


@pytest.mark.parametrize(
    "function",
    [lambda x: x * WEIGHT, lambda x: uses_a_global(x), scale.scaled, scale, PARTIAL, lambda x: x * HELD[1]["a"]],
    ids=["global", "global of a function", "method", "object", "partial", "containers"],
)
def test_a_tensor_from_outside_the_program_gets_its_gradient(function):
    x = vector()
    jitted = thunder.jit(lambda x: apply(function, x))
    found = torch.autograd.grad((jitted(x) * x).sum(), (x, WEIGHT))
    expected = torch.autograd.grad((function(x) * x).sum(), (x, WEIGHT))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_one_tensor_reached_in_two_ways_gets_its_gradient_once():
    x = vector()
    jitted = thunder.jit(lambda x: apply(lambda a: a * HELD[0] * HELD[1]["a"], x))
    (found,) = torch.autograd.grad(jitted(x).sum(), WEIGHT)
    torch.testing.assert_close(found, 2 * WEIGHT * x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def step(self, x):
        return self.linear(x) * self.mask

    def forward(self, x):
        y = x * 2
        return apply(self.step, x) + apply(lambda a: self.linear(a) + y, x) + apply(self.linear, x)


def test_parameters_and_buffers_of_the_module_of_a_method_are_lifted():
    model, x = Model(), vector()
    jitted = thunder.jit(model)
    inputs = (x, *model.parameters())
    found, expected = jitted(x), model(x)
    torch.testing.assert_close(found, expected)
    for got, wanted in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        model.linear.weight.mul_(3)
        model.mask.fill_(2)
    torch.testing.assert_close(jitted(x), model(x))


def test_a_callable_that_has_the_values_already_is_itself():
    found = {path: Slot(i) for i, path in enumerate(paths(scale.scaled))}
    assert len(found) == 1
    assert Captured(scale, {path[1:]: slot for path, slot in found.items()}).filled([WEIGHT]) is scale
    other = Captured(scale.scaled, found).filled([2 * WEIGHT])
    assert other.__self__ is not scale and scale.weight is WEIGHT
    torch.testing.assert_close(other(WEIGHT), 2 * WEIGHT**2)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("last", torch.zeros(4))
        self.count, self.seen = 0, [WEIGHT]

    def step(self, x):
        self.count += 1
        self.seen.append(self.count)
        self.last = x.detach() * 2
        return x * self.weight

    def forward(self, x):
        return apply(self.step, x)


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_call_writes_to_the_object_of_a_method_stays(grad):
    model, eager, x = Counting(), Counting(), vector()
    jitted = thunder.jit(model)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(jitted(x), eager(x))
    assert (model.count, model.seen[1:]) == (eager.count, eager.seen[1:])
    assert model.seen[0] is WEIGHT
    torch.testing.assert_close(model.last, eager.last)


def loop_variable(x):
    for k in range(3):
        x = apply(lambda a: a * k + 1, x)  # noqa: B023
    return x


def list_that_grows(x):
    made, calls = [], []
    for _ in range(3):
        made.append(x)
        calls.append(len(made))
        x = apply(lambda a: a * calls[-1] + sum(made), x)
    return x


def variable_bound_again(x):
    factor = 2

    def scaled(a):
        return a * factor

    def helper(a):
        return scaled(a) + 1

    y = apply(functools.partial(helper), x)
    factor = 5
    return apply(helper, y) + apply(scaled, x)


@pytest.mark.parametrize(
    "program", [loop_variable, list_that_grows, variable_bound_again], ids=lambda program: program.__name__
)
def test_a_function_finds_the_programs_variables_as_they_were_when_it_was_called(program):
    assert_agrees(program, vector())


def test_a_function_finds_what_it_closes_over_outside_of_the_program_as_it_is_when_it_runs():
    factor, calls = 2, 0

    def scaled(a):
        nonlocal calls
        calls += 1
        return a * factor

    jitted = thunder.jit(lambda x: apply(scaled, x))
    torch.testing.assert_close(jitted(vector()), vector() * 2)
    factor = 3
    torch.testing.assert_close(jitted(vector()), vector() * 3)
    assert calls == 2
