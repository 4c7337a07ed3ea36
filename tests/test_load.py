"""What compiling, running, failing and dropping programs leaves behind, and programs in threads: scripts/load.py."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import load
import pytest
import thunder
import torch

import hookkit
from hookkit.engine.interpreter.side_effects import WritesUndone

SCENARIOS = load.scenarios()
TIMES = {"compilations": 15, "steps": 200, "failures": 3}
LONG = [name for name in SCENARIOS if name != "compilations, trace"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest would keep them, and they would be counted
@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in SCENARIOS])
def test_nothing_grows(name):
    action, _ = SCENARIOS[name]
    assert load.growth(action, TIMES[name.partition(",")[0]]) == {}


def test_growth_is_seen():
    kept = []

    def action():
        kept.append((torch.ones(2), [object()]))

    assert load.growth(action, 10) == {"any Tensor": 10, "torch.Tensor": 10, "builtins.list": 10, "builtins.tuple": 10}


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_a_compiled_program_can_be_collected(mode):
    function, rule = load.scaled(mode)
    module = load.Layer(function)
    with load.in_force(rule):
        compiled = thunder.jit(module)
        output = compiled(torch.ones(4))
        output.sum().backward()
    watched = {name: weakref.ref(value) for name, value in (("function", function), ("module", module))}
    watched |= {
        "compiled": weakref.ref(compiled),
        "parameter": weakref.ref(module.weight),
        "output": weakref.ref(output),
    }
    del function, rule, module, compiled, output
    gc.collect()
    gc.collect()
    assert [name for name, reference in watched.items() if reference() is not None] == []


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_a_program_that_failed_can_be_collected(mode):
    function, rule = load.scaled(mode, fails="forward")
    module = load.Layer(function)
    with load.in_force(rule), pytest.raises(load.Boom):
        thunder.jit(module)(torch.ones(4))
    watched = [weakref.ref(function), weakref.ref(module)]
    del function, rule, module
    gc.collect()
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def in_threads(count, work):
    """Calls ``work(i)`` in threads that begin together, and returns what they return."""
    barrier = threading.Barrier(count)

    def begin(index):
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_threads_compile_and_run_different_programs_at_once(mode):
    def work(index):
        for _ in range(2):
            load.compilation(mode)()
        return index

    assert in_threads(8, work) == list(range(8))


@pytest.mark.parametrize("mode", ["trace", "opaque"])
def test_threads_compile_and_run_one_program_at_once(mode):
    function, rule = load.scaled(mode)

    def program(x, scale):
        return function.apply(x * scale) * 2

    compiled = thunder.jit(program)

    def work(index):
        results = []
        for size in (3, 4):
            x = torch.linspace(-1, 1, size, requires_grad=True)
            scale = torch.tensor(float(index + 1))
            with load.in_force(rule):
                y = compiled(x, scale)
            y.sum().backward()
            torch.testing.assert_close(y, (x * scale).sin() * 2)
            torch.testing.assert_close(x.grad, 200 * x.detach() * scale**2)
            results.append(size)
        return results

    assert in_threads(8, work) == [[3, 4]] * 8


def test_threads_with_and_without_grad_mode_compile_one_program_at_once():
    for _ in range(10):
        compiled = thunder.jit(lambda x: x * x * 2)

        def work(index, compiled=compiled):
            with torch.set_grad_enabled(index % 2 == 0):
                return compiled(torch.ones(3, requires_grad=True)).requires_grad

        assert in_threads(6, work) == [True, False] * 3


def test_threads_that_undo_writes_at_once_leave_dynamo_able_to_compile():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    entered, left = threading.Event(), threading.Event()

    def other():
        with WritesUndone():
            entered.set()
            left.wait()

    with ThreadPoolExecutor(1) as pool:
        with WritesUndone():
            pending = pool.submit(other)
            entered.wait()
        left.set()
        pending.result()
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert len(graphs) == 1


def test_rules_in_a_scope_of_one_thread_are_not_seen_by_the_others():
    def target(x):
        return x * 2

    rules = [hookkit.rule(target, register=False)(lambda x, factor=i: x * (factor + 10)) for i in range(8)]

    def work(index):
        with hookkit.use(rules[index]):
            return float(thunder.jit(lambda x: target(x))(torch.ones(())))

    assert in_threads(8, work) == [float(i + 10) for i in range(8)]


def test_many_programs_in_one_process_stay_right():
    programs = []
    for index in range(25):
        function, _ = load.scaled("trace")
        programs.append((thunder.jit(lambda x, f=function, k=index: f.apply(x) * k), index))
    for _ in range(2):
        for compiled, index in programs:
            x = torch.linspace(-1, 1, 3, requires_grad=True)
            compiled(x).sum().backward()
            torch.testing.assert_close(x.grad, 100 * index * x.detach())


def test_nothing_that_a_program_is_given_waits_for_the_garbage_collector():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y, y[0])
            return y

        @staticmethod
        def backward(ctx, grad):
            y, row = ctx.saved_tensors
            return 100 * grad * y + row

    jitted = thunder.jit(lambda x: Kept.apply(x))
    gc.collect()
    gc.disable()
    try:
        references = []
        for _ in range(3):
            x = torch.ones(3, 4, requires_grad=True)
            y = jitted(x)
            references += [weakref.ref(x), weakref.ref(y)]
            del x, y
        assert [r() for r in references] == [None] * 6
    finally:
        gc.enable()
