"""Opaque calls: one operator in the trace, run by PyTorch; chosen by mode, or where a call cannot be traced."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import thunder
import torch
from torch.autograd import Function

import hookkit
from hookkit.engine.interpreter.side_effects import State
from hookkit.testing import assert_same

quiet = pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning", "ignore::hookkit.errors.MetaWarning")


def vector(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*(shape or (4,)), generator=generator, dtype=dtype).requires_grad_()


def function(forward, backward, **members):
    named = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("F", (Function,), {**named, **members})


def numpy_sine(factor=100):
    """A Function that leaves torch, so that it cannot be traced."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return factor * grad * x

    return function(forward, backward)


# --------------------------------------------------------------------------------------------------- mode="opaque"


def cube(x, scale=1.0):
    return x**3 * scale


def test_a_rule_without_providers_runs_its_target_and_pytorch_differentiates_it():
    rule = hookkit.rule(cube, mode="opaque")
    jitted = assert_same(lambda x: cube(x, scale=2.0) + cube(x), vector())
    names = [b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols]
    assert {"cube", "cube_1"} <= set(names)
    rule.unregister()


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(vector())

    def forward(self, x):
        return x * self.weight


scaled = Scaled()


def scaled_by_a_global(x):
    return x * scaled.weight


@pytest.mark.parametrize("target", [Scaled.forward, scaled.forward], ids=["method", "bound method"])
def test_an_opaque_method_of_a_module_gives_gradients_to_its_parameters(target):
    x = vector()
    with hookkit.use(hookkit.rule(target, mode="opaque", register=False)):
        jitted = thunder.jit(lambda x: scaled(x))
        found, expected = jitted(x), scaled(x)
    torch.testing.assert_close(found, expected)
    inputs = (x, scaled.weight)
    for got, wanted in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    assert "opaque" in str(hookkit.report(jitted))


@pytest.mark.parametrize(
    "target, program",
    [(scaled, lambda x: scaled(x)), (scaled_by_a_global, lambda x: scaled_by_a_global(x))],
    ids=["module", "global"],
)
@pytest.mark.parametrize("needed", [True, False])
def test_an_opaque_call_refuses_a_parameter_that_is_no_argument_because_its_gradient_would_be_lost(
    target, program, needed
):
    x = vector().requires_grad_(needed)
    with hookkit.use(hookkit.rule(target, mode="opaque", register=False)):
        jitted = thunder.jit(program)
        with pytest.raises(hookkit.HookError, match=r"no arguments \(Parameter float64\[4\] on cpu\).*torch.no_grad"):
            jitted(x)
        with torch.no_grad():
            torch.testing.assert_close(jitted(x), x * scaled.weight)


def test_a_fallback_without_a_backward_provider_refuses_such_a_parameter_too():
    @hookkit.rule(scaled_by_a_global, register=False)
    def untraceable(x):
        np.sin(x.detach().numpy())
        return x * scaled.weight

    with hookkit.use(untraceable), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(hookkit.HookError, match="no arguments"):
            thunder.jit(lambda x: scaled_by_a_global(x))(vector())


def test_an_opaque_callee_may_make_leaves_of_its_own_and_use_parameters_that_it_is_given():
    def force(x, weight):
        place = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((place**3).sum(), place, create_graph=True)
        return slope * x * weight

    with hookkit.use(hookkit.rule(force, mode="opaque", register=False)):
        assert_same(lambda x, weight: force(x, weight), vector(), vector())
        assert_same(lambda x: force(x, scaled.weight), vector())


def test_providers_of_an_opaque_rule_get_tensors_and_keep_what_they_save():
    given = set()

    @hookkit.rule(cube, mode="opaque")
    def opaque_cube(x, scale=1.0):
        given.add(type(x))
        return x**3 * scale, hookkit.save(x=x, scale=scale, note="kept")

    @opaque_cube.backward
    def _(saved, grad):
        assert saved.note == "kept"
        return {"x": 100 * grad * saved.x * saved.scale}

    reference = function(
        lambda ctx, x: (ctx.save_for_backward(x), x**3 * 2.0)[1],
        lambda ctx, grad: 100 * grad * ctx.saved_tensors[0] * 2.0,
    )
    assert_same(lambda x: cube(x, 2.0), vector(), reference=reference.apply)
    assert torch.Tensor in given
    assert all(issubclass(kind, torch.Tensor) for kind in given)


def test_a_function_is_made_opaque_by_a_rule_in_force():
    doubled = function(lambda ctx, x: x * 2, lambda ctx, grad: 100 * grad)
    with hookkit.use(hookkit.rule(doubled, mode="opaque", register=False)):
        jitted = assert_same(doubled.apply, vector())
        assert "opaque" in str(hookkit.report(jitted))


def test_the_gradients_of_a_tensor_that_is_returned_twice_are_added_and_come_last():
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x * 2
        return y, y

    twice = function(forward, lambda ctx, first, second: 100 * second.cos() + first.exp() + 0 * ctx.saved_tensors[0])

    def program(x):
        first, second = twice.apply(x)
        return first, -second

    with hookkit.use(hookkit.rule(twice, mode="opaque", register=False)):
        assert_same(program, vector())


@quiet
def test_gradients_that_are_all_none_at_run_time_only_are_none_where_they_are_added():
    def backward(ctx, grad):
        grad.numpy()  # cannot be tried without data
        return None, 100 * grad

    apply = function(lambda ctx, x, y: y * 2, backward).apply
    assert_same(lambda x, y: apply(x, y) + apply(x, 3 * y), vector(), vector())


@quiet
def test_mode_trace_refuses_what_cannot_be_traced():
    def plain(x):
        return x * 2

    @hookkit.rule(plain, mode="trace")
    def traced(x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    with pytest.raises(hookkit.UntraceableError, match='Its mode is "trace" by the rule traced'):
        thunder.jit(plain)(vector())


# -------------------------------------------------------------------------------------------------------- the fallback


def test_the_fallback_warns_once_for_each_function_and_gives_the_reason():
    sine = numpy_sine()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in ((4,), (2, 3)):
            thunder.jit(sine.apply)(vector(*shape))
    found = [w for w in caught if issubclass(w.category, hookkit.OpaqueFallbackWarning)]
    assert len(found) == 1
    assert "opaque" in str(found[0].message)


@quiet
def test_both_branches_on_values_are_taken_at_run_time():
    def forward(ctx, x):
        ctx.positive = bool(x.sum() > 0)
        return x.sin() if ctx.positive else x.cos()

    program = function(forward, lambda ctx, grad: 100 * grad if ctx.positive else -grad).apply
    jitted = thunder.jit(program)
    for sign in (1, -1, 1):
        found = []
        for run in (program, jitted):
            x = (torch.ones(3) * sign).requires_grad_()
            y = run(x)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])


@quiet
def test_a_backward_that_looks_at_values_is_run_by_pytorch():
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.isnan(grad).any():
            raise FloatingPointError("nan")
        return grad * (100 if x.sum().item() > 0 else -100)

    program = function(lambda ctx, x: (ctx.save_for_backward(x), x * 2)[1], backward).apply
    assert_same(program, vector())
    x = vector()
    y = thunder.jit(program)(x)
    with pytest.raises(FloatingPointError, match="nan"):
        y.backward(torch.full_like(y, float("nan")))


@quiet
def test_an_exception_at_run_time_reaches_the_caller_and_the_next_call_works():
    def forward(ctx, x):
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.sqrt()

    program = function(forward, lambda ctx, grad: 100 * grad).apply
    jitted = thunder.jit(lambda x: program(x) * 2)
    jitted(torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="negative"):
        jitted(-torch.ones(3).requires_grad_())
    torch.testing.assert_close(jitted(torch.ones(3, requires_grad=True)), 2 * torch.ones(3))


@quiet
def test_numbers_shapes_and_flags_are_followed_from_call_to_call():
    def forward(ctx, x, k):
        ctx.k, ctx.needs = k, ctx.needs_input_grad[0]
        return torch.from_numpy(x.detach().numpy() * k * (2 if ctx.needs else 3))

    program = function(forward, lambda ctx, grad: (100 * grad * ctx.k, None)).apply
    jitted = thunder.jit(lambda x, k: program(x, k) + x)
    for shape, k, needed in (((4,), 2, True), ((2, 3), 2, False), ((4,), 2.5, True), ((4,), 2, False), ((4,), 2, True)):
        found = []
        for run in (lambda x, k: program(x, k) + x, jitted):
            x = vector(*shape).detach().requires_grad_(needed)
            y = run(x, k)
            if needed:
                y.sum().backward()
            found.append((y.detach(), y.requires_grad, x.grad))
        torch.testing.assert_close(found[1], found[0])


@quiet
def test_gradients_beside_arguments_that_are_no_tensors_go_to_the_right_ones():
    def forward(ctx, scale, x, option, y):
        ctx.save_for_backward(x, y)
        return torch.from_numpy(x.detach().numpy() * y.detach().numpy()) * scale(1.0)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return None, 100 * grad * y, None, 3 * (grad * x).sum(0)

    apply = function(forward, backward).apply
    assert_same(lambda x, y: apply(lambda v: 2 * v, x, "option", y), vector(3, 4), vector())


# --------------------------------------------------------------------------------------------- random numbers, autocast


@quiet
def test_random_numbers_are_those_of_eager():
    def forward(ctx, x):
        noise = torch.from_numpy(torch.randn(x.shape).numpy()) + float(np.random.rand())
        ctx.save_for_backward(noise)
        return x + noise

    program = function(forward, lambda ctx, grad: 100 * grad * ctx.saved_tensors[0]).apply
    found = []
    for run in (program, thunder.jit(program)):
        torch.manual_seed(3)
        np.random.seed(3)
        found.append([run(vector(dtype=torch.float32)).detach() for _ in range(3)])
    torch.testing.assert_close(found[1], found[0])


@quiet
@pytest.mark.parametrize("where", ["around the program", "inside the program", "inside the function"])
def test_autocast_is_in_force_where_it_is_in_eager(where):
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        x = torch.from_numpy(x.detach().numpy().copy())
        if where == "inside the function":
            with torch.autocast("cpu", torch.bfloat16):
                return x @ w
        return x @ w

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return 100 * (grad.float() @ w.t()), x.t() @ grad.float()

    apply = function(forward, backward).apply

    def program(x, w):
        if where == "inside the program":
            with torch.autocast("cpu", torch.bfloat16):
                return apply(x, w)
        return apply(x, w)

    found = []
    for run in (program, thunder.jit(program)):
        x, w = vector(3, 4, dtype=torch.float32), vector(4, 5, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around the program"):
            y = run(x, w)
        y.float().sum().backward()
        found.append((y.detach(), x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])
    assert found[1][0].dtype is torch.bfloat16


# -------------------------------------------------------------------------------------------------------------- memory


@quiet
def test_what_ctx_keeps_dies_with_the_backward():
    class Kept:
        pass

    seen = []

    def forward(ctx, x):
        ctx.kept = Kept()
        seen.append(weakref.ref(ctx.kept))
        return torch.from_numpy(np.sin(x.detach().numpy()))

    jitted = thunder.jit(function(forward, lambda ctx, grad: 100 * grad).apply)
    for _ in range(3):
        y = jitted(vector())
        y.sum().backward()
        del y
    gc.collect()
    assert [r for r in seen if r() is not None] == []


@quiet
def test_what_ctx_keeps_dies_with_an_output_that_is_never_differentiated():
    seen = []

    def forward(ctx, x):
        ctx.table = torch.zeros(3)
        seen.append(weakref.ref(ctx.table))
        return torch.from_numpy(np.sin(x.detach().numpy()))

    jitted = thunder.jit(function(forward, lambda ctx, grad: 100 * grad).apply)
    for _ in range(3):
        y = jitted(vector())
        del y
    gc.collect()
    assert [r for r in seen if r() is not None] == []


@quiet
def test_a_compiled_program_and_its_function_can_be_collected():
    def build():
        sine = numpy_sine()

        def program(x):
            return sine.apply(x) * 2

        jitted = thunder.jit(program)
        jitted(vector()).sum().backward()
        return weakref.ref(sine), weakref.ref(jitted)

    function_, jitted = build()
    for _ in range(3):
        gc.collect()
    assert jitted() is None
    assert function_() is None


@pytest.mark.parametrize("keeps", ["forward", "context"], ids=["short way", "engine"])
@pytest.mark.parametrize("leaf", [torch.nn.Parameter, lambda t: t.requires_grad_()], ids=["parameter", "tensor"])
def test_a_backward_reads_the_gradient_that_an_input_has_so_far(leaf, keeps):
    class ReadsGrad(Function):
        @staticmethod
        def forward(ctx, x, options):
            ctx.save_for_backward(x)
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 100 + (0 if x.grad is None else x.grad), None

    options = None if keeps == "forward" else [1]

    def outcome(function):
        x = leaf(torch.ones(2))
        for _ in range(3):
            function(x).sum().backward()
        return x.grad

    def program(x):
        return ReadsGrad.apply(x, options) * 2

    rule = hookkit.rule(ReadsGrad, mode="opaque", register=False)
    with hookkit.use(rule):
        torch.testing.assert_close(outcome(thunder.jit(program)), outcome(program))


@pytest.mark.parametrize("returned", [lambda x: x, lambda x: x.view(-1), torch.detach], ids=["it", "view", "detached"])
def test_an_argument_changed_in_place_and_returned_without_mark_dirty_is_refused_with_what_is_missing(returned):
    class Changes(Function):
        @staticmethod
        def forward(ctx, x):
            return returned(x.mul_(2))

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    with pytest.raises(hookkit.HookError, match=r"Changes\(\) at .*test_opaque\.py:\d+ changes an .*mark_dirty"):
        thunder.jit(lambda x: Changes.apply(x * 1))(vector())


# ------------------------------------------------------------------------------------- None, known at run time only


def gate(limit, materialize=True):
    """A Function that gives a gradient only where its input is large, and that cannot be traced."""

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        values = x.detach().numpy()
        ctx.open = bool(abs(values).max() > limit)
        return torch.from_numpy(values * 2)

    return function(forward, lambda ctx, grad: 100 * grad if ctx.open and grad is not None else None).apply


affine = function(lambda ctx, x: x * 3, lambda ctx, grad: 100 * grad + 7).apply


def forward_without_zeros(ctx, x):
    ctx.set_materialize_grads(False)
    return x * 3


affine_or_none = function(forward_without_zeros, lambda ctx, grad: None if grad is None else 100 * grad + 7).apply
always_open, always_open_or_none = gate(0.1), gate(0.1, materialize=False)


@quiet
@pytest.mark.parametrize("limit", [0.1, 50.0])
@pytest.mark.parametrize(
    "program",
    [
        lambda f, x: f(x),
        lambda f, x: f(x * 1),
        lambda f, x: f(x * 1) + x,
        lambda f, x: f(x.sqrt()) + x.exp(),  # the derivative of the root is infinite at 0
        lambda f, x: f(affine(x * 2).sin()),
        lambda f, x: f(affine_or_none(x * 2).sin()) + x,
        lambda f, x: f(always_open(x).sin()),
        lambda f, x: f(always_open_or_none(x).sin()) + x,
        lambda f, x: f(x * 2) * always_open(x * 2),
        lambda f, x: (f(affine(x)), x.cos()),
    ],
)
def test_whether_a_backward_returns_none_is_decided_when_it_runs(program, limit):
    x = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64).requires_grad_()
    f = gate(limit)
    assert_same(lambda x: program(f, x), x)


@quiet
def test_a_gradient_is_none_at_one_call_of_a_program_and_not_at_the_next():
    f = gate(3.0)
    jitted = thunder.jit(lambda x: f(x * 1))
    for scale in (1, 2, 1, 2):
        x = torch.full((4,), 2.0 * scale).requires_grad_()
        jitted(x).sum().backward()
        assert (x.grad is None) == (scale == 1)
    assert thunder.cache_misses(jitted) == 1


# ------------------------------------------------------------------------------------------------------ checkpoints


class GivenParameters(Function):
    """A checkpoint that is given the parameters of what it runs, and asks for their gradients."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        wanted = [p for p in ctx.parameters if p.requires_grad]
        first, *found = torch.autograd.grad(out, [x, *wanted], 100 * grad, allow_unused=True)
        found = iter(found)
        return None, first, *(next(found) if p.requires_grad else None for p in ctx.parameters)


class Accumulating(Function):
    """A checkpoint that runs a backward of its own, and refuses ``torch.autograd.grad``."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("this checkpoint is not compatible with .grad()")
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, 100 * grad)
        return (None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2))


class Checkpointed(torch.nn.Module):
    def __init__(self, checkpoint, frozen=False, given=True, inner=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
        self.layer.weight.requires_grad_(not frozen)
        self.checkpoint, self.given, self.inner = checkpoint, given, inner

    def run(self, x):
        x = self.layer(x) if self.inner is None else self.inner.apply(self.layer, x)
        return x + self.norm(x).sin()

    def forward(self, x):
        return self.checkpoint.apply(self.run, x, *(self.parameters() if self.given else ())) + x


def checkpointed_gradients(module, run, x):
    module.zero_grad()
    run(x).cos().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@quiet
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": GivenParameters},
        {"checkpoint": GivenParameters, "frozen": True},
        {"checkpoint": Accumulating, "given": False},
        {"checkpoint": Accumulating, "given": False, "frozen": True},
        {"checkpoint": Accumulating, "given": True},
        {"checkpoint": Accumulating, "given": False, "inner": Accumulating},
    ],
)
def test_a_checkpoint_gives_the_parameters_of_what_it_runs_their_gradients(options):
    module = Checkpointed(**options)
    if module.checkpoint is GivenParameters:  # a hook is given None, too
        module.norm.bias.register_hook(lambda grad: 3 * grad)
    jitted = thunder.jit(module)
    for _ in range(2):
        expected = checkpointed_gradients(module, module, vector(3, 4, dtype=torch.float32))
        found = checkpointed_gradients(module, jitted, vector(3, 4, dtype=torch.float32))
        assert [g is None for g in found] == [g is None for g in expected]
        torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


@quiet
def test_a_checkpoint_refuses_to_be_differentiated_by_grad_where_eager_does():
    module = Checkpointed(Accumulating, given=False)
    for run in (module, thunder.jit(module)):
        x = vector(3, 4, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="not compatible with"):
            torch.autograd.grad(run(x).sum(), x)


# ---------------------------------------------------------------------------------------------------- Python state

calls = [0]


def level_5(x):
    calls[0] += 1
    return torch.from_numpy(x.detach().numpy() * calls[0])


def level_4(x):
    return level_5(x)


def level_3(x):
    return level_4(x)


def level_2(x):
    return level_3(x)


def level_1(x):
    return level_2(x)


@quiet
@pytest.mark.parametrize("counted", [level_5, level_1])
def test_a_function_that_counts_its_calls_counts_as_in_eager_and_is_compiled_once(counted):
    apply = function(lambda ctx, x: counted(x), lambda ctx, grad: 100 * grad).apply
    calls[0] = 0
    jitted = thunder.jit(lambda x: apply(x * 2))
    for number in range(1, 5):
        x = vector()
        y = jitted(x)
        assert calls[0] == number
        torch.testing.assert_close(y, x * 2 * number)
    assert thunder.cache_misses(jitted) == 1


def test_what_is_put_back_is_never_missing_and_what_was_imported_stays():
    names = {"__name__": "m", "__spec__": None, "counter": 1, "gone": 2}
    cache, items, seen = {"a": 1, "b": 2}, [1, 2], {1, 2}
    state = State.reachable_from([[names, cache, items, seen]])
    names["counter"], names["imported"] = 5, 6
    del names["gone"], cache["a"]
    cache["new"] = 3
    items.append(3)
    seen.add(3)
    state.restore()
    assert names == {"__name__": "m", "__spec__": None, "counter": 1, "gone": 2, "imported": 6}
    assert list(cache.items()) == [("a", 1), ("b", 2)]
    assert (items, seen) == ([1, 2], {1, 2})


@quiet
def test_the_reason_for_a_call_that_asks_for_the_layout_of_a_tensor_says_so():
    reads = function(lambda ctx, x: x * x.stride(0), lambda ctx, grad: 100 * grad).apply
    jitted = assert_same(lambda x: reads(x), vector())
    assert "calls Tensor.stride() at" in str(hookkit.report(jitted))
