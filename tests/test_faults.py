"""An exception at each stage of the engine: how it reaches the user, and that nothing of it stays behind.

What users write raises through the front door. Faults of hookkit's own are injected: the code of a function of the
engine is replaced by code that raises.
"""

import contextlib
import random
import sys
import types

import pytest
import thunder
import torch
from agreement import assert_agrees
from torch.autograd import Function

import hookkit
from hookkit.engine.dispatch import takeover
from hookkit.engine.interpreter import cache_guards, call_log
from hookkit.engine.opaque import metadata, opaque_calls, tried_out
from hookkit.engine.pytorch import graph_run
from hookkit.engine.trace import composite, functionalize
from hookkit.engine.traced import replay, traced_call
from hookkit.engine.values import binding, wrapping
from hookkit.registry import Registry

E = type("Injected", (Exception,), {})
CONTEXT_VARIABLES = [
    takeover._running,
    call_log._running,
    call_log._all_wanted,
    cache_guards._program,
    sys.modules["hookkit.registry"]._scope,
    thunder.core.compile_data._compile_data,
    thunder.core.trace._tracectx,
    thunder.core.jit_ext._jit_ctx,
    thunder.core.interpreter._interpreterruntimectx,
]


def state():
    """What a failed compilation must leave as it was."""
    return {
        "context": [v.get(None) for v in CONTEXT_VARIABLES],
        "rules": hookkit.rules(),
        "executors": sorted(map(str, thunder.get_all_executors())),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": torch.overrides._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "random": (random.getstate(), torch.random.get_rng_state().tolist()),
        "log": tried_out._fake_tensor_log.disabled,
    }


@contextlib.contextmanager
def nothing_stays():
    before = state()
    yield
    assert state() == before
    x = torch.linspace(0.5, 2, 3, requires_grad=True)
    function, opaque_one = new_function(), new_function()
    rule = hookkit.rule(opaque_one, mode="opaque", register=False)
    with hookkit.use(rule):
        assert_agrees(lambda x: opaque_one.apply(function.apply(x) * 2), x)
    assert state() == before


def new_function():
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 100 * grad * x

    return Scaled


def vector():
    return torch.linspace(0.5, 2, 3, requires_grad=True)


# ------------------------------------------------------------------------------------------------- what users write

ERRORS = [ValueError("injected"), KeyboardInterrupt("injected")]


def raising(error):
    def provider(*args, **kwargs):
        raise error

    return provider


def staged(stage, error):
    """A program whose Function, or whose rule, raises at a stage."""

    def target(x):
        return x.sin()

    def forward(x):
        if stage == "forward":
            raise error
        return x.sin(), hookkit.save(x=x)

    def backward(saved, grad):
        if stage == "backward":
            raise error
        return {"x": 100 * grad * saved.x}

    wanted = hookkit.where(raising(error)) if stage == "predicate" else target
    return target, forward, backward, wanted


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("mode", ["auto", "opaque"])
@pytest.mark.parametrize("stage", ["forward", "backward", "when", "predicate", "meta"])
def test_what_a_rule_raises_reaches_the_user(stage, mode, error):
    target, forward, backward, wanted = staged(stage, error)
    rule = hookkit.rule(wanted, mode=mode, register=False, name="the_rule")(forward)
    rule.backward(backward)
    if stage in ("when", "meta"):
        getattr(rule, stage)(raising(error))
    if stage == "meta" and mode != "opaque":
        with hookkit.use(rule):
            assert_agrees(lambda x: target(x), vector(), eager=lambda x: new_function().apply(x))
        return
    refused = stage in ("when", "predicate", "meta") and isinstance(error, Exception)
    expected = hookkit.HookError if refused else type(error)
    with nothing_stays(), hookkit.use(rule), pytest.raises(expected, match="injected") as caught:
        thunder.jit(lambda x: target(x))(vector()).sum().backward()
    if refused:
        assert "raised ValueError: injected" in str(caught.value) and caught.value.__cause__ is error
    else:
        assert caught.value is error


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("mode", ["auto", "opaque"])
@pytest.mark.parametrize("stage", ["forward", "setup_context", "backward"])
def test_what_a_function_raises_reaches_the_user(stage, mode, error):
    class Fails(Function):
        @staticmethod
        def forward(x):
            if stage == "forward":
                raise error
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            if stage == "setup_context":
                raise error
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            if stage == "backward":
                raise error
            return grad

    rule = hookkit.rule(Fails, mode="opaque", register=False)
    in_force = hookkit.use(rule) if mode == "opaque" else contextlib.nullcontext()
    with nothing_stays(), in_force, pytest.raises(type(error), match="injected") as caught:
        thunder.jit(lambda x: Fails.apply(x) * 2)(vector()).sum().backward()
    assert caught.value is error


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_what_an_opaque_call_raises_when_it_runs_reaches_the_user(error):
    class Fails(Function):
        @staticmethod
        def forward(ctx, x):
            if not isinstance(x, torch._subclasses.FakeTensor) and x.max() > 1000:
                raise error
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    rule = hookkit.rule(Fails, mode="opaque", register=False)
    with hookkit.use(rule):
        jitted = thunder.jit(lambda x: Fails.apply(x) * 2)
        jitted(vector()).sum().backward()
        with nothing_stays(), pytest.raises(type(error), match="injected") as caught:
            jitted(vector() * 10000)
        assert caught.value is error
        x = vector()
        jitted(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 200.0))


# ------------------------------------------------------------------------------------------ faults of hookkit itself

STAGES = {
    "match": [(Registry, "matching"), (Registry, "candidates")],
    "unwrap": [(takeover, "unwrap_arguments"), (binding.Bound, "of")],
    "forward": [(traced_call, "trace_call")],
    "residuals": [(traced_call, "_split")],
    "backward": [(traced_call, "_run_backward"), (traced_call, "_fit")],
    "symbol": [
        (composite, "symbol_name"),
        (composite, "make_symbol"),
        (composite, "bind"),
        (functionalize, "functionalise"),
    ],
    "meta": [(opaque_calls, "find_metadata")],
    "replay": [(replay, "key_of"), (replay, "remember")],
    "wrap": [(wrapping, "wrap_result")],
    "gradient": [(composite.Composite, "gradient_transform"), (opaque_calls, "_gradient_transform")],
}


@contextlib.contextmanager
def raises(holder, name, error):
    """Has a function, wherever its name was imported to, raise the first time that it is called."""
    found = holder.__dict__[name]
    function = getattr(found, "__func__", found)
    original = function.__code__

    def fault(*args, **kwargs):
        import test_faults

        test_faults.ARMED.pop()()

    def fire():
        function.__code__ = original
        raise error

    ARMED.append(fire)
    function.__code__ = fault.__code__.replace(co_flags=original.co_flags & 0x20 | fault.__code__.co_flags)
    try:
        yield
    finally:
        function.__code__ = original
        ARMED.clear()


ARMED: list[types.FunctionType] = []


# Before it is known which rule takes a call, and after the program has been interpreted.
OUTSIDE_OF_A_CALL = {"matching", "candidates", "unwrap_arguments", "of", "gradient_transform"}
FAULTS = [(holder, name, E("injected")) for functions in STAGES.values() for holder, name in functions]
FAULTS += [
    (holder, name, KeyboardInterrupt("injected")) for functions in STAGES.values() for holder, name in functions[:1]
]


@pytest.mark.parametrize(
    ("holder", "name", "error"), FAULTS, ids=[f"{h.__name__}.{n}-{type(e).__name__}" for h, n, e in FAULTS]
)
def test_a_fault_of_the_engine_reaches_the_user_and_leaves_nothing(holder, name, error):
    function, opaque_one = new_function(), new_function()
    rule = hookkit.rule(opaque_one, mode="opaque", register=False)

    def program(x):
        return opaque_one.apply(function.apply(x) * 2)

    with nothing_stays(), hookkit.use(rule):
        with raises(holder, name, error), pytest.raises(BaseException, match="injected") as caught:
            thunder.jit(program)(vector())
        chain = [caught.value]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        assert error in chain
        noted = any("a fault of hookkit's" in note and "Scaled()" in note for note in getattr(error, "__notes__", ()))
        assert noted == (name not in OUTSIDE_OF_A_CALL and isinstance(error, E))
        if isinstance(error, KeyboardInterrupt):
            assert caught.value is error
        assert_agrees(program, vector())


@pytest.mark.parametrize(
    ("holder", "name"),
    [(graph_run, "run_eagerly"), (metadata, "probe"), (metadata, "_can_go_directly")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_fault_while_an_opaque_call_is_tried_out_is_said(holder, name):
    function = new_function()
    rule = hookkit.rule(function, mode="opaque", register=False)
    said = pytest.warns(hookkit.MetaWarning, match="raised Injected")
    with nothing_stays(), hookkit.use(rule), raises(holder, name, E("injected")), said:
        assert_agrees(function.apply, vector())
