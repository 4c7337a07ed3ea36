"""hookkit.install: what it puts into thunder, and that all of it goes again."""

import pytest
import thunder
import torch
from thunder.core import codeutils, interpreter, jit_ext
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from thunder.transforms import autodiff
from torch.autograd import Function

import hookkit
from hookkit import install


class Scaled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x


def program(x):
    return Scaled.apply(x) * 2


def vector():
    return torch.linspace(0.5, 2, 4, requires_grad=True)


HOLDERS = [
    *(holder for holder, _ in (p.locate() for p in install._patches()) if not isinstance(holder, dict)),
    thunder,
    thunder.clang,
    codeutils,
    thunder.dynamo.splitter,
    jit_ext,
    jit_ext.JitCtx,
    interpreter,
    interpreter.MappingKeysView,
    Symbol,
    autodiff,
    TensorProxy,
    NumberProxy,
    ThunderFunction,
    ThunderOutputFunction,
    thunder.dynamo.compiler.ThunderCompiler,
    thunder.dynamo.compiler.ThunderFXCompiledObject,
    torch.nn.utils.stateless,
    thunder.common.CompileData,
    thunder.core.utils.AutocastStack,
    thunder.ThunderModule,
    torch,
    torch.Tensor,
    torch.autograd.Function,
    torch.autograd.function.FunctionCtx,
    torch._dynamo.variables.misc.AutogradFunctionVariable,
    torch._dynamo.variables.misc.AutogradFunctionContextVariable,
    torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable,
]
TABLES = {
    "lookasides": jit_ext._general_jit_lookaside_map,
    "interpreter's lookasides": interpreter._default_lookaside_map,
    "interpreter's instructions": interpreter._default_opcode_handler_map,
    "operations": thunder.torch._torch_to_thunder_function_map,
    "plugins": thunder.plugins.names_to_plugins,
    "gradients": thunder.core.transforms.augmented_forward_impls,
}


def snapshot():
    """Every attribute of what hookkit touches, and every entry of thunder's tables, by identity."""
    found = {(str(h), name): value for h in HOLDERS for name, value in vars(h).items() if name != "__warningregistry__"}
    return found | {(table, key): value for table, entries in TABLES.items() for key, value in entries.items()}


def executors():
    return (
        [e.name for e in thunder.get_default_executors()],
        [e.name for e in thunder.get_always_executors()],
        sorted(map(str, thunder.get_all_executors())),
    )


def difference(before, after):
    missing = object()
    return [k for k in before | after if before.get(k, missing) is not after.get(k, missing)]


@pytest.fixture
def disabled():
    hookkit.disable()
    yield
    hookkit.enable()


def test_disable_takes_out_everything_that_enable_put_in(disabled):
    before, known = snapshot(), executors()
    hookkit.enable()
    patched = difference(before, snapshot())
    assert len(patched) >= len([p for p in install._installed if not isinstance(p.holder, dict)])
    thunder.jit(program)(vector()).sum().backward()
    hookkit.disable()
    assert difference(before, snapshot()) == []
    assert executors() == known


def test_every_patch_is_of_a_thing_that_the_snapshot_covers(disabled):
    hookkit.enable()
    for patch in install._installed:
        assert any(patch.holder is holder for holder in (*HOLDERS, *TABLES.values())), patch.key


def test_enable_and_disable_are_the_same_twice_as_once(disabled):
    before = snapshot()
    hookkit.disable()
    assert difference(before, snapshot()) == []
    hookkit.enable()
    once = snapshot()
    hookkit.enable()
    assert difference(once, snapshot()) == []
    assert hookkit.is_enabled()
    hookkit.disable()
    hookkit.disable()
    assert not hookkit.is_enabled()
    assert difference(before, snapshot()) == []


def test_an_exception_while_tracing_leaves_thunder_as_it_was():
    class Fails(Function):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("no")

    before = snapshot()
    with pytest.raises(ValueError, match="no"):
        thunder.jit(Fails.apply)(vector())
    assert difference(before, snapshot()) == []
    x = vector()
    thunder.jit(program)(x).sum().backward()
    torch.testing.assert_close(x.grad, 200 * x.detach())


@pytest.mark.parametrize(
    "chosen", [[], ["torch"], [thunder.pytorch_executor], None], ids=["none", "by name", "torch", "default"]
)
def test_the_users_choice_of_executors_keeps_working(chosen):
    jitted = thunder.jit(program, executors=chosen)
    x = vector()
    y = jitted(x)
    y.sum().backward()
    torch.testing.assert_close(y, program(vector()))
    torch.testing.assert_close(x.grad, 200 * x.detach())


def test_an_executor_of_the_users_own_claims_operations_inside_a_function():
    executor = thunder.extend.OperatorExecutor("doubting", version="0.1")
    calls = []

    def sine(x):
        calls.append(1)
        return torch.sin(x)

    operator = executor.register_operator("doubting_sin", like=thunder.torch.sin, fn=sine)
    executor.register_implementation(thunder.torch.sin, operator)
    thunder.extend.register_executor(executor)
    try:
        jitted = thunder.jit(program, executors=[executor, *thunder.get_default_executors()])
        x = vector()
        jitted(x).sum().backward()
        assert calls
        torch.testing.assert_close(x.grad, 200 * x.detach())
    finally:
        thunder.extend.deregister_executor(executor)


def square(x):
    return x * x


# Without hookkit a custom Function is nothing that thunder can run, from torch 2.14.
def test_a_program_compiled_with_the_rules_still_runs_when_they_are_out(disabled):
    hookkit.enable()

    @hookkit.rule(square)
    def squared(x):
        return x * x, hookkit.save(x=x)

    @squared.backward
    def _(saved, grad):
        return {"x": 200 * grad * saved.x}

    jitted = thunder.jit(lambda x: square(x))
    for enabled in (True, False, True):
        hookkit.enable() if enabled else hookkit.disable()
        x = vector()
        jitted(x).sum().backward()
        torch.testing.assert_close(x.grad, (200 if enabled else 2) * x.detach())


def test_programs_without_calls_that_a_rule_takes_have_stocks_trace(disabled):
    def plain(x):
        return (x.sin() * 2).sum() + x[0]

    def traced():
        jitted = thunder.jit(plain)
        jitted(vector())
        return str(thunder.last_traces(jitted)[0])

    stock = traced()
    hookkit.enable()
    assert traced() == stock


@pytest.mark.parametrize("tracking", [False, True])
def test_the_interpreter_is_used_by_itself(tracking):
    interpreted = interpreter.interpret(program, with_provenance_tracking=tracking, uncacheable_classes=[])
    torch.testing.assert_close(interpreted(vector()), program(vector()))


def test_numel_is_known_under_the_cache_of_symbolic_values():
    jitted = thunder.jit(lambda x: Scaled.apply(x.reshape([x.numel()])), cache="symbolic values")
    x = torch.ones(2, 3, requires_grad=True)
    jitted(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 100.0))


class Unmaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x > 0

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * 100


class Marked(Unmaterialized):
    @staticmethod
    def forward(ctx, x):
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * 2, positive


class TestDynamo:
    """What Dynamo does for another backend than thunder is PyTorch's own."""

    @pytest.mark.parametrize("function", [Unmaterialized, Marked])
    def test_a_graph_breaks_for_thunder_alone(self, function):
        x = torch.ones(3, requires_grad=True)
        torch._dynamo.reset()
        whole = torch.compile(lambda x: function.apply(x)[0] * 3, backend="eager", fullgraph=True)
        assert torch.equal(torch.autograd.grad(whole(x).sum(), x)[0], torch.full((3,), 300.0))
        compiled = thunder.dynamo.thunderfx(lambda x: function.apply(x)[0] * 3, fullgraph=True)
        if function is Unmaterialized:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="it calls set_materialize_grads"):
                compiled(x)
        else:
            assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 300.0))


SETTINGS = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        (True, False),
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, (torch.float64, torch.float32)),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("high", torch.get_float32_matmul_precision()),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_program_that_asks_for_a_setting_of_torch_is_compiled_again_when_it_changes(name):
    read, change, (other, usual) = SETTINGS[name]

    def program(x):
        return x * (2 if read() == usual else 3)

    jitted = thunder.jit(program)
    assert jitted(torch.ones(2)).tolist() == [2, 2]
    change(other)
    try:
        assert jitted(torch.ones(2)).tolist() == [3, 3]
    finally:
        change(usual)
    assert jitted(torch.ones(2)).tolist() == [2, 2]
    assert thunder.cache_misses(jitted) == 2


class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.total, self.calls = 0.0, 0

    def forward(self, x):
        self.calls = self.calls + 1
        self.total = self.total + x * 2
        return self.total * self.calls


@pytest.mark.parametrize("within", [lambda module: module, torch.nn.Sequential], ids=["outermost", "inner"])
def test_attributes_of_a_module_are_set(within):
    found = []
    for compiled in (lambda program: program, thunder.jit):
        module = Remembers()
        program = compiled(within(module))
        inputs = [torch.tensor([1.0, 2.0 + i], requires_grad=True) for i in range(3)]
        outputs = [program(x) for x in inputs]
        sum(outputs).sum().backward()
        found.append((module.calls, module.total, module.total.requires_grad, outputs, [x.grad for x in inputs]))
    (calls, total, tracked, outputs, gradients), eager = found
    assert (calls, tracked) == (eager[0], eager[2]) == (3, True)
    for got, wanted in zip([total, *outputs, *gradients], [eager[1], *eager[3], *eager[4]], strict=True):
        torch.testing.assert_close(got, wanted)


def test_an_attribute_that_cannot_be_set_is_refused():
    class Remembers(torch.nn.Module):
        def forward(self, x):
            self.parts = [x, x * 2]
            return x * 2

    with pytest.raises(hookkit.HookError, match="assigns an object of the class list to the attribute 'parts'"):
        thunder.jit(Remembers())(torch.ones(2))
