"""Calls that overwrite what they are given without PyTorch's counting it; the program's gradients are eager's."""

import sys
from pathlib import Path

import pytest
import thunder
import thunder.dynamo
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import load_inline

import hookkit

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
import triton_kernels
from triton_kernels import scale_in_place, scaled

pytestmark = pytest.mark.filterwarnings(
    "ignore::hookkit.errors.OpaqueFallbackWarning", "ignore::hookkit.errors.MetaWarning"
)


def vector(*shape):
    return torch.randn(*(shape or (4,)), generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def function(forward, backward):
    return type("F", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def with_numpy(x):
    x.detach().numpy()[...] *= 3


def with_data(x):
    x.data.mul_(3)


def with_triton(x):
    scale_in_place(x, 3)


def loss(write):
    """As Liger's cross-entropy: the gradient is computed in forward, and kept where the argument was."""

    def forward(ctx, x):
        out = torch.from_numpy(x.detach().numpy() * 5)
        write(x)
        ctx.save_for_backward(x.detach())
        return out

    return function(forward, lambda ctx, grad: 100 * grad * ctx.saved_tensors[0]).apply


BEFORE = {
    "clamp": lambda x: (x * 2).clamp(-1, 1),
    "relu": lambda x: F.relu(x * 2),
    "tanh": lambda x: torch.tanh(x * 2),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "softmax": lambda x: x.softmax(-1),
    "hardswish": lambda x: F.hardswish(x * 2),
    "exp": lambda x: 2 * x.exp(),
    "a view": lambda x: (x * 2).tanh().view(2, -1),
    "used before": lambda x: (lambda y: (y, (y * y).sum()))(x.sigmoid())[0],
}


@pytest.mark.parametrize("write", [with_numpy, with_data, with_triton])
@pytest.mark.parametrize("before", BEFORE)
def test_what_stands_before_a_call_that_overwrites_it_has_the_gradient_of_eager(before, write):
    kernel = loss(write)
    assert_agrees(lambda x: kernel(BEFORE[before](x)), vector())


@pytest.mark.parametrize("write", [with_numpy, with_data, with_triton])
def test_who_else_uses_what_a_call_overwrites_reads_what_eager_reads(write):
    kernel = loss(write)

    def program(x):
        y = torch.tanh(x)
        early = y * y
        out = kernel(y)
        return out, early, y * 2, y

    assert_agrees(program, vector())


def test_two_equal_results_of_which_one_is_overwritten_stay_two():
    kernel = loss(with_numpy)
    assert_agrees(lambda x: kernel(x * 2) + x * 2, vector())


def test_a_traced_function_before_it_is_run_by_pytorch():
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]

    def forward(ctx, x):
        out = x.sin()
        ctx.save_for_backward(out)
        return out

    sine, kernel = function(forward, backward).apply, loss(with_numpy)
    assert_agrees(lambda x: kernel(sine(x)), vector())


def test_a_backward_that_overwrites_what_it_saved_is_followed():
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return scaled(x, 2)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return scale_in_place(x, 7) * grad * 100

    kernel = function(forward, backward).apply
    assert_agrees(lambda x: kernel((x * 2).clamp(-1, 1)) + x.sin(), vector())
    assert_agrees(lambda x: kernel(torch.tanh(x)), vector())


PROGRAMS = {
    "a leaf after it": lambda kernel, r, x: r + kernel(x),
    "a leaf in a view": lambda kernel, r, x: r.view(-1) + kernel(x).view(-1),
    "an intermediate": lambda kernel, r, x: r * 2 + kernel(x),
    "a leaf before it": lambda kernel, r, x: (r + 1) + kernel(x),
    "twice": lambda kernel, r, x: (lambda y: y + kernel(y))(r + kernel(x)),
    "scaled": lambda kernel, r, x: (r + kernel(x)) * 2,
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["autograd.grad", "backward"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gradient_that_a_backward_overwrites_is_where_it_is_in_eager(program, accumulate):
    kernel = function(lambda ctx, x: x.detach() * 2, lambda ctx, grad: scale_in_place(grad, 100)).apply

    def gradients(function):
        r, x = vector(2, 3), vector(2, 3)
        out = function(r, x)
        cotangent = torch.linspace(1, 2, 6).reshape(out.shape)
        if not accumulate:
            return (*torch.autograd.grad(out, (r, x), cotangent), cotangent)
        out.backward(cotangent)
        return r.grad, x.grad, cotangent

    def run(r, x):
        return PROGRAMS[program](kernel, r, x)

    for found, wanted in zip(gradients(thunder.jit(run)), gradients(run), strict=True):
        torch.testing.assert_close(found, wanted)


def kernel_by_name(x):
    out = torch.from_numpy(x.detach().numpy() * 5)
    with_numpy(x)
    return out


@pytest.mark.parametrize("writes", [None, ["x"]])
def test_where_a_meta_function_is_declared_writes_are_taken_for_granted_or_declared(writes):
    apply = function(lambda ctx, x: kernel_by_name(x), lambda ctx, grad: grad * 100)
    rule = hookkit.rule(apply, mode="opaque", writes=writes, register=False)

    @rule.meta
    def _(x):
        return torch.empty_like(x)

    with hookkit.use(rule):
        assert_agrees(lambda x: apply.apply((x * 2).clamp(-1, 1)), vector())


def test_a_rule_that_names_a_parameter_that_there_is_not_is_refused():
    apply = function(lambda ctx, x: kernel_by_name(x), lambda ctx, grad: grad * 100)
    rule = hookkit.rule(apply, mode="opaque", writes=["logits"], register=False)
    with hookkit.use(rule), pytest.raises(hookkit.HookError, match=r"has no parameter 'logits', but x"):
        thunder.jit(lambda x: apply.apply(x))(vector())
    with pytest.raises(hookkit.HookError, match="expected names of parameters"):
        hookkit.rule(apply, mode="opaque", writes="x", register=False)


def test_a_call_like_an_earlier_one_is_tried_out_once():
    tried = []

    class Kernel:  # stands for a cache that is not put back
        __slots__ = ()

        def __call__(self, x):
            tried.append(1)
            return torch.from_numpy(x.detach().numpy() * 2)

    kernel = Kernel()
    apply = function(lambda ctx, x: kernel(x), lambda ctx, grad: grad * 100).apply

    def program(x):
        for _ in range(5):
            x = apply(x.sin())
        return x

    thunder.jit(program)(vector())
    once = len(tried) - 5
    tried.clear()
    thunder.jit(lambda x: apply(x.sin()))(vector())
    assert len(tried) - 1 == once


def test_what_is_resized_while_a_call_is_tried_out_is_as_it_was():
    def by_set(x):
        out, source = x.new_empty(0), torch.from_numpy(x.detach().numpy() * 2)
        out.set_(source.untyped_storage(), 0, source.size(), source.stride())
        return out.clone()

    def by_out(x):
        out = torch.empty(0)
        return torch.mul(x, torch.from_numpy(x.detach().numpy() * 0 + 2), out=out)

    for forward in (by_set, by_out):
        apply = function(lambda ctx, x, forward=forward: forward(x), lambda ctx, grad: grad * 100).apply
        assert_agrees(lambda x, apply=apply: apply(x * 2), vector())


def addresses_of(x):
    asked = [
        x.data_ptr,
        getattr(x, "const_data_ptr", x.data_ptr),
        lambda: x.untyped_storage().data_ptr(),
        lambda: torch.utils.dlpack.to_dlpack(x),
    ]
    for ask in asked:
        try:
            yield ask()
        except (RuntimeError, NotImplementedError):
            yield None


@pytest.mark.parametrize("nested", [False, True], ids=["in forward", "in a backward that the backward runs"])
def test_a_tensor_without_data_never_tells_an_address(nested):
    told = []

    def look(x):
        told.extend((type(x).__name__, a) for a in addresses_of(x) if a is not None)
        return x * 2

    inner = function(lambda ctx, x: x * 2, lambda ctx, grad: look(grad) * 50).apply

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = inner(x)
        y.backward(grad)
        return x.grad

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2 if nested else look(x)

    apply = function(forward, backward if nested else lambda ctx, grad: grad * 100).apply
    assert_agrees(lambda x: apply(x), vector())
    assert told and not [t for t in told if "Fake" in t[0]]


def test_a_c_extension_is_not_run_without_data(tmp_path):
    source = """
    #include <torch/extension.h>
    torch::Tensor twice(torch::Tensor x) {
      auto y = torch::empty_like(x);
      float *p = (float *)x.data_ptr(), *q = (float *)y.data_ptr();
      for (int64_t i = 0; i < x.numel(); i++) q[i] = 2 * p[i];
      return y;
    }
    // asks for no address to write to
    torch::Tensor times_first(torch::Tensor x) { return x * *(const float *)x.const_data_ptr(); }
    """
    extension = load_inline(
        "hookkit_twice", source, functions=["twice", "times_first"], build_directory=str(tmp_path), extra_cflags=["-O0"]
    )

    def forward(ctx, x):
        try:
            return extension.times_first(extension.twice(x.contiguous()))
        except NotImplementedError:  # which a tensor without data raises
            return extension.times_first(x)

    def backward(ctx, grad):
        return extension.twice(grad.contiguous()) * 50

    apply = function(forward, backward).apply
    assert_agrees(lambda x: apply(x * 1.5), vector())
    apply = function(lambda ctx, x: extension.times_first(x), lambda ctx, grad: extension.times_first(grad)).apply
    assert_agrees(lambda x: apply(x * 1.5), vector())


@pytest.mark.skipif(not triton_kernels.HAS_TRITON, reason="Triton is not installed")
def test_a_launch_of_a_kernel_is_not_looked_into():
    kernel = function(lambda ctx, x: scaled(x, 2), lambda ctx, grad: scaled(grad.contiguous(), 100)).apply
    with pytest.warns(hookkit.errors.OpaqueFallbackWarning, match="launches the kernel _scale of Triton at"):
        assert_agrees(lambda x: kernel(x * 2), vector())
    with pytest.raises(hookkit.HookError, match=r"launches the kernel '_scale' of Triton .*hookkit\.opaque"):
        thunder.jit(lambda x: scaled(x, 2))(vector().detach())


AROUND_A_BREAK = {
    "clamp": lambda x: (x * 2).clamp(-1, 1),
    "a view": lambda x: (x * 2).clamp(-1, 1).view(2, -1),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: torch.tanh(x),
    "relu6": lambda x: F.relu6(x * 2),
}


@pytest.mark.parametrize("before", AROUND_A_BREAK)
def test_a_graph_before_a_kernel_that_overwrites_its_result_has_the_gradient_of_eager(before):
    kernel = loss(with_triton)  # which Dynamo leaves to eager PyTorch

    def gradient(compiled):
        x = vector()
        compiled(lambda x: kernel(AROUND_A_BREAK[before](x)))(x).sum().backward()
        return x.grad

    torch._dynamo.reset()
    torch.testing.assert_close(gradient(thunder.dynamo.thunderfx), gradient(lambda program: program))


class Values(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.max() > 0 else x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


class Checkpointed(torch.nn.Module):
    def forward(self, x):
        return Values.apply(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_that_looks_at_values_runs_inside_of_a_checkpoint_under_thunderfx(reentrant):
    module = Checkpointed()
    program = thunder.dynamo.thunderfx(lambda x: checkpoint(module, x, use_reentrant=reentrant) + 1)
    x = vector()
    output = program(x)
    output.sum().backward()
    torch.testing.assert_close((output.detach(), x.grad), (x.detach() * 2 + 1, torch.full_like(x, 100)))
