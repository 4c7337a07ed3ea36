"""Operations that thunder gets wrong: as in eager PyTorch with the rules that ship, and not without them."""

import math

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import thunderfx
from torch._subclasses.fake_tensor import FakeTensorMode

import hookkit
from hookkit.mends.rules import gradients, gradients_by_pytorch
from hookkit.mends.rules import values as of_values
from hookkit.testing import assert_same

MODULES = (of_values, gradients, gradients_by_pytorch)
RULES = [v for module in MODULES for v in vars(module).values() if isinstance(v, hookkit.Rule)]


def values(*given, dtype=torch.float64):
    return torch.tensor(given, dtype=dtype).requires_grad_()


def zeroed(x):
    y = x * 2
    y.zero_()
    return y


def elu_in_place(x):
    y = x * 2
    F.elu(y, inplace=True)
    return y


def in_place(method, *given):
    def program(x, *args):
        y = x * 1
        getattr(y, method)(*given, *args)
        return y

    return program


INDEX = torch.tensor([0, 2])
TARGET = torch.tensor([0, 2, 1])
FLOAT = torch.float32
NEAR_ONE = [0.3 * i - 1.7 for i in range(12)]

CASES = {
    "relu of NaN": (torch.relu, values(math.nan, 1.0, -1.0)),
    "F.relu of NaN": (F.relu, values(math.nan, 1.0, -1.0)),
    "sigmoid far below zero": (torch.sigmoid, values(-100.0, 3.0, dtype=FLOAT)),
    "the method sigmoid": (lambda x: x.sigmoid(), values(-100.0, 3.0, dtype=FLOAT)),
    "glu": (F.glu, values(1.0, 2.0, -100.0, 3.0, dtype=FLOAT)),
    "elu far above zero": (F.elu, values(100.0, -1.0, dtype=FLOAT)),
    "elu in place": (elu_in_place, values(100.0, -1.0, dtype=FLOAT)),
    "celu far above zero": (lambda x: F.celu(x, 0.5), values(100.0, -1.0, dtype=FLOAT)),
    "selu far above zero": (torch.selu, values(100.0, -1.0, dtype=FLOAT)),
    "mish far above zero": (F.mish, values(100.0, -1.0, dtype=FLOAT)),
    "to the power of 0": (lambda x: x**0 + x.pow(0.0), values(0.0, 1.0, -1.0)),
    "max_pool1d with ties": (lambda x: F.max_pool1d(x.reshape(1, 1, 4), 2), values(1.0, 1.0, 0.0, 0.0)),
    "pow_": (in_place("pow_", torch.tensor([0.0, 2.0], dtype=torch.float64)), values(0.0, 1.0)),
    "clamp to tensors": (torch.clamp, values(0.0, 1.0, 2.0), values(0.0, 0.0, 0.0), values(1.0, 1.0, 1.0)),
    "max with ties": (lambda x: x.max(0).values * 2, values(1.0, 1.0, 0.0)),
    "floor": (torch.floor, values(0.5, 1.0)),
    "the method ceil": (lambda x: x.ceil(), values(0.5, 1.0)),
    "ceil_": (in_place("ceil_"), values(0.5, 1.0)),
    "split": (lambda x: x.split(2), values(1.0, 2.0, 3.0)),
    "var, unbiased by position": (lambda x: torch.var(x, False), values(1.0, 2.0, 4.0)),
    "the method std": (lambda x: x.std(False), values(1.0, 2.0, 4.0)),
    "nll_loss": (lambda x: F.nll_loss(x.reshape(3, 3), TARGET), values(*range(9))),
    "running statistics": (
        lambda x, m, v: F.instance_norm(x.reshape(2, 2, 2), m, v),
        values(*range(8)),
        torch.zeros(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
    ),
    "group_norm of nothing": (lambda x: F.group_norm(x, 1), torch.zeros(0, 2, requires_grad=True)),
    "tensor_split of nothing": (lambda x: x.tensor_split(2), torch.zeros(0, 2, requires_grad=True)),
    "split of nothing": (lambda x: torch.split(x, 2), torch.zeros(0, 2, requires_grad=True)),
    "the method unfold": (lambda x: x.unfold(0, 2, 1), values(1.0, 2.0, 3.0)),
    "take_along_dim from the end": (lambda x: torch.take_along_dim(x, INDEX - 2, 0), values(1.0, 2.0, 3.0)),
    "copysign": (torch.copysign, values(1.0, -2.0), values(-1.0, 0.5)),
    "copysign_": (in_place("copysign_"), values(1.0, -2.0), values(-1.0, 0.5)),
    "index_put": (lambda x, y: torch.index_put(x, (INDEX,), y), values(1.0, 2.0, 3.0), values(5.0, 6.0)),
    "pow at zero": (torch.pow, values(0.0, 2.0), values(2.0, 3.0)),
    "x ** y at zero": (lambda x, y: x**y, values(0.0, 2.0), values(2.0, 3.0)),
    "prod with a zero": (lambda x: torch.prod(x, 0), values(0.0, 2.0, 3.0)),
    "normalize of zeros": (lambda x: F.normalize(x, dim=0), values(0.0, 0.0)),
    "zero_": (zeroed, values(1.0, 2.0)),
    "tanh in bfloat16": (torch.tanh, values(*NEAR_ONE, dtype=torch.bfloat16)),
    "F.softmax in bfloat16": (lambda x: F.softmax(x, 0), values(*NEAR_ONE, dtype=torch.bfloat16)),
    "the method softmax in float16": (lambda x: x.softmax(dim=-1), values(*NEAR_ONE, dtype=torch.float16)),
    "frexp of a scalar": (lambda x: torch.frexp(x)[0], torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)),
    "the sum of cross_entropy": (
        lambda x: F.cross_entropy(x.reshape(3, 3), TARGET, reduction="sum"),
        values(*range(9), dtype=FLOAT),
    ),
    "cross_entropy without a batch": (
        lambda x: F.cross_entropy(x, TARGET[1], reduction="none"),
        values(1.0, 2.0, 3.0, dtype=FLOAT),
    ),
    "masked_fill of booleans": (lambda b: b.masked_fill(b, 1), torch.tensor([True, False])),
    "max of booleans": (lambda b: torch.max(b, 0), torch.tensor([[True, False], [False, False]])),
    "div to integers by zero": (
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        values(1.0, 2.0),
        values(0.0, 2.0),
    ),
}


# What thunder does here is right with some versions of torch, or for some values.
AT_BOUNDS = {
    "atan2 at the origin": (torch.atan2, values(0.0, 1.0), values(0.0, 2.0)),
    "atan2_": (in_place("atan2_", torch.tensor([0.0, 2.0], dtype=torch.float64)), values(0.0, 1.0)),
    "clamp at its bounds": (lambda x: torch.clamp(x, -1.0, 1), values(-1.0, 1.0, 0.0, 2.0)),
    "clamp of infinities and NaN": (lambda x: torch.clamp(x, max=1.0), values(math.inf, -math.inf, math.nan, 0.0)),
    "clip at one bound": (lambda x: x.clip(0.5), values(0.5, 0.0, 1.0)),
    "clamp between equal bounds": (lambda x: x.clamp(0.5, 0.5), values(0.5, 0.0, 1.0)),
    "max_pool2d with ties": (lambda x: F.max_pool2d(x.reshape(1, 2, 2), 2), values(1.0, 1.0, 0.0, 1.0)),
    "clamp_": (in_place("clamp_", 0.0, 1.0), values(0.0, 1.0, -1.0)),
}


def fails(program, x):
    """Whether this PyTorch cannot do an operation itself, or not without data."""
    try:
        program(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            program(mode.from_tensor(x))
    except (IndexError, RuntimeError):
        return True
    return False


for name in ("split of nothing", "take_along_dim from the end"):
    if fails(*CASES[name]):  # before torch 2.10
        del CASES[name]


@pytest.mark.parametrize("name", AT_BOUNDS)
def test_an_operation_at_its_bounds_is_what_this_torch_makes_of_it(name):
    program, *inputs = AT_BOUNDS[name]
    assert_same(program, *inputs, calls=1)


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_right_with_the_rules_and_wrong_without(name):
    program, *inputs = CASES[name]
    with hookkit.use(without=RULES), pytest.raises((AssertionError, AttributeError, RuntimeError, TypeError)):
        assert_same(program, *inputs, calls=1)
    assert_same(program, *inputs, calls=1)


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_right_under_thunderfx(name):
    program, *inputs = CASES[name]
    torch._dynamo.reset()
    assert_same(program, *inputs, jit=thunderfx)


def test_the_gradient_of_bernoulli_is_zeros():
    x = values(0.0, 1.0)
    thunder.jit(lambda x: torch.bernoulli(x) * 2)(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["sigmoid", "relu", "clamp", "floor"])
def test_common_operations_stay_traced(name):
    args = (0.0, 1.0) if name == "clamp" else ()
    jitted = assert_same(lambda x: getattr(torch, name)(x, *args), values(-0.5, 0.25, 2.0))
    assert "opaque" not in str(hookkit.report(jitted))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.sigmoid(x, out=None),
        lambda x: torch.floor(x, out=None),
        lambda x: torch.max(x, dim=0, out=None)[0],
        lambda x: torch.max(x, axis=0)[0],
    ],
)
def test_an_operation_takes_all_the_keywords_that_it_has(program):
    assert_same(program, values(-0.5, 0.25, 2.0))


def test_an_autocast_around_an_earlier_call_is_over():
    """thunder 0.2.6 keeps it for every later compilation of the program."""

    def program(x):
        return x @ x

    jitted, x = thunder.jit(program), torch.rand(3, 3)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert jitted(x).dtype is torch.bfloat16
    assert jitted(x).dtype is torch.float32
    with torch.autocast("cpu", torch.float16):
        assert jitted(x).dtype is torch.float16
