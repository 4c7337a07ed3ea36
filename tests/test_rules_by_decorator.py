"""Rules for plain callables: containers in and out, residuals, marks, gradients by name and by place, conditions.

Gradients are wrong on purpose, so that a test fails where the rule is ignored.
"""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import thunder
import torch

import hookkit
from hookkit.testing import assert_same


def vector(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*(shape or (4,)), generator=generator, dtype=torch.float64).requires_grad_()


def gradients(program, *inputs):
    """The gradients of inputs, None where there is none."""
    outputs = program(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    roots = [o.sum() for o in outputs if o.requires_grad]
    return torch.autograd.grad(roots, [i for i in inputs if i.requires_grad], allow_unused=True)


modes = pytest.mark.parametrize("mode", ["trace", "opaque"])
Pair = namedtuple("Pair", "left right")


@dataclass
class Parts:
    low: torch.Tensor
    high: torch.Tensor
    note: str = "parts"


def product(x, y, *, power=1):
    return (x * y) ** power


def declare(target, forward, backward, **options):
    rule = hookkit.rule(target, **options)(forward)
    rule.backward(backward)
    return rule


# ------------------------------------------------------------------------------------------------------------- outputs


@modes
@pytest.mark.parametrize("kind", ["dict", "list", "tuple of one", "dataclass", "nested", "with constants"])
def test_the_structure_that_the_provider_returns_is_kept(kind, mode):
    shapes = {
        "dict": lambda a, b: {"a": a, "b": b},
        "list": lambda a, b: [a, b],
        "tuple of one": lambda a, b: (a + b,),
        "dataclass": lambda a, b: Parts(a, b),
        "nested": lambda a, b: {"a": [a, (b,)]},
        "with constants": lambda a, b: (a, None, 3, "text", b),
    }

    def split(x):
        return shapes[kind](x * 2, x * 3)

    @hookkit.rule(split, mode=mode)
    def split_rule(x):
        return shapes[kind](x * 2, x * 3), hookkit.save()

    @split_rule.backward
    def _(saved, *grads):
        found = [g for g in torch.utils._pytree.tree_leaves(flat(grads)) if isinstance(g, torch.Tensor)]
        return {"x": 100 * sum(found)}

    def flat(grads):
        return [[g.low, g.high] if isinstance(g, Parts) else g for g in grads]

    jitted = thunder.jit(split)
    found, expected = jitted(vector()), split(vector())
    assert type(found) is type(expected)
    leaves = [torch.utils._pytree.tree_leaves(flat([t])) for t in (found, expected)]
    for got, wanted in zip(*leaves, strict=True):
        torch.testing.assert_close(got, wanted) if isinstance(wanted, torch.Tensor) else None
        assert isinstance(wanted, torch.Tensor) or got == wanted
    x = vector()
    torch.autograd.backward([t.sum() for t in leaves_of(jitted(x), flat)])
    torch.testing.assert_close(x.grad, torch.full_like(x, 100.0 if kind == "tuple of one" else 200.0))


def leaves_of(output, flat):
    return [t for t in torch.utils._pytree.tree_leaves(flat([output])) if isinstance(t, torch.Tensor)]


@modes
def test_a_named_tuple_has_its_fields(mode):
    def split(x):
        return Pair(x * 2, x * 3)

    declare(
        split,
        lambda x: (Pair(x * 2, x * 3), hookkit.save()),
        lambda saved, grad: {"x": grad.left + 100 * grad.right},
        mode=mode,
    )

    def program(x):
        pair = split(x)
        return pair.left, pair.right

    torch.testing.assert_close(
        gradients(thunder.jit(program), vector())[0], torch.full((4,), 101.0, dtype=torch.float64)
    )


@modes
def test_tensors_inside_arguments_get_gradients_in_the_arguments_structure(mode):
    def weighted(parts, weights):
        return parts["a"] * weights[0] + parts["b"][0] * weights[1]

    @hookkit.rule(weighted, mode=mode)
    def weighted_rule(parts, weights):
        return weighted.__wrapped__(parts, weights), hookkit.save(parts=parts)

    @weighted_rule.backward
    def _(saved, grad):
        return {
            "parts": {"a": 100 * grad, "b": [200 * grad * saved.parts["a"]]},
            "weights": (None, 300 * grad),
        }

    weighted.__wrapped__ = lambda parts, weights: parts["a"] * weights[0] + parts["b"][0] * weights[1]

    def program(a, b, u, v):
        return weighted({"a": a, "b": [b]}, (u, v))

    a, b, u, v = (vector() for _ in range(4))
    found = gradients(thunder.jit(program), a, b, u, v)
    one = torch.ones(4, dtype=torch.float64)
    for got, wanted in zip(found, (100 * one, 200 * a.detach(), None, 300 * one), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


# ----------------------------------------------------------------------------------------------------------- gradients


@modes
def test_gradients_are_given_by_name_and_a_missing_name_is_no_gradient(mode):
    declare(
        product,
        lambda x, y, *, power=1: ((x * y) ** power, hookkit.save(y=y)),
        lambda saved, grad: {"x": 100 * grad * saved.y},
        mode=mode,
    )
    x, y = vector(), vector()
    gx, gy = gradients(thunder.jit(lambda x, y: product(x, y, power=2)), x, y)
    torch.testing.assert_close(gx, 100 * y.detach())
    assert gy is None


@modes
def test_gradients_are_given_by_place(mode):
    declare(
        product,
        lambda x, y, *, power=1: ((x * y) ** power, hookkit.save(x=x, y=y)),
        lambda saved, grad: (100 * grad * saved.y, 3 * grad * saved.x),
        mode=mode,
    )
    x, y = vector(), vector(2, 2).detach().reshape(4).requires_grad_()
    gx, gy = gradients(thunder.jit(lambda x, y: product(x, y)), x, y)
    torch.testing.assert_close(gx, 100 * y.detach())
    torch.testing.assert_close(gy, 3 * x.detach())


@modes
def test_gradients_of_variable_arguments_are_a_tuple_under_their_name(mode):
    def total(*terms, scale=1.0):
        return sum(terms) * scale

    declare(
        total,
        lambda *terms, scale=1.0: (sum(terms) * scale, hookkit.save(count=len(terms))),
        lambda saved, grad: {"terms": tuple(100 * (i + 1) * grad for i in range(saved.count))},
        mode=mode,
    )
    found = gradients(thunder.jit(lambda x, y: total(x, y, x, scale=2.0)), vector(), vector())
    one = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(found[0], 400 * one)
    torch.testing.assert_close(found[1], 200 * one)


@modes
def test_needs_says_which_arguments_need_a_gradient(mode):
    def backward(saved, grad):
        factor = 100 if saved.needs["x"] and saved.needs["y"] else 3 if saved.needs["x"] else 7
        return {"x": factor * grad, "y": factor * grad}

    declare(product, lambda x, y, *, power=1: (x * y, hookkit.save()), backward, mode=mode)
    for needed, factor in (((True, True), 100), ((True, False), 3), ((False, True), 7)):
        x, y = (vector().detach().requires_grad_(n) for n in needed)
        for found in gradients(thunder.jit(product), x, y):
            torch.testing.assert_close(found, torch.full((4,), float(factor), dtype=torch.float64))


# A gradient that does not fit is refused where the call is traced, and where the backward runs.
@modes
@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda grad: {"z": grad}, ["'z'", "no argument"]),
        (lambda grad: {"x": grad[:2]}, ["of x", r"\[4\]"]),
        (lambda grad: {"x": 1.0}, ["of x", "float"]),
        (lambda grad: (grad,), ["expected 2", "got 1"]),
        (lambda grad: (grad, grad, grad), ["expected 2", "got 3"]),
        (lambda grad: {"power": grad}, ["power"]),
    ],
    ids=["unknown name", "wrong shape", "number", "too few", "too many", "no tensor"],
)
def test_gradients_that_do_not_fit_are_refused_by_name(result, words, mode):
    declare(
        product,
        lambda x, y, *, power=1: (x * y, hookkit.save()),
        lambda saved, grad: result(grad),
        mode=mode,
        name="misfit",
    )
    with pytest.raises(hookkit.GradientError) as raised:
        gradients(thunder.jit(lambda x, y: product(x, y, power=2)), vector(), vector())
    for word in ("misfit", *words):
        assert word.replace("\\", "") in str(raised.value)


# ----------------------------------------------------------------------------------------------------- save and mark


@modes
def test_residuals_of_any_kind_reach_the_backward(mode):
    def backward(saved, grad):
        assert saved.nothing is None
        total = saved.pair[0] + saved.named["m"]
        return {"x": saved.weight * grad * total * len(saved.text) * saved.call(saved.number)}

    def forward(x, y, *, power=1):
        middle = x.sin()
        return x * y, hookkit.save(
            pair=(x, y), named={"m": middle}, weight=100, text="ab", nothing=None, call=abs, number=-3
        )

    declare(product, forward, backward, mode=mode)
    x, y = vector(), vector()
    gx, _ = gradients(thunder.jit(product), x, y)
    torch.testing.assert_close(gx, 600 * (x + x.sin()).detach())


@modes
def test_outputs_marked_as_not_differentiable_require_no_grad(mode):
    def split(x):
        return x * 2, x.round()

    @hookkit.rule(split, mode=mode)
    def split_rule(x):
        rounded = x.round()
        return (x * 2, rounded), hookkit.mark(hookkit.save(), non_differentiable=[rounded])

    @split_rule.backward
    def _(saved, grad, none):
        return {"x": 100 * grad}

    jitted = thunder.jit(split)
    assert [o.requires_grad for o in jitted(vector())] == [True, False]
    torch.testing.assert_close(gradients(jitted, vector())[0], torch.full((4,), 100.0, dtype=torch.float64))


@modes
def test_an_unused_output_has_a_gradient_of_zeros_or_none(mode):
    def split(x):
        return x * 2, x * 3

    for materialize in (True, False):

        @hookkit.rule(split, mode="auto" if mode == "trace" else mode, register=False)
        def split_rule(x, materialize=materialize):
            return (x * 2, x * 3), hookkit.mark(hookkit.save(), materialize_grads=materialize)

        @split_rule.backward
        def _(saved, first, second):
            return {"x": 100 * first if second is None else 7 * first + second}

        with hookkit.use(split_rule), pytest.warns() if mode == "trace" and not materialize else no_warning():
            (found,) = gradients(thunder.jit(lambda x: split(x)[0]), vector())
        torch.testing.assert_close(found, torch.full((4,), 7.0 if materialize else 100.0, dtype=torch.float64))


def no_warning():
    import contextlib

    return contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------ when and meta


def test_a_condition_declines_by_metadata_and_arguments_and_the_next_rule_is_asked():
    def forward(x, y, *, power=1):
        return x * y, hookkit.save()

    general = declare(product, forward, lambda saved, grad: {"x": 100 * grad}, name="general")
    narrow = declare(product, forward, lambda saved, grad: {"x": 7 * grad}, name="narrow", priority=5)

    @narrow.when
    def _(x, y, *, power=1):
        return (x.ndim == 2 and power == 1) or hookkit.decline("only matrices")

    for shape, power, factor in (((4,), 1, 100.0), ((2, 2), 1, 7.0), ((2, 2), 3, 100.0)):
        program = thunder.jit(lambda x, y, p=power: product(x, y, power=p))
        (found, _) = gradients(program, vector(*shape), vector(*shape))
        assert found.flatten()[0] == factor
    general.unregister()
    (found, _) = gradients(thunder.jit(lambda x, y: product(x, y, power=1)), vector(), vector())
    assert found[0] not in (100.0, 7.0)


def test_a_meta_function_spares_the_call_and_is_checked_against_it():
    runs = []

    def resized(x, size):
        return x.new_ones(size)

    @hookkit.rule(resized, mode="opaque")
    def resized_rule(x, size):
        runs.append(size)
        return torch.ones(size, dtype=x.dtype), hookkit.save()

    @resized_rule.meta
    def _(x, size):
        return x.new_empty(3 if size == 7 else size)

    @resized_rule.backward
    def _(saved, grad):
        return {"x": 100 * grad.sum().expand(4)}

    jitted = thunder.jit(lambda x: resized(x, 5))
    (found,) = gradients(jitted, vector())
    assert runs == [5]
    torch.testing.assert_close(found, torch.full((4,), 500.0, dtype=torch.float64))
    with pytest.raises(hookkit.MetaError, match=r"\[7\].*\[3\]"):
        thunder.jit(lambda x: resized(x, 7))(vector())


def test_the_rule_is_in_force_wherever_the_program_reaches_its_target():
    declare(product, lambda x, y, *, power=1: (x * y, hookkit.save()), lambda saved, grad: {"x": 100 * grad})
    alias = product

    def program(x, y):
        first, second = [alias(a, y) for a in (x, x * 2)]
        return first + second + sum(map(product, [x], [y])) + (lambda f: f(x, y))(product)

    (found, _) = gradients(thunder.jit(program), vector(), vector())
    torch.testing.assert_close(found, torch.full((4,), 500.0, dtype=torch.float64))


def test_assert_same_agrees_where_the_rule_says_what_pytorch_says():
    declare(
        product,
        lambda x, y, *, power=1: (x * y, hookkit.save(x=x, y=y)),
        lambda saved, grad: {"x": grad * saved.y, "y": grad * saved.x},
    )
    assert_same(product, vector(), vector())


@pytest.mark.parametrize("mode", ["auto", "opaque"])
def test_an_argument_left_at_its_default_needs_no_gradient(mode):
    def shifted(x, scale=2.0, shift=None):
        return x * scale if shift is None else x * scale + shift

    @hookkit.rule(shifted, mode=mode, register=False)
    def rule(x, scale=2.0, shift=None):
        return shifted(x, scale, shift), hookkit.save(scale=scale)

    @rule.backward
    def _(saved, grad):
        return {"x": 100 * grad * saved.scale, "shift": 100 * grad if saved.needs["shift"] else None}

    with hookkit.use(rule):
        x, shift = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        thunder.jit(lambda x: shifted(x, 3.0))(x).sum().backward()
        assert x.grad.tolist() == [300.0] * 3
        thunder.jit(lambda x, s: shifted(x, shift=s))(x, shift).sum().backward()
        assert shift.grad.tolist() == [100.0] * 3
