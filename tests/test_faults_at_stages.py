"""Errors raised by the code of users, or injected, at each stage of a program's life, in each mode.

Errors arrive as they are, nothing of them stays behind, and the program that failed is right when it is called again,
as is another one that is compiled next. ``docs/reference/reliability.md`` has the table. What rules raise in conditions
and meta functions, and faults of hookkit's own, are in ``test_faults.py``.
"""

import contextlib
import gc
import os
import sys

import pytest
import thunder
import thunder.executors.passes
import torch
from agreement import assert_same, run
from test_faults import raises, state
from torch.autograd import Function

import hookkit
from hookkit.engine.opaque import opaque_calls
from hookkit.engine.trace import composite
from hookkit.engine.traced import compiled_region

pytestmark = pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
ERRORS = [ValueError, KeyboardInterrupt, MemoryError, RecursionError]
MODES = ["traced", "opaque", pytest.param("region", marks=pytest.mark.long)]


def fail(error):
    """Raise an error of a class; a RecursionError as programs do."""
    if error is RecursionError:
        fail(error)
    raise error("injected")


class Armed:
    """The stage at which the next error is raised, and its class."""

    stage = error = None

    @classmethod
    def pass_(cls, stage):
        if stage == cls.stage:
            fail(cls.error)


@contextlib.contextmanager
def armed(stage, error):
    Armed.stage, Armed.error = stage, error
    yield
    Armed.stage = Armed.error = None


@torch.library.custom_op("hookkit_faults::passed", mutates_args=())
def passed(x: torch.Tensor, stage: str) -> torch.Tensor:
    """An operation that can fail when it runs."""
    Armed.pass_(stage)
    return x.clone()


passed.register_fake(lambda x, stage: torch.empty_like(x))
passed.register_autograd(
    lambda ctx, grad: (passed(grad, "second derivative"), None), setup_context=lambda *_, **__: None
)


def new_function():
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            Armed.pass_("forward")
            if type(x) is torch.Tensor:
                Armed.pass_("forward on values")
            ctx.save_for_backward(x)
            return passed(x, "run").sin()

        @staticmethod
        def backward(ctx, grad):
            Armed.pass_("backward")
            (x,) = ctx.saved_tensors
            return 100 * grad * passed(x, "run of the backward") * x

    return Scaled


def runs_only():
    """A Function whose methods look at nothing: what they look at is guarded."""

    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return passed(x, "run").sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 100 * grad * passed(x, "run of the backward") * x

    return Scaled


def plain_function():
    """A Function that may be a region."""

    class Plain(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 100 * grad * x

    return Plain


def everything():
    """What nothing may stay in."""
    return state() | {
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "tracing context": torch._guards.TracingContext.try_get(),
        "fake mode": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        "transforms": torch._C._functorch.maybe_current_level(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "recursion limit": sys.getrecursionlimit(),
        "profile": (sys.getprofile(), sys.gettrace()),
        "collector": gc.isenabled(),
        "open files": len(os.listdir("/dev/fd")),
        "Dynamo": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "patches": [id(v) for h in (torch.Tensor, Function, torch.nn.functional, thunder) for v in vars(h).values()],
    }


def derivatives(program):
    """A program's output, gradient and second derivative."""
    x = torch.linspace(0.5, 2, 3, requires_grad=True)
    output = program(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output, gradient, *torch.autograd.grad(gradient.sum(), x)


def check_right(compiled, program):
    for found, expected in zip(derivatives(compiled), derivatives(program), strict=True):
        torch.testing.assert_close(found, expected)


def in_mode(mode):
    return contextlib.nullcontext() if mode == "traced" else hookkit.use(mode=mode)


@pytest.fixture(autouse=True, scope="module")
def warm():
    """What PyTorch makes once, when it is first used."""
    check_another(thunder.jit)
    check_another(thunder.dynamo.thunderfx)


def check_another(compiler):
    function, x = plain_function(), torch.linspace(0.5, 2, 3, requires_grad=True)
    assert_same(run(compiler(lambda x: function.apply(x) * 3), (x,)), run(lambda x: function.apply(x) * 3, (x,)))


STAGES = ["forward", "forward on values", "backward", "run", "run of the backward", "second derivative"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_function_raises_arrives_and_leaves_nothing(mode, stage):
    function = new_function()

    def program(x):
        return function.apply(x * 1) * 2

    with in_mode(mode):
        for error in ERRORS:
            before = everything()
            compiled = thunder.jit(program)
            with armed(stage, error), pytest.raises(error, match=r"injected|recursion") as caught:
                derivatives(compiled)
            assert type(caught.value) is error
            del caught
            assert everything() == before, error
        check_right(compiled, program)
        check_another(thunder.jit)


@pytest.mark.parametrize("stage", ["run", "run of the backward", "second derivative"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_later_run_raises_arrives_and_leaves_nothing(mode, stage):
    function = runs_only()

    def program(x):
        return function.apply(x * 1) * 2

    with in_mode(mode):
        compiled = thunder.jit(program)
        check_right(compiled, program)
        before = everything()
        for error in ERRORS:
            with armed(stage, error), pytest.raises(error, match=r"injected|recursion"):
                derivatives(compiled)
            assert everything() == before, error
            check_right(compiled, program)
        assert thunder.cache_misses(compiled) == 1


@pytest.mark.parametrize("stage", ["forward", "backward", "run", "run of the backward"])
def test_under_thunderfx_what_a_function_raises_arrives_and_leaves_nothing(stage):
    function = new_function()

    def program(x):
        return function.apply(x * 1) * 2

    def gradient(f):
        x = torch.linspace(0.5, 2, 3, requires_grad=True)
        return torch.autograd.grad(f(x).sum(), x)[0]

    for error in ERRORS:
        before = everything()
        compiled = thunder.dynamo.thunderfx(program)
        with armed(stage, error), pytest.raises(error, match=r"injected|recursion"):
            gradient(compiled)
        assert everything() == before, error
    torch.testing.assert_close(gradient(compiled), gradient(program))
    check_another(thunder.dynamo.thunderfx)


INSIDE = {
    "bound symbol": (composite, "bind", ["traced", "region"]),
    "gradient": (composite.Composite, "gradient_transform", ["traced"]),
    "gradient of an operator": (opaque_calls, "_gradient_transform", ["opaque"]),
    "executors": (thunder.executors.passes, "transform_for_execution", ["traced", "opaque", "region"]),
    "compilation of a region": (compiled_region.Region, "_differentiate", ["region"]),
}


@pytest.mark.parametrize(
    ("stage", "mode"), [(stage, mode) for stage, (_, _, modes) in INSIDE.items() for mode in modes]
)
def test_what_is_raised_inside_of_thunder_and_hookkit_arrives_and_leaves_nothing(stage, mode):
    holder, name, _ = INSIDE[stage]
    function = plain_function()

    def program(x):
        return function.apply(x * 1) * 2

    with in_mode(mode):
        for error in ERRORS:
            before = everything()
            compiled, injected = thunder.jit(program), error("injected")
            with raises(holder, name, injected), pytest.raises(BaseException, match="injected") as caught:
                derivatives(compiled)
            # thunder makes an InterpreterError of what is no fault of the program's
            assert injected in (caught.value, caught.value.__cause__)
            del caught, injected
            assert everything() == before, error
        check_right(compiled, program)
        check_another(thunder.jit)


def test_a_recursion_without_end_in_the_program_arrives_as_it_is():
    def endless(x):
        return endless(x + 1)

    before = everything()
    with pytest.raises(RecursionError) as caught:
        thunder.jit(endless)(torch.ones(3))
    assert "sys.setrecursionlimit" in "".join(caught.value.__notes__)
    del caught
    assert everything() == before
    check_another(thunder.jit)
