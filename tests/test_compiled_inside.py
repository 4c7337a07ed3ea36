"""What torch.compile and torch.jit have made, called in a program: the values and gradients of eager PyTorch."""

import pytest
import thunder
import torch
from agreement import tensors_of

import hookkit

WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
compiled = torch.compile(lambda x: x.sin() * WEIGHT, backend="aot_eager")
linear = torch.nn.Linear(4, 4)
compiled_module = torch.compile(linear, backend="aot_eager")
scripted_module = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, affine=True)))
traced_module = torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(4))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x.sin() * 2
    return x


class InPlace(torch.nn.Module):
    """A module that is compiled in place, and one that has a compiled method."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.inner.compile(backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def double(self, x):
        return self.inner(x) * 2

    def forward(self, x):
        return self.double(x) + self.inner(x)


def compiles(x):
    return torch.compile(lambda a: a.sin() * x, backend="aot_eager")(x)


def decorates(x):
    @torch.compile(backend="aot_eager")
    def inner(a):
        return a * x * WEIGHT

    return inner(x)


# For each program what it calls besides, and whether that is one operator.
PROGRAMS = {
    "a compiled function": (lambda x: compiled(x) * x, None, False),
    "a compiled module": (lambda x: compiled_module(x), linear, False),
    "its forward": (lambda x: compiled_module.forward(x), linear, False),
    "torch.compile in the program": (compiles, None, False),
    "a decorator in the program": (decorates, None, False),
    "a scripted function": (lambda x: scripted(x) * x, None, True),
    "a scripted module": (lambda x: scripted_module(x) * x, scripted_module, True),
    "a traced module": (lambda x: traced_module(x).sin(), traced_module, True),
    "a module compiled in place": (InPlace(), None, False),
}


def matrix():
    return torch.linspace(0.1, 1.2, 12).reshape(3, 4).requires_grad_()


def outcome(program, x, besides):
    output = program(x)
    inputs = [x, WEIGHT, *(besides.parameters() if besides is not None else ())]
    weights = [torch.linspace(1, 2, t.numel()).reshape(t.shape) for t in tensors_of(output)]
    return output, torch.autograd.grad(list(tensors_of(output)), inputs, weights, allow_unused=True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [True, False])
def test_it_has_the_values_and_gradients_of_eager_pytorch(name, grad):
    program, besides, is_opaque = PROGRAMS[name]
    besides = besides or (program if isinstance(program, torch.nn.Module) else None)
    torch._dynamo.reset()
    jitted = thunder.jit(program)
    with torch.set_grad_enabled(grad):
        if not grad:
            torch.testing.assert_close(jitted(matrix()), program(matrix()))
            return
        x = matrix()
        (found, gradients), (expected, wanted) = outcome(jitted, x, besides), outcome(program, x, besides)
    torch.testing.assert_close(found, expected)
    for got, gradient in zip(gradients, wanted, strict=True):
        assert (got is None) == (gradient is None)
        if got is not None:
            torch.testing.assert_close(got, gradient)
    assert ("opaque" in {call.outcome for call in hookkit.report(jitted).calls}) == is_opaque


def test_the_buffers_of_a_scripted_module_are_updated_as_in_eager_pytorch():
    modules = [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)]
    first, second = map(torch.jit.script, modules)
    jitted = thunder.jit(lambda x: first(x))
    for _ in range(2):
        torch.testing.assert_close(jitted(matrix()), second(matrix()))
    torch.testing.assert_close(first.running_mean, second.running_mean)
    assert first.num_batches_tracked == second.num_batches_tracked == 2


def test_a_parameter_of_a_scripted_module_is_updated():
    module = torch.jit.script(torch.nn.Linear(4, 4))
    jitted = thunder.jit(lambda x: module(x))
    jitted(matrix())
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(jitted(matrix()), module(matrix()))


def test_a_program_that_is_a_scripted_module_is_refused():
    with pytest.raises(hookkit.HookError, match=r"of torch.jit is not supported.*call the module in a function"):
        thunder.jit(scripted_module)(matrix())
