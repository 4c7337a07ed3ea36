"""torch.autograd.grad of what a compiled program has computed: forces of an energy model, penalties, residuals."""

import pytest
import thunder
import torch
from test_derivatives import Cube
from test_transforms_inside import LAYER, WEIGHT, Sine, derivatives, leaf
from torch.func import vmap

import hookkit

functional = torch.nn.functional


class Opaque(torch.autograd.Function):
    """A tracer cannot see through NumPy: it runs opaque."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 200 * grad * x


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return 100 * grad * mask


def grad(output, inputs, **options):
    return torch.autograd.grad(output, inputs, **options)


def forces(x, w):
    energy = (Cube.apply(x) * w).sum()
    return energy, -grad(energy, x, create_graph=True)[0]


def first_order(x, w):
    energy = (Cube.apply(x) * w).sum()
    return energy * grad(energy, x, retain_graph=True)[0]


def of_a_module(x, w):
    energy = LAYER(torch.tanh(LAYER(x * w))).square().sum() * WEIGHT.sum()
    return energy, *grad(energy, [x, LAYER.weight], create_graph=True)


def of_an_intermediate(x, w):
    h = (x * w).exp()
    y = (h.sin() * w).sum() + h.square().sum()
    return grad(y, h, create_graph=True)[0] * x


def of_an_intermediate_and_what_it_is_made_of(x, w):
    h = (x * w).exp()
    y = (h.sin() * x).sum()
    return grad(y, (x, h), create_graph=True)


def residual(x, w):
    u = (Sine.apply(x, 2.0) * w).tanh()
    (du,) = grad(u.sum(), x, create_graph=True)
    (ddu,) = grad(du.sum(), x, create_graph=True)
    return (ddu + u).square().mean()


def opaque(x, w):
    y = (Opaque.apply(x * w) * x).sum()
    return grad(y, x, create_graph=True)[0] * Opaque.apply(w)


def with_dropout(x, w):
    y = functional.dropout(x * w, 0.5) * x
    return y, *grad(y.square().sum(), x, create_graph=True)


def with_draws_in_a_function(x, w):
    y = Dropped.apply(x * w) * x
    return y, *grad(y.square().sum(), (x, w), create_graph=True)


def of_its_own_leaf(x, w):
    position = x.detach().requires_grad_()
    energy = (position * w).sin().sum()
    return grad(energy, position, create_graph=True)[0] * x


def with_vmap(x, w):
    y = vmap(lambda row: (row * w).sin().sum())(x)
    return grad(y.sum(), x, create_graph=True)[0]


def unused(x, w):
    found = grad(x.sum(), (x, w), allow_unused=True)
    of_used, zeros = grad(x.square().sum(), (x, w), materialize_grads=True)
    return found[0], torch.tensor(found[1] is None), of_used, zeros.detach()  # up to torch 2.9 they are a leaf


def cotangents(x, w):
    y = x * w
    batched = grad(y, w, grad_outputs=torch.stack([x, x * 2]), is_grads_batched=True, retain_graph=True)
    return *grad(y, w, grad_outputs=x, create_graph=True), *batched


def penalty(x, w):
    total = x.new_zeros(())
    for i in range(3):
        score = (Cube.apply(x) * w * (i + 1)).sum()
        total = total + (grad(score, x, create_graph=True)[0].norm() - 1) ** 2
    return total


PROGRAMS = [
    forces,
    first_order,
    of_a_module,
    of_an_intermediate,
    of_an_intermediate_and_what_it_is_made_of,
    residual,
    opaque,
    with_dropout,
    with_draws_in_a_function,
    of_its_own_leaf,
    with_vmap,
    unused,
    cotangents,
    penalty,
]


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_autograd_grad_inside_a_program_is_eagers_with_its_derivatives(program):
    found, expected = derivatives(thunder.jit(program)), derivatives(program)
    assert [[t is not None and t.requires_grad for t in f] for f in found] == [
        [t is not None and t.requires_grad for t in e] for e in expected
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: grad((x * 2).sum(), x.detach()),
        lambda x: grad(x.sum(), x.square()),
        lambda x: grad(x * 2, x),
        lambda x: grad(x.detach().sum(), x),
    ],
)
def test_what_autograd_grad_raises_is_what_it_raises_in_eager(program):
    with pytest.raises(RuntimeError) as expected:
        program(leaf(4, 3))
    with pytest.raises(RuntimeError) as found:
        thunder.jit(program)(leaf(4, 3))
    assert str(found.value) == str(expected.value)


def test_what_has_been_changed_in_place_on_the_way_is_refused():
    def program(x):
        y = x * 2
        y.mul_(3)
        return grad(y.sum(), x)

    with pytest.raises(hookkit.HookError, match=r"_inside.py:\d+ cannot be part.*changes a tensor in place"):
        thunder.jit(program)(leaf(4, 3))


def backward_of_a_tensor(x):
    x.square().sum().backward()
    return x


def backward_of_tensors(x):
    torch.autograd.backward([x.square().sum()])
    return x


def dual_tensors(x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))


@pytest.mark.parametrize("program", [backward_of_a_tensor, backward_of_tensors, dual_tensors])
def test_what_needs_a_graph_while_a_program_is_traced_is_refused(program):
    x = leaf(3)
    with pytest.raises(hookkit.HookError, match=r"\(\) at .*test_autograd_inside.py:\d+ is not supported inside"):
        thunder.jit(program)(x)
    assert x.grad is None
