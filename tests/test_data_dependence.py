"""Values that only the run knows: what a program makes of them is right, or refused where it stands."""

import math
import warnings

import pytest
import thunder
import torch
from agreement import assert_agrees

import hookkit


def matrix():
    return torch.linspace(0.1, 1.2, 12).reshape(3, 4).requires_grad_()


def total(x):
    return x.sum().item()


REFUSED = {
    "if": (lambda x: x * 2 if x.sum() > 0 else x, r"bool\[\] on cpu, from gt at .*\.py:\d+\) as a Python boolean at"),
    "if of a number": (
        lambda x: x * 2 if total(x) else x,
        r"a number \(of a tensor, from item at .*as a Python boolean",
    ),
    "comparison": (lambda x: x * 2 if total(x) > 0 else x, "a Python boolean"),
    "in a list": (lambda x: x * 2 if total(x) in [1.0] else x, "a Python boolean"),
    "in a set": (lambda x: x * 2 if total(x) in {1.0} else x, "a key"),
    "a key": (lambda x: x * {1.0: 2}.get(total(x), 3), "a key"),
    "int": (lambda x: x * int(x.sum()), "a Python int"),
    "float": (lambda x: x * float(x.sum()), "a Python float"),
    "range": (lambda x: sum(x for _ in range(x.sum().long().item())), "a Python int"),
    "math": (lambda x: x * math.sqrt(total(x)), "a Python float"),
    "round": (lambda x: x * round(total(x)), "a rounded Python number"),
    "round to digits": (lambda x: x * round(total(x), 1), "a rounded Python number"),
    "floor": (lambda x: x * math.floor(total(x)), "a rounded Python number"),
    "divmod": (lambda x: x * divmod(total(x), 2)[0], "a Python quotient and remainder"),
    "divided by": (lambda x: x * divmod(7, total(x))[1], "a Python quotient and remainder"),
    "index": (lambda x: x * [2.0, 3.0][x.sum().long()], "an index"),
    "index of a tuple": (lambda x: x * (2.0, 3.0)[x.sum().long().item()], "an index"),
    "text": (lambda x: (f"{total(x):.3f}", x * 2)[1], "text"),
    "tolist": (lambda x: x * x.tolist()[0][0], r"tolist\(\) at .*makes Python values of a tensor"),
    "numpy": (lambda x: x * x.detach().numpy()[0], r"numpy\(\) at .*makes Python values of a tensor"),
    "is_nonzero": (lambda x: x * 2 if torch.is_nonzero(x.sum()) else x, "makes Python values of a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_goes_by_a_value_is_refused(name):
    program, words = REFUSED[name]
    with pytest.raises(hookkit.DataDependencyError, match=words) as refused:
        thunder.jit(program)(matrix())
    assert "test_data_dependence.py" in str(refused.value)
    assert "known only when the program runs" in str(refused.value)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.narrow(1, 0, x.sum().long().item()),
        lambda x: x.sum() * torch.ones(x.sum().long().abs().item()),
        lambda x: x.sum().expand(x.sum().long().abs().item()),
    ],
)
def test_a_shape_that_depends_on_a_value_is_refused(program):
    with pytest.raises(hookkit.MetaError, match="depends on the values of tensors"):
        thunder.jit(program)(matrix())


def test_numbers_of_tensors_are_computed_with():
    def program(x):
        number = total(x)
        rest = number % 3 + abs(-number)
        return x * number, x * rest, x + torch.tensor([number, 1.0, 2.0, 3.0]), number

    assert_agrees(program, matrix())


def test_a_list_of_indices_takes_a_number_of_a_tensor():
    def program(x):
        indices = [x.argmax(0)[0].item(), 0]
        return x[indices]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_agrees(program, matrix())


def test_a_number_of_a_tensor_has_its_class():
    def program(x):
        number = total(x)
        count = x.long().sum().item()
        known = isinstance(number, float), isinstance(count, int), isinstance(count, float), type(number) is float
        return x * 2 if known == (True, True, False, True) else x

    assert_agrees(program, matrix())


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
@pytest.mark.parametrize(
    "decide", [lambda x: bool(x.sum() > 0), lambda x: total(x) > 0, lambda x: x.tolist()[0][0] > 0]
)
def test_a_function_that_goes_by_a_value_runs_opaque(decide):
    class Decides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.positive = decide(x)
            return x * (2 if ctx.positive else 3)

        @staticmethod
        def backward(ctx, grad):
            return grad * (100 if ctx.positive else 10)

    jitted = assert_agrees(Decides.apply, matrix())
    jitted = assert_agrees(Decides.apply, -matrix())
    assert [c.outcome for c in hookkit.report(jitted).calls] == ["opaque"]


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
def test_mode_trace_says_why():
    class Decides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 if x.sum() > 0 else x

    with (
        hookkit.use(mode="trace"),
        pytest.raises(hookkit.UntraceableError, match=r'a Python boolean(.|\n)*mode is "trace"'),
    ):
        thunder.jit(Decides.apply)(matrix())
