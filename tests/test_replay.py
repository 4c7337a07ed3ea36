"""Replay: which calls get the operations of an earlier one, and which must be interpreted; both against eager.

Each Function's gradient is wrong on purpose.
"""

import random
import warnings

import pytest
import thunder
import torch
from agreement import assert_same, run

import hookkit

FACTOR = 2.0
COUNTER = 0


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookkit.OpaqueFallbackWarning)
        yield


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.factor, None


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x + y * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return 100 * grad * y, 10 * grad * x


def scale(x, factor=2.0):
    return Scale.apply(x, factor)


def vector(*shape, dtype=torch.float32, requires_grad=True):
    return torch.linspace(0.5, 2, 4, dtype=dtype).expand(*(shape or (4,))).clone().requires_grad_(requires_grad)


def replays(program, *inputs, eager=None):
    """How often each call of a program was replayed; the program is compared with itself, or another, run eagerly."""
    jitted = thunder.jit(program)
    assert_same(run(jitted, inputs), run(eager or program, inputs))
    return [call.replays if call.outcome == "traced" else call.outcome for call in hookkit.report(jitted).calls]


# -------------------------------------------------------------------------------------------- what the arguments are


def test_a_call_like_an_earlier_one_is_replayed():
    def program(x):
        for _ in range(4):
            x = scale(x)
        return x

    assert replays(program, vector()) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (vector(), [0, 1]),
        (vector(1, 4), [0, 0]),
        (vector(dtype=torch.float64), [0, 0]),
        (vector(requires_grad=False), [0, 0]),
    ],
    ids=["the same", "another shape", "another dtype", "no gradient"],
)
def test_tensors_are_alike_in_shape_dtype_and_requires_grad(other, expected):
    assert replays(lambda x, y: (scale(x), scale(y)), vector(), other) == expected


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(2.0, [0, 1]), (3.0, [0, 0]), (2, [0, 0]), (True, [0, 0])],
)
def test_plain_values_are_alike_in_type_and_value(factor, expected):
    assert replays(lambda x: (scale(x), scale(x, factor)), vector()) == expected


def test_zero_and_minus_zero_differ():
    assert replays(lambda x: (scale(x, 0.0), scale(x, -0.0)), vector()) == [0, 0]


def test_numbers_that_the_program_is_given_are_guarded():
    def program(x, factor):
        return scale(scale(x, factor), factor)

    jitted = thunder.jit(program)
    for factor in (2.0, 3.0, 2.0):
        assert_same(run(jitted, (vector(), factor)), run(program, (vector(), factor)))


def test_which_arguments_are_one_tensor_makes_a_difference():
    assert replays(lambda x, y: (Add.apply(x, y), Add.apply(y, x)), vector(), vector()) == [0, 1]
    assert replays(lambda x, y: (Add.apply(x, y), Add.apply(x, x)), vector(), vector()) == [0, 0]
    assert replays(lambda x, y: (Add.apply(x, x), Add.apply(y, y)), vector(), vector()) == [0, 1]


def test_grad_mode_makes_a_difference():
    def program(x):
        with torch.no_grad():
            y = scale(x)
        return scale(x), y, scale(x)

    assert replays(program, vector()) == [0, 0, 1]


def test_autocast_makes_a_difference():
    def program(x):
        y = scale(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = scale(x)
        return y, z, scale(x)

    assert replays(program, vector()) == [0, "opaque", 1]


def test_a_mutable_argument_that_the_program_makes_is_compared_and_one_from_outside_is_the_same():
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factors):
            ctx.factor = factors[0]
            return x * factors[0]

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.factor, None

    assert replays(lambda x: (First.apply(x, [2.0]), First.apply(x, [2.0]), First.apply(x, [3.0])), vector()) == [
        0,
        1,
        0,
    ]
    factors = [2.0]

    def program(x):
        y = First.apply(x, factors)
        return y, First.apply(x, factors)

    assert replays(program, vector()) == [0, 1]


def test_callables_are_alike_by_identity():
    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, function):
            return function(x)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad, None

    def sine(x):
        return x.sin()

    def cosine(x):
        return x.cos()

    assert replays(lambda x: (Apply.apply(x, sine), Apply.apply(x, sine), Apply.apply(x, cosine)), vector()) == [
        0,
        1,
        0,
    ]


def test_two_functions_of_one_name_are_two():
    def make(factor):
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                return 100 * grad * factor

        return Times

    two, three = make(2.0), make(3.0)
    assert replays(lambda x: (two.apply(x), three.apply(x), two.apply(x)), vector()) == [0, 0, 1]


# ------------------------------------------------------------------------------------- what the code reads and changes


class TimesGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = FACTOR
        return x * FACTOR

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.factor


def test_a_global_that_stays_is_read_once_for_all_calls():
    assert replays(lambda x: TimesGlobal.apply(TimesGlobal.apply(x)), vector()) == [0, 1]


def test_a_global_that_the_program_changes_between_two_calls_is_read_again(monkeypatch):
    def program(x):
        y = TimesGlobal.apply(x)
        globals()["FACTOR"] = 3.0
        return y, TimesGlobal.apply(x)

    jitted = thunder.jit(program)
    for _ in range(2):
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        found = run(jitted, (vector(),))
        assert FACTOR == 3.0
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        assert_same(found, run(program, (vector(),)))


def test_a_global_that_changes_between_two_steps_is_seen(monkeypatch):
    jitted = thunder.jit(lambda x: TimesGlobal.apply(TimesGlobal.apply(x)))
    for value in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        assert_same(run(jitted, (vector(),)), run(lambda x: TimesGlobal.apply(TimesGlobal.apply(x)), (vector(),)))


def test_a_class_attribute_that_changes_between_two_applications_is_read_again():
    class Times(torch.autograd.Function):
        factor = 2.0

        @staticmethod
        def forward(ctx, x):
            return x * Times.factor

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    assert replays(lambda x: (Times.apply(x), Times.apply(x)), vector()) == [0, 1]

    def changes(x):
        Times.factor = 2.0
        y = Times.apply(x)
        Times.factor = 3.0
        return y, Times.apply(x)

    assert_same(run(thunder.jit(changes), (vector(),)), run(changes, (vector(),)))


def test_a_closure_that_stays_is_read_once_and_one_that_changes_again():
    factor = 2.0

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.factor

    assert replays(lambda x: (Times.apply(x), Times.apply(x)), vector()) == [0, 1]

    def program(x):
        nonlocal factor
        factor = 2.0
        y = Times.apply(x)
        factor = 3.0
        return y, Times.apply(x)

    assert_same(run(thunder.jit(program), (vector(),)), run(program, (vector(),)))


def test_a_list_that_the_program_appends_to_between_two_calls_is_read_again():
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factors):
            total = 0.0
            for factor in factors:
                total = total + factor
            ctx.total = total
            return x * total

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.total, None

    def program(x):
        factors = [1.0]
        y = Times.apply(x, factors)
        z = Times.apply(x, factors)
        factors.append(2.0)
        return y, z, Times.apply(x, factors)

    assert replays(program, vector()) == [0, 1, 0]


def test_a_function_that_counts_its_calls_is_not_replayed():
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            global COUNTER
            COUNTER += 1
            return x * COUNTER

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    def program(x):
        return Counts.apply(x), Counts.apply(x)

    def outcome(function):
        global COUNTER
        COUNTER = 0
        return run(function, (vector(),)), run(function, (vector(),))

    for found, expected in zip(outcome(thunder.jit(program)), outcome(program), strict=True):
        assert_same(found, expected)
    assert COUNTER == 4


def test_a_function_that_appends_to_a_list_is_not_replayed():
    seen = []

    class Appends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(len(seen))
            return x * len(seen)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    def program(x):
        return Appends.apply(x), Appends.apply(x)

    def outcome(function):
        seen.clear()
        return run(function, (vector(),))

    assert_same(outcome(thunder.jit(program)), outcome(program))
    assert seen == [0, 1]


def test_random_numbers_of_python_are_drawn_at_each_call():
    class Random(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * random.random()

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    def program(x):
        return Random.apply(x), Random.apply(x)

    def outcome(function):
        random.seed(3)
        return run(function, (vector(),)), run(function, (vector(),))

    for found, expected in zip(outcome(thunder.jit(program)), outcome(program), strict=True):
        assert_same(found, expected)


def test_random_numbers_of_torch_are_drawn_at_each_call():
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    jitted = thunder.jit(lambda x: (Noise.apply(x), Noise.apply(x)))
    first, second = jitted(vector())
    assert not torch.equal(first, second)
    again, _ = jitted(vector())
    assert not torch.equal(first, again)


def test_parameters_that_a_function_finds_by_itself_are_told_apart():
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.save_for_backward(layer.weight)
            return x @ layer.weight.t()

        @staticmethod
        def backward(ctx, grad):
            (weight,) = ctx.saved_tensors
            return 100 * grad @ weight, None

    def program(x):
        return Through.apply(x, layers[0]), Through.apply(x, layers[1]), Through.apply(x, layers[0])

    assert replays(program, vector()) == [0, 0, 1]


def test_saved_tensors_and_gradients_are_those_of_their_own_call():
    def program(x, y):
        a = Add.apply(x, y)
        b = Add.apply(y, a)
        return Add.apply(a, b), a

    assert replays(program, vector(), vector()) == [0, 1, 1]


def test_an_output_that_is_the_input_is_replayed_as_that():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x, x * 2

        @staticmethod
        def backward(ctx, a, b):
            return 100 * a + 10 * b

    assert replays(lambda x: (Same.apply(x), Same.apply(x)), vector()) == [0, 1]


def test_a_rule_declared_by_decorator_is_replayed_under_the_same_conditions():
    def cube(x, factor=1.0):
        return x**3 * factor

    @hookkit.rule(cube, register=False)
    def cube_rule(x, factor=1.0):
        return x**3 * factor, hookkit.save(x=x)

    @cube_rule.backward
    def _(saved, grad):
        return {"x": 100 * grad * saved.x}

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(x)
            return x**3 * factor

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.saved_tensors[0], None

    with hookkit.use(cube_rule):
        found = replays(
            lambda x: (cube(x), cube(x), cube(x, factor=2.0), cube(x, factor=2.0)),
            vector(),
            eager=lambda x: tuple(Cube.apply(x, f) for f in (1.0, 1.0, 2.0, 2.0)),
        )
    assert found == [0, 1, 0, 1]


def test_another_program_interprets_again():
    for _ in range(2):
        assert replays(lambda x: (scale(x), scale(x)), vector()) == [0, 1]
