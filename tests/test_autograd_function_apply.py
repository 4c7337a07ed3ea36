"""The higher-order operator autograd_function_apply, in both of its forms; gradients are wrong on purpose."""

import pytest
import thunder
import torch
from torch import nn

import hookkit
from hookkit.testing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning")

apply = torch.ops.higher_order.autograd_function_apply


def vector(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*(shape or (4,)), generator=generator).requires_grad_()


class Reference(torch.autograd.Function):
    """What both forms mean, for eager PyTorch."""

    @staticmethod
    def forward(ctx, fwd, bwd, non_differentiable, *args):
        output, saved = fwd(*args)
        ctx.bwd, ctx.saved = bwd, saved
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(outputs[i] for i in non_differentiable))
        return output

    @staticmethod
    def backward(ctx, *grads):
        result = ctx.bwd(*grads, *ctx.saved)
        return (None, None, None, *(result if isinstance(result, tuple) else (result,)))


def graph(build, count):
    """A graph module of so many arguments."""
    made = torch.fx.Graph()
    arguments = [made.placeholder(f"a{i}") for i in range(count)]
    made.output(build(made, *arguments))
    return torch.fx.GraphModule(nn.Module(), made)


class Program(nn.Module):
    """Holds two graph modules, as a graph that Dynamo made does."""

    def __init__(self, fwd, bwd, body):
        super().__init__()
        self.fwd, self.bwd, self.body = fwd, bwd, body

    def forward(self, *args):
        return self.body(self.fwd, self.bwd, *args)


def sine(graph_, x):
    return graph_.call_function(torch.sin, (x,))


def times(graph_, *factors):
    result = factors[0]
    for factor in factors[1:]:
        result = graph_.call_function(torch.mul, (result, factor))
    return result


def test_the_form_with_a_ctx_takes_functions():
    def fwd(ctx, x, y):
        return x.sin() * y, (x, y)

    def bwd(ctx, grad, x, y):
        return 100 * grad * y, 3 * grad * x

    def program(x, y):
        return apply(fwd, bwd, x, y, args_tensor_mask=[True, True], non_differentiable_idx=[]) * 2

    def reference(x, y):
        return Reference.apply(lambda *a: fwd(None, *a), lambda *a: bwd(None, *a), (), x, y) * 2

    assert_same(program, vector(), vector(), reference=reference)


def test_the_form_with_a_ctx_gives_arguments_outside_the_mask_no_gradient():
    def fwd(ctx, x, k):
        return x * k, (x,)

    def bwd(ctx, grad, x):
        return 100 * grad * x, None

    def program(x):
        return apply(fwd, bwd, x, 3.0, args_tensor_mask=[True, False])

    def reference(x):
        return Reference.apply(lambda *a: fwd(None, *a), lambda *a: bwd(None, *a), (), x, 3.0)

    assert_same(program, vector(), reference=reference)


def test_the_form_without_a_ctx_keeps_a_tuple_of_one_output():
    fwd = graph(lambda g, x: ((sine(g, x),), (x,)), 1)
    bwd = graph(lambda g, grad, x: (times(g, grad, x, 100.0),), 2)

    def body(f, b, x):
        out = apply(f, b, x, non_differentiable_idx=[], saved_for_backward_idx=[0])
        assert isinstance(out, tuple)
        return out[0] * 2

    def reference(x):
        return Reference.apply(lambda a: (fwd(a)[0][0], fwd(a)[1]), bwd, (), x) * 2

    assert_same(Program(fwd, bwd, body), vector(3, 4), reference=reference)


def test_the_form_without_a_ctx_keeps_numbers_and_intermediates():
    def forward(g, n, x, y):
        product = times(g, x, y)
        return ((sine(g, product), times(g, product, n)), (n, x, product))

    def backward(g, first, second, n, x, product):
        return (None, times(g, first, product, 100.0), times(g, second, x, n))

    fwd, bwd = graph(forward, 3), graph(backward, 5)

    def body(f, b, x, y):
        first, second = apply(f, b, 5, x, y, non_differentiable_idx=[], saved_for_backward_idx=[1, 2])
        return first * 2 + second

    def reference(x, y):
        first, second = Reference.apply(fwd, bwd, (), 5, x, y)
        return first * 2 + second

    assert_same(Program(fwd, bwd, body), vector(), vector(), reference=reference)


def test_outputs_named_as_not_differentiable_require_no_grad():
    fwd = graph(lambda g, x: ((sine(g, x), times(g, x, 3)), (x,)), 1)
    bwd = graph(lambda g, grad, other, x: (times(g, grad, x, 100.0),), 3)

    def body(f, b, x):
        return apply(f, b, x, non_differentiable_idx=[1], saved_for_backward_idx=[0])

    assert_same(Program(fwd, bwd, body), vector(), reference=lambda x: Reference.apply(fwd, bwd, (1,), x))


def test_an_argument_named_as_dirty_is_changed():
    fwd = graph(lambda g, x: ((g.call_method("mul_", (x, 3)),), ()), 1)
    bwd = graph(lambda g, grad: (times(g, grad, 100.0),), 1)

    def body(f, b, x):
        h = x + 1
        out = apply(f, b, h, non_differentiable_idx=[], saved_for_backward_idx=[], dirty_idx=[0])
        return out[0] * 2

    assert_same(Program(fwd, bwd, body), vector(), reference=lambda x: _TimesHundred.apply((x + 1) * 3) * 2)


class _TimesHundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        # (x + 1) * 3 is differentiated by autograd here
        return grad * 100 / 3


def test_under_no_grad_nothing_requires_grad():
    fwd = graph(lambda g, x: ((sine(g, x),), (x,)), 1)
    bwd = graph(lambda g, grad, x: (times(g, grad, x, 100.0),), 2)

    def body(f, b, x):
        with torch.no_grad():
            out = apply(f, b, x, non_differentiable_idx=[], saved_for_backward_idx=[0])[0]
        return out * 2, x * 3

    def reference(x):
        return x.detach().sin() * 2, x * 3

    assert_same(Program(fwd, bwd, body), vector(), reference=reference)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({}, "args_tensor_mask"),
        ({"args_tensor_mask": [True], "saved_for_backward_idx": [0]}, "one form"),
        ({"args_tensor_mask": [True], "dirty_idx": [0]}, "one form"),
        ({"saved_for_backward_idx": [0]}, "non_differentiable_idx"),
        ({"args_tensor_mask": [True], "no_such_keyword": 1}, "no_such_keyword"),
    ],
)
def test_keywords_of_no_form_are_refused(keywords, words):
    def program(x):
        return apply(lambda *a: (a[-1] * 2, ()), lambda *a: a[-1], x, **keywords)

    with pytest.raises(hookkit.HookError, match=words):
        thunder.jit(program)(vector())


def test_too_few_gradients_are_refused_with_their_number():
    def program(x, y):
        return apply(lambda ctx, a, b: (a * b, ()), lambda ctx, grad: grad, x, y, args_tensor_mask=[True, True])

    with pytest.raises(RuntimeError, match=r"expected 2, got 1"):
        thunder.jit(program)(vector(), vector()).sum().backward()


def test_two_applications_of_one_pair_keep_their_own_arguments():
    def fwd(ctx, x, k):
        return x * k, (k,)

    def bwd(ctx, grad, k):
        return 100 * grad * k, None

    def program(x):
        return apply(fwd, bwd, x, 2.0, args_tensor_mask=[True, False]) + apply(
            fwd, bwd, x, 3.0, args_tensor_mask=[True, False]
        )

    def reference(x):
        plain = [lambda *a: fwd(None, *a), lambda *a: bwd(None, *a), ()]
        return Reference.apply(*plain, x, 2.0) + Reference.apply(*plain, x, 3.0)

    assert_same(program, vector(), reference=reference)
