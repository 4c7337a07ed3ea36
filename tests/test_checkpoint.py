"""torch.utils.checkpoint and hookkit.recompute: as eager, with less memory and the same random numbers."""

import dataclasses
import functools
import inspect
import math

import numpy as np
import pytest
import thunder
import torch
from agreement import assert_agrees, assert_same, run, structure_of, tensors_of
from thunder.dynamo import thunderfx
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import hookkit
from hookkit.rules.checkpoint import checkpoint_rule

Function = torch.autograd.Function
recomputed = functools.partial(checkpoint, use_reentrant=False)
# An option of checkpoint from torch 2.9 on; before that it is an argument of the function like any other.
EARLY_STOP = {"early_stop": False} if "early_stop" in inspect.signature(checkpoint).parameters else {}


def matrix(n=4, seed=0):
    """A square matrix that requires grad."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, n, generator=generator, dtype=torch.float64).requires_grad_()


def body(x):
    """Several operations each of which keeps something for its backward."""
    return torch.sin(torch.exp(torch.tanh(x))) * x


class Traced(Function):
    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x)
        ctx.save_for_backward(e, x.cos())
        return e * x.sin()

    @staticmethod
    def backward(ctx, grad):
        e, c = ctx.saved_tensors
        return 100 * grad * e * c


class Opaque(Function):
    @staticmethod
    def forward(ctx, x):
        e = torch.from_numpy(x.detach().numpy() * 2)
        ctx.save_for_backward(e)
        return e * x

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]


opaque = pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")


def kept(jitted):
    """How many bytes the compiled forward returns for the backward, and how many other values but None."""
    if hasattr(jitted, "_backend"):
        (jitted,) = [f for info in jitted._backend.subgraph_infos for f in info.thunder_compiled_fns]
    tensors, others = thunder.last_traces(jitted)[-1].bound_symbols[-1].args[1]
    unique = {t.name: t for t in tensors}.values()
    return sum(math.prod(t.shape) * t.dtype.bytes for t in unique), sum(isinstance(o, thunder.Proxy) for o in others)


COMPILERS = pytest.mark.parametrize("compile", [thunder.jit, thunderfx], ids=["jit", "thunderfx"])

PROGRAMS = {
    "an input": (lambda x: recomputed(body, x) * 2, lambda x: body(x) * 2),
    "an intermediate": (lambda x: recomputed(body, x.cos()).sin(), lambda x: body(x.cos()).sin()),
    "nested": (lambda x: recomputed(lambda y: recomputed(body, y.sin()).cos(), x), lambda x: body(x.sin()).cos()),
    "a part": (lambda x: body(recomputed(body, x)), lambda x: body(body(x))),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo forgets what it compiled."""
    torch._dynamo.reset()


@COMPILERS
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_eager_and_less_is_kept(name, compile):
    program, plain = PROGRAMS[name]
    jitted, without = compile(program), compile(plain)
    assert_same(run(jitted, (matrix(),)), run(program, (matrix(),)))
    run(without, (matrix(),))
    assert kept(jitted)[0] < kept(without)[0]


def test_of_one_checkpoint_the_arguments_alone_are_kept():
    jitted = thunder.jit(lambda x: recomputed(body, x))
    run(jitted, (matrix(),))
    assert kept(jitted) == (4 * 4 * 8, 0)


@pytest.mark.parametrize(
    "function", [lambda x: Traced.apply(x.exp()).sin(), Traced.apply], ids=["among others", "alone"]
)
def test_a_traced_function_inside_keeps_nothing(function):
    jitted = assert_agrees(lambda x: recomputed(function, x), matrix())
    assert kept(jitted)[0] == 4 * 4 * 8
    assert all(call.outcome == "traced" for call in hookkit.report(jitted).calls)


@opaque
def test_an_opaque_function_inside_keeps_nothing():
    jitted = assert_agrees(lambda x: recomputed(lambda y: Opaque.apply(y.exp()).sin(), x), matrix())
    size, others = kept(jitted)
    assert size == 4 * 4 * 8
    assert others == 2  # the states of the generators: before the checkpoint, if it drew from them, and at the start


@opaque
@pytest.mark.parametrize("function", [Traced, Opaque], ids=["traced", "opaque"])
def test_functions_inside_are_those_of_eager_under_thunderfx(function):
    program = lambda x: recomputed(lambda y: function.apply(y.exp()).sin(), x)  # noqa: E731
    assert_same(run(thunderfx(program), (matrix(),)), run(program, (matrix(),)))


class Block(torch.nn.Module):
    """Two layers, checkpointed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)

    def inner(self, x, *, scale):
        return self.down(torch.tanh(self.up(x))) * scale

    def forward(self, x):
        return recomputed(self.inner, x, scale=2.0)


@COMPILERS
def test_parameters_inside_get_their_gradients(compile):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compile(model)(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_has_the_same_mask_again(preserve):
    def drop(x):
        return torch.nn.functional.dropout(x.exp(), 0.5).exp()

    jitted = thunder.jit(lambda x: recomputed(drop, x, preserve_rng_state=preserve))
    x = torch.zeros(64, requires_grad=True)
    y = jitted(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.where(y > 2, 2 * y, 0).detach())
    assert 0 < (gradient == 0).sum() < 64


F = torch.nn.functional
# Linear in x, with random factors.
RANDOM = {
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)) * x,
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.reshape(1, 16, 2, 2), 0.5).reshape(16, 4),
    "exponential_": lambda x: torch.empty(16, 4).exponential_() * x,
    "normal": lambda x: torch.normal(torch.zeros(16, 4), 1.0) * x,
    "rand_like": lambda x: torch.rand_like(x) * x,
    "randn": lambda x: torch.randn(16, 4) * x,
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_the_backward_sees_the_numbers_that_the_forward_drew(name, checkpointed):
    draw = RANDOM[name]
    jitted = thunder.jit((lambda x: recomputed(draw, x * 2)) if checkpointed else (lambda x: draw(x * 2)))
    x = torch.randn(16, 4, requires_grad=True)
    y = jitted(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)


def test_of_dropout_less_than_without_checkpoint_is_kept():
    def drop(x):
        return torch.nn.functional.dropout(torch.exp(torch.sin(x)), 0.5).exp() * x

    jitted, without = thunder.jit(lambda x: recomputed(drop, x)), thunder.jit(drop)
    for compiled in (jitted, without):
        run(compiled, (matrix(),))
    assert kept(jitted)[0] < kept(without)[0]


class OpaqueDropout(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.5).to(x.dtype) * torch.from_numpy(np.ones(64, np.float32))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]


@torch.library.custom_op("hookkit_checkpoint::dropout", mutates_args=())
def dropout_operator(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask is no function of the arguments."""
    mask = (torch.rand_like(x) > 0.5).to(x.dtype)
    return x * mask, mask


dropout_operator.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
dropout_operator.register_autograd(
    lambda ctx, grad, _: 100 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@opaque
@pytest.mark.parametrize("apply", [OpaqueDropout.apply, lambda x: dropout_operator(x)[0]], ids=["Function", "operator"])
def test_what_pytorch_runs_draws_the_same_numbers_again_as_often_as_it_is_asked(apply):
    jitted = thunder.jit(lambda x: recomputed(lambda y: apply(y * 2) * 3, x))
    x = torch.ones(64, requires_grad=True)
    y = jitted(x)
    state = torch.get_rng_state()
    for keep in (True, False):
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=keep)
        torch.testing.assert_close(gradient, 100 * y.detach())
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < (y == 0).sum() < 64


# ------------------------------------------------------------------------------------------------------- forms of calls


def scaled(x, k, *, w=None, name="double"):
    """Arguments of all kinds."""
    y = x * k if name == "double" else x
    return (y if w is None else y * w).sin(), {"k": k, "y": y.exp()}


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: recomputed(scaled, x, 3, name="double"),
        lambda x, w: recomputed(scaled, x, k=3, w=w),
        lambda x, w: recomputed(functools.partial(scaled, k=2), x, w=w, name="single"),
        lambda x, w: recomputed(lambda y: body(y) * w, x),
        lambda x, w: recomputed(lambda y: (y[0] + y[1]["w"]).exp(), [x, {"w": w}]),
        lambda x, w: recomputed(lambda y: (y * 2).add_(w).mul_(y), x),
        lambda x, w: recomputed(lambda y: y, x) * w,
        lambda x, w: recomputed(body, x.detach()) * w,
        lambda x, w: [recomputed(body, x * i) * w for i in range(3)],
        lambda x, w: hookkit.recompute(scaled, x, 3, w=w),
        lambda x, w: recomputed(body, x, determinism_check="none", debug=False, **EARLY_STOP) * w,
        lambda x, w: (
            checkpoint_sequential([torch.sin, torch.exp, torch.tanh, torch.cos], 2, x, use_reentrant=False) * w
        ),
        lambda x, w: recomputed(lambda y: torch.fft.fft(y.exp()).abs(), x) * w,
    ],
)
def test_a_call_is_as_in_eager(program):
    assert_agrees(program, matrix(), matrix(seed=1))


def test_what_leaves_the_function_otherwise_than_by_its_result_is_differentiated():
    def program(x):
        h = None

        def inside(y):
            nonlocal h
            h = y.exp()
            return h.sin()

        return recomputed(inside, x) * h

    assert_agrees(program, matrix())


def test_running_statistics_are_updated_once():
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x):
            return recomputed(self.norm, x)

    x, module, plain = torch.randn(8, 4), Normalised(), torch.nn.BatchNorm1d(4)
    plain(x)
    thunder.jit(module)(x).sum().backward()
    torch.testing.assert_close(module.norm.running_mean, plain.running_mean)


def test_a_global_switch_of_early_stop_changes_nothing():
    def program(x):
        with set_checkpoint_early_stop(False):
            return recomputed(body, x)

    assert_agrees(program, matrix())


def test_in_the_forward_of_a_function_nothing_is_to_be_kept_anyway():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return recomputed(body, x)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.saved_tensors[0]

    assert_agrees(lambda x: Outer.apply(x * 2), matrix())


def test_without_grad_mode_it_is_a_plain_call():
    def program(x):
        with torch.no_grad():
            return recomputed(body, x), x * 2

    assert_agrees(program, matrix())


def test_an_exception_inside_is_the_programs_own():
    def fails(x):
        raise KeyError("mine")

    def caught(x):
        try:
            return recomputed(fails, x)
        except KeyError:
            return x * 2

    with pytest.raises(KeyError, match="mine"):
        thunder.jit(lambda x: recomputed(fails, x))(matrix())
    assert_agrees(caught, matrix())


def test_the_report_says_that_thunder_differentiates_what_is_inside():
    jitted = thunder.jit(lambda x: recomputed(body, x))
    run(jitted, (matrix(),))
    (call,) = hookkit.report(jitted).calls
    assert (call.rule, call.outcome, call.backward_operations) == ("checkpoint_rule", "traced", None)


def test_without_the_rule_thunder_has_its_own_way():
    with hookkit.use(without=[checkpoint_rule]):
        jitted = assert_agrees(lambda x: recomputed(body, x), matrix())
        assert not hookkit.report(jitted).calls


# ------------------------------------------------------------------------------------------------------ use_reentrant


@COMPILERS
@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: checkpoint(body, x * 1, use_reentrant=True) * w,
        lambda x, w: checkpoint(lambda y, v: body(y) * v, x * 1, w, use_reentrant=True),
        lambda x, w: checkpoint_sequential([torch.sin, torch.exp, torch.tanh, torch.cos], 2, x * 1, use_reentrant=True),
    ],
)
def test_the_reentrant_form_has_the_same_gradients(program, compile):
    inputs = matrix(), matrix(seed=1)
    assert_same(run(compile(program), inputs), run(program, inputs))


def test_the_reentrant_form_keeps_less():
    jitted, without = thunder.jit(lambda x: checkpoint(body, x, use_reentrant=True)), thunder.jit(body)
    run(jitted, (matrix(),)), run(without, (matrix(),))
    assert kept(jitted)[0] < kept(without)[0]


def test_the_reentrant_form_has_no_gradient_if_no_argument_requires_one():
    def program(x, w):
        return checkpoint(lambda y: y * w, x, use_reentrant=True)

    x = matrix().detach()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        expected = program(x, matrix(seed=1))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        output = thunder.jit(program)(x, matrix(seed=1))
    assert not expected.requires_grad
    assert not output.requires_grad
    torch.testing.assert_close(output, expected)


def test_the_reentrant_form_takes_nested_tensors_for_no_arguments():
    def program(x, w):
        return checkpoint(lambda ys: ys[0] * 2, [x], use_reentrant=True) * w

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert_agrees(program, matrix(), matrix(seed=1))


def test_by_default_it_is_the_reentrant_form_and_says_so():
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        output = thunder.jit(lambda x: checkpoint(lambda t: body(t), x))(matrix())
    torch.testing.assert_close(output, body(matrix()))


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True, "k": 2},
        {"use_reentrant": True, "debug": True},
        {"use_reentrant": False, "determinism_check": "strict"},
    ],
)
def test_arguments_that_torch_refuses_are_refused_in_its_words(options):
    program = lambda x: checkpoint(lambda y, **_: body(y), x, **options)  # noqa: E731
    with pytest.raises(ValueError) as expected:
        program(matrix())
    with pytest.raises(ValueError) as error:
        thunder.jit(program)(matrix())
    # Which options a sentence lists has changed with torch; how it begins has not.
    assert str(error.value)[:20] == str(expected.value)[:20]


def test_a_context_function_is_refused():
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with pytest.raises(hookkit.HookError, match=r"context_fn is not supported.*hookkit\.recompute"):
        thunder.jit(lambda x: recomputed(body, x, context_fn=contexts))(matrix())


def test_outside_of_a_compiled_program_recompute_is_torchs_checkpoint():
    runs = []

    def counted(x):
        runs.append(1)
        return body(x)

    x = matrix()
    hookkit.recompute(counted, x).sum().backward()
    assert len(runs) == 2


@dataclasses.dataclass
class Outputs:
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "part",
    [
        lambda x: Outputs(x.sin(), x.cos()),
        lambda x: [x.sin(), x.cos()],
        lambda x: {"first": x.sin(), "second": (x.cos(), 3)},
        lambda x: (x.sin(), [x.cos()]),
    ],
)
def test_tensors_in_a_container_that_a_reentrant_checkpoint_returns_do_not_require_grad(part):
    def program(x):
        output = checkpoint(part, x * 1, use_reentrant=True)
        return (output.first, output.second) if isinstance(output, Outputs) else output, x * 2

    found = []
    for run_it in (program, thunder.jit(program)):  # not by torch.autograd.grad, which such a checkpoint refuses
        x = matrix()
        output = run_it(x)
        sum(t.cos().sum() for t in tensors_of(output) if t.requires_grad).backward()
        found.append((structure_of(output), x.grad))
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1])
