"""Transforms that a compiled program calls itself: torch.vmap, torch.func, torch.autograd.functional."""

import functools

import pytest
import thunder
import torch
from agreement import tensors_of
from thunder.dynamo import thunderfx
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import hookkit


def leaf(*shape, start=-1.0, end=1.0):
    count = torch.Size(shape).numel()
    return torch.linspace(start, end, count, dtype=torch.float64).reshape(shape).requires_grad_()


class Sine(torch.autograd.Function):
    """For torch.func; its derivative another one in each mode, and wrong on purpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, k):
        return x.sin() * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x.cos() * ctx.k, None

    @staticmethod
    def jvp(ctx, tangent, _):
        (x,) = ctx.saved_tensors
        return 70 * tangent * x.cos() * ctx.k


WEIGHT = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
LAYER = torch.nn.Linear(3, 3, dtype=torch.float64)
TRANSFORMED = vmap(lambda row: row * WEIGHT)


class Holder:
    def __init__(self, weight):
        self.weight = weight
        self.more = (weight * 2, [weight])

    def __call__(self, row):
        return row * self.weight + self.more[0] + self.more[1][0]

    def total(self, row):
        return (row * self.weight).sum()


class Scaled:
    weight = WEIGHT

    @classmethod
    def by_class(cls, row):
        return row * cls.weight


def by_global(row):
    return LAYER(row) * WEIGHT


def with_keyword(row, factor=None):
    return row * factor


def made_inside(x, w):
    k = w.exp()

    def outer(q):
        return lambda row: grad(lambda r: (r * q * k).sum() * r.sum())(row)

    return vmap(outer(w.sin()))(x)


def rebound(x, w):
    k, total = w, 0
    function = lambda row: row * k  # noqa: E731
    for i in range(3):
        total = total + vmap(lambda row: row * i)(x)  # noqa: B023
    first = vmap(function)(x)
    k = w.exp()
    return total, first, vmap(function)(x)


def changed_later(x, w):
    parts = [w.exp(), {"w": (w, 2)}]
    y = vmap(lambda row: row * parts[0] + parts[1]["w"][0])(x)
    parts.pop()
    parts.append(x)
    return y


def by_default(x, w):
    k = w.exp()
    return vmap(lambda row, k=k: row * k)(x)


def maml(x, w):
    def loss(w, row):
        return (row * w).sin().sum()

    return vmap(grad(lambda w, row: loss(w - 0.1 * grad(loss)(w, row), row)), in_dims=(None, 0))(w, x)


def pulled_back(x, w):
    output, pull = vjp(lambda x, w: Sine.apply(x * w, 2.0), x, w)
    return output, pull(output * 2), pull(torch.ones_like(output))[0]


def with_dropout(x, w):
    output, pull = vjp(lambda x: torch.nn.functional.dropout(x, 0.5), x)
    return output, pull(output * w)


def without_gradients(x, w):
    with torch.no_grad():
        output, push = linearize(lambda x: (x * w).sin(), x)
        return output, push(x) * x, vmap(lambda row: row * w)(x)


def per_sample(x, w):
    def loss(parameters, row):
        return functional_call(LAYER, parameters, (row,)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(dict(LAYER.named_parameters()), x)
    return found["weight"], found["bias"]  # thunder makes a dict of pairs in any order


def ensemble(x, w):
    parameters = {n: torch.stack([p, 2 * p]) for n, p in LAYER.named_parameters()}
    return vmap(lambda p, x: functional_call(LAYER, p, (x,)), in_dims=(0, None))(parameters, x)


functional = torch.autograd.functional
PROGRAMS = {
    "dimensions": lambda x, w: vmap(lambda a, b: a * b, in_dims=(1, None), out_dims=1)(x, torch.cat([w, w[:1]])),
    "nested": lambda x, w: vmap(vmap(lambda a, b: a * b.exp()))(x, x * w),
    "chunks": lambda x, w: vmap(lambda row: Sine.apply(row, 2.0).sum(), chunk_size=2)(x),
    "keywords": lambda x, w: vmap(with_keyword)(x, factor=x * w),
    "random": lambda x, w: vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x),
    "no floats": lambda x, w: (vmap(torch.argmax)(x), vmap(lambda row: {"sum": row * w, "mask": row > 0})(x)),
    "auxiliary": lambda x, w: grad_and_value(lambda x: ((x * w).sin().sum(), {"z": x.sum()}), has_aux=True)(x),
    "argnums": lambda x, w: grad(lambda x, w: Sine.apply(x * w, 1.0).sum(), argnums=(0, 1))(x, w),
    "second": lambda x, w: vmap(vmap(grad(grad(lambda a: Sine.apply(a, 2.0)))))(x) * w,
    "vjp": pulled_back,
    "vjp with dropout": with_dropout,
    "jvp": lambda x, w: jvp(lambda x: (Sine.apply(x * w, 1.0), x * w), (x,), (x * 3,), has_aux=True),
    "hvp": lambda x, w: jvp(grad(lambda x: (x * w).sin().sum()), (x,), (torch.ones_like(x),))[1],
    "jacobians": lambda x, w: (jacrev(torch.sin, chunk_size=2)(w), jacfwd(lambda w: (x * w).sin().sum(0))(w)),
    "hessian": lambda x, w: hessian(lambda w: (x * w).sin().sum())(w),
    "functional.jacobian": lambda x, w: functional.jacobian(lambda w: (x * w).sin().sum(0), w, create_graph=True),
    "functional, detached": lambda x, w: functional.jacobian(lambda x: (x * w).sin().sum(0), x) * w,
    "functional.hessian": lambda x, w: functional.hessian(lambda x, w: (x * w).sin().sum(), (x, w), create_graph=True),
    "functional.hvp": lambda x, w: functional.hvp(lambda w: (x * w).sin().sum(), w, w * 2, create_graph=True),
    "globals": lambda x, w: (vmap(by_global)(x), vmap(LAYER)(x), TRANSFORMED(x), vmap(Scaled.by_class)(x)),
    "partial": lambda x, w: (
        vmap(functools.partial(torch.mul, w.exp()))(x),
        vmap(functools.partial(lambda row, k, z: row * k["k"] * z, k={"k": w}, z=2.0))(x),
    ),
    "objects": lambda x, w: (lambda holder: (vmap(holder)(x), vmap(grad(holder.total))(x)))(Holder(w.exp())),
    "default": by_default,
    "made inside": made_inside,
    "rebound": rebound,
    "changed later": changed_later,
    "maml": maml,
    "no gradients": without_gradients,
    "functional_call": lambda x, w: functional_call(LAYER, {"bias": x.sum(0) * w}, (x,)),
    "per sample": per_sample,
    "ensemble": ensemble,
}


def derivatives(program):
    """What a program returns, and its gradients of two orders."""
    torch.manual_seed(7)
    inputs = [leaf(4, 3), leaf(3, start=1.0, end=2.0), WEIGHT, *LAYER.parameters()]
    outputs = list(tensors_of(program(*inputs[:2])))
    found = [outputs]
    for _ in range(2):
        roots = [t.square().sum() * (i + 1) for i, t in enumerate(found[-1]) if t is not None and t.requires_grad]
        if not roots:
            break
        found.append(list(torch.autograd.grad(sum(roots), inputs, create_graph=True, allow_unused=True)))
    return found


def assert_right(program):
    found, expected = derivatives(thunder.jit(program)), derivatives(program)
    assert [[t is not None and t.requires_grad for t in f] for f in found] == [
        [t is not None and t.requires_grad for t in e] for e in expected
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_transform_inside_a_program_has_eagers_values_and_derivatives(name):
    assert_right(PROGRAMS[name])


class Energy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.factor = 3.0
        self.forces = vmap(grad(self.energy))

    def energy(self, row):
        return (self.out(torch.tanh(self.layer(row))) * self.scale * self.factor).squeeze(-1)

    def forward(self, x):
        return self.forces(x)


def test_a_module_that_transforms_its_own_method_is_trained_as_in_eager():
    def trained(wrap):
        torch.manual_seed(0)
        module = Energy()
        compiled, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            loss = compiled(torch.linspace(-1, 1, 12).reshape(4, 3)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.detach(), *(p.detach() for p in module.parameters()), module.layer.weight.grad]

    torch.testing.assert_close(trained(thunder.jit), trained(lambda m: m))


def test_what_a_function_captures_from_outside_is_read_at_every_call():
    weight, scale = leaf(3), 2.0
    compiled = thunder.jit(lambda x: vmap(lambda row: row * weight * scale)(x))
    x = leaf(4, 3)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), weight)[0], x.sum(0) * scale)
        weight, scale = (weight.detach() * 2).requires_grad_(), scale + 1


def test_tensors_that_are_captured_are_left_where_they_are():
    before = WEIGHT
    compiled = thunder.jit(lambda x: vmap(grad(lambda row: (row * WEIGHT).sin().sum()))(x))
    with torch.no_grad():
        compiled(leaf(4, 3))
    assert WEIGHT is before and type(WEIGHT) is torch.Tensor


def test_statistics_that_a_module_keeps_are_those_of_eager():
    def run(wrap):
        norm = torch.nn.BatchNorm1d(3)
        compiled = wrap(lambda x: functional_call(norm, {"weight": norm.weight * 2}, (x,)))
        return compiled(torch.linspace(-1, 1, 12).reshape(4, 3)), norm.running_mean, norm.num_batches_tracked

    torch.testing.assert_close(run(thunder.jit), run(lambda f: f))


def test_an_object_of_the_program_that_a_transformed_function_changes_is_refused():
    def program(x):
        seen = []
        y = vmap(lambda row: (seen.append(1), row * 2)[1])(x)
        return y * len(seen)

    with pytest.raises(hookkit.HookError, match=r"test_transforms_inside.py:\d+: a function that it calls changes"):
        thunder.jit(program)(leaf(4, 3))


def test_linearize_of_what_requires_grad_is_refused():
    with pytest.raises(hookkit.HookError, match=r"linearize\(\) at .*test_transforms_inside.py.*torch.func.jvp"):
        thunder.jit(lambda x: linearize(torch.sin, x)[0])(leaf(3))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: vmap(lambda row: row * torch.rand(3))(x),
        lambda x: vmap(lambda row: row, in_dims=5)(x),
        lambda x: grad(lambda x: x)(x),
        lambda x: vmap(lambda row: {}["missing"])(x),
    ],
)
def test_what_a_transform_raises_is_what_it_raises_in_eager(program):
    with pytest.raises(Exception) as expected:
        program(leaf(4, 3))
    with pytest.raises(expected.type) as found:
        thunder.jit(program)(leaf(4, 3))
    assert str(found.value) == str(expected.value)


def test_a_function_of_a_module_that_cannot_be_imported_is_transformed_under_thunderfx():
    names = {"__name__": "nowhere_to_be_imported_from", "torch": torch, "Sine": Sine}
    exec("def program(x):\n    return torch.vmap(lambda row: Sine.apply(row, 2.0).sum() * row)(x) * 2", names)
    torch._dynamo.reset()
    program, x = names["program"], leaf(4, 3)
    found, expected = thunderfx(program)(x), program(x)
    torch.testing.assert_close(found, expected)
    (got,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(got, wanted)
