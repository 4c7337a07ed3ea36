"""In-place operations of a program around custom Functions: values, gradients, and what becomes of the inputs."""

import functools

import pytest
import thunder
import torch
from agreement import assert_agrees, assert_same, run
from thunder.dynamo import thunderfx
from torch.autograd import Function

import hookkit


class Traced(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 100 * grad * x


class Opaque(Traced):
    pass


class OpaqueWithoutResiduals(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad


def chain_on_an_input(apply, x, w):
    x.add_(1).sin_().mul_(5)
    return apply(x * w), x


def chain_on_an_input_that_comes_to_require_grad(apply, x, w):
    x.add_(1).mul_(w)
    return apply(x) * 2


def input_that_a_gradient_reads(apply, x, w):
    x.mul_(w).sin_()
    return apply(x)


def view_of_an_input(apply, x, w):
    v = x.view(2)
    v.add_(1).mul_(3)
    return apply(x * w)


def temporary_under_two_names(apply, x, w):
    h = w * 1
    y = h.add_(x)
    y.sin_()
    h.mul_(2)
    return apply(h) + y


def result_of_the_call(apply, x, w):
    return apply(w * 1).mul_(2).cos_() * x


def argument_of_the_call_afterwards(apply, x, w):
    h = w * 1
    y = apply(h)
    h.mul_(h * 2).sin_()
    return h + y


def input_of_the_call_afterwards(apply, x, w):
    x.mul_(w)
    y = apply(x)
    x.add_(1)
    return y * x


PROGRAMS = [
    chain_on_an_input,
    chain_on_an_input_that_comes_to_require_grad,
    input_that_a_gradient_reads,
    view_of_an_input,
    temporary_under_two_names,
    result_of_the_call,
    argument_of_the_call_afterwards,
    input_of_the_call_afterwards,
]


@pytest.fixture(autouse=True)
def opaque_functions():
    rule = hookkit.rule([Opaque, OpaqueWithoutResiduals], mode="opaque", register=False)
    with hookkit.use(rule):
        yield


def outcome(program, inputs):
    """Output and gradients, with the inputs as they are afterwards; or what is raised."""

    def observed(x, w):
        x = x.clone()
        return program(x, w), x.detach()

    try:
        return run(observed, inputs)
    except RuntimeError as error:
        return type(error), str(error)[:100]


@pytest.mark.parametrize("function", [Traced, Opaque, OpaqueWithoutResiduals], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_in_place_operations_are_as_in_eager(program, function):
    inputs = torch.tensor([0.5, 0.7]), torch.tensor([2.0, 3.0], requires_grad=True)
    program = functools.partial(program, function.apply)
    expected = outcome(program, inputs)
    found = outcome(thunder.jit(lambda x, w: program(x, w)), inputs)
    if isinstance(expected, tuple):
        assert "modified by an inplace operation" in expected[1]
        assert found == expected
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.copy_(x)], ids=["mul_", "copy_"])
def test_a_leaf_that_requires_grad_is_not_changed(change):
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        thunder.jit(change)(torch.ones(2, requires_grad=True))


def test_a_leaf_is_changed_with_grad_mode_off():
    def program(x):
        with torch.no_grad():
            x.mul_(2)
        return None

    x = torch.ones(2, requires_grad=True)
    thunder.jit(program)(x)
    torch.testing.assert_close(x.detach(), torch.full((2,), 2.0))


def test_a_leaf_that_is_changed_with_grad_mode_off_is_not_used_without_its_gradient():
    def program(x):
        with torch.no_grad():
            x.mul_(2)
        return Traced.apply(x)

    with pytest.raises(hookkit.HookError, match="mul_ changes a tensor that requires grad in place with grad mode off"):
        thunder.jit(program)(torch.ones(2, requires_grad=True))


def test_an_input_that_is_changed_and_handed_on_under_another_name_keeps_its_gradient():
    def program(x, y):
        x += y
        return torch.tanh(x.to(x.dtype)), x.view(2, 2)

    def outcome(function):
        leaf, other = torch.linspace(-1, 1, 4, requires_grad=True), torch.linspace(0, 1, 4, requires_grad=True)
        first, second = function(leaf * 2, other)
        (first.sin().sum() + second.cos().sum()).backward()
        return first, second, leaf.grad, other.grad

    torch.testing.assert_close(outcome(thunder.jit(program)), outcome(program))


@pytest.mark.parametrize("used", ["input", "view"])
def test_an_input_with_a_view_is_changed(used):
    def program(x, y):
        view = x.view(2, 2)
        x += y
        return torch.tanh(x if used == "input" else view)

    def outcome(function):
        leaf = torch.linspace(-1, 1, 4, requires_grad=True)
        given = leaf * 2
        returned = function(given, torch.ones(4))
        returned.sum().backward()
        return returned, given, leaf.grad

    torch.testing.assert_close(outcome(thunder.jit(program)), outcome(program))


def test_an_input_that_may_have_a_view_is_not_changed_without_its_gradient():
    def program(x, y):
        view = x.reshape(4)
        x += y
        return torch.tanh(view)

    leaf = torch.linspace(-1, 1, 4, requires_grad=True).view(2, 2)
    with pytest.raises(hookkit.HookError, match="requires grad and of which there is a view"):
        thunder.jit(program)(leaf * 2, torch.ones(4).view(2, 2))


# ---------------------------------------------------------------------------------------------------------------- views


def view_then_base(h):
    v = h.view(-1)
    v.mul_(3)
    h.add_(1)
    return h


def base_then_view(h):
    v = h.view(-1)
    h.mul_(3)
    return v * v


def transposed(h):
    h.t().mul_(torch.arange(1.0, 7).reshape(3, 2))
    h.mT.add_(1)
    return h * h


def permuted(h):
    h.permute(1, 0).unsqueeze(1).squeeze(1)[1:].mul_(3)
    h.movedim(0, 1)[0].add_(h[0, 1])
    return h * h


def indexed(h):
    row, element = h[0], h[1, 2]
    row.mul_(3)
    element.add_(row.sum())
    return h * h, row * element


def sliced(h):
    h[:, ::2].mul_(3)
    h[..., None, 1:].add_(1)
    return h * h


def diagonal(h):
    torch.diagonal(h).mul_(3)
    return h * h


def unflattened(h):
    h.unflatten(1, (3, 1)).mul_(3)
    return h * h


def reshaped_into_more_dimensions(h):
    h.reshape(2, 1, 3, 1).mul_(3)
    return h * h


def view_of_the_same_shape(h):
    h.view_as(h).mul_(3)
    h.to(h.dtype).add_(1)
    return h * h


def expanded_base(h):
    v = h.unsqueeze(0).expand(2, 2, 3)
    h.mul_(3)
    return v * v


def chain_of_views(h):
    v = h.view(3, 2).t()[1]
    w = v[:2]
    w.mul_(3)
    v.add_(w.sum())
    h.sin_()
    return h * v.sum(), w


def assigned(h):
    row = h[0]
    h[0] = row * 2
    row[1:] = row[:-1] * 2
    h[:, 1] *= 3
    h[1].copy_(row)
    return h * row.sum()


def assigned_by_mask(h):
    row = h[1]
    h[h > 0] = 0.5
    return h * row


def filled(h):
    h[0].zero_()
    h[:, 1].fill_(2.0)
    h[1].clamp_(0, 1)
    return h * h


def constant_that_comes_to_require_grad(h):
    m = torch.zeros(3, 3)
    for i in range(2):
        m[i] = h[i]
        m[2].add_(m[i])
    return m * m


def constant_given_to_a_function(h):
    m = torch.zeros(2, 3)
    m[0].add_(h[0])
    return Traced.apply(m)


def result_of_a_function(h):
    y = Traced.apply(h)
    y[0].mul_(2)
    return Traced.apply(y) * y.view(-1)[0]


def view_given_to_a_function(h):
    v = h[0]
    h.mul_(2)
    return Traced.apply(v) + h


def detached(h):
    h.detach().mul_(3)
    return h * 2


def advanced_index(h):
    v = h[[0, 1]]
    v.mul_(3)
    return h * v


VIEWS = [
    view_then_base,
    base_then_view,
    transposed,
    permuted,
    indexed,
    sliced,
    diagonal,
    unflattened,
    reshaped_into_more_dimensions,
    view_of_the_same_shape,
    expanded_base,
    chain_of_views,
    assigned,
    assigned_by_mask,
    filled,
    constant_that_comes_to_require_grad,
    constant_given_to_a_function,
    result_of_a_function,
    view_given_to_a_function,
    detached,
    advanced_index,
]


def matrix():
    return torch.linspace(-1, 1.3, 6).reshape(2, 3).requires_grad_()


@pytest.mark.parametrize("program", VIEWS, ids=lambda p: p.__name__)
def test_what_a_view_shares_is_changed_and_differentiated(program):
    assert_agrees(lambda x: program(x * 1), matrix())


@pytest.mark.parametrize("program", [p for p in VIEWS if p is not detached], ids=lambda p: p.__name__)
def test_an_input_is_changed_through_a_view(program):
    def outcome(function):
        leaf = matrix()
        given = leaf * 2
        returned = function(given)
        roots = [returned] if isinstance(returned, torch.Tensor) else [*returned]
        torch.autograd.backward(roots, [torch.linspace(1, 2, r.numel()).reshape(r.shape) for r in roots])
        return returned, given, leaf.grad

    torch.testing.assert_close(outcome(thunder.jit(lambda x: program(x))), outcome(program))


@pytest.mark.parametrize("keep", [lambda h: OpaqueWithoutResiduals.apply(h[0]), lambda h: Opaque.apply(h[0])])
def test_a_view_that_an_opaque_call_keeps_is_watched(keep):
    def program(x):
        h = x * 1
        y = keep(h)
        h.view(-1).mul_(2)
        return y + h

    def outcome(function):
        try:
            return run(function, (matrix(),))
        except RuntimeError as error:
            return type(error), str(error)[:100]

    expected, found = outcome(program), outcome(thunder.jit(program))
    if isinstance(expected, tuple):
        assert "modified by an inplace operation" in expected[1]
        assert found == expected
    else:
        assert_same(found, expected)


def chunks(h):
    first, second = h.chunk(2, 0)
    first.mul_(3)
    return h * second


def chunks_of_what_is_changed(h):
    first, second = h.chunk(2, 0)
    h.mul_(3)
    return first * second


def overlapping(h):
    h.unsqueeze(0).expand(2, 2, 3).mul_(3)
    return h * h


def reshaped(h):
    h.reshape(-1).mul_(3)
    return h * h


def contiguous(h):
    v = h.contiguous()
    h.mul_(3)
    return v * v


def test_an_input_that_is_changed_through_a_detached_view_is_not_used_without_its_gradient():
    with pytest.raises(hookkit.HookError, match="mul_ changes a tensor in place that is a view, or has one"):
        thunder.jit(lambda x: detached(x))(matrix() * 2)


@pytest.mark.parametrize(
    "program", [chunks, chunks_of_what_is_changed, overlapping, reshaped, contiguous], ids=lambda p: p.__name__
)
def test_what_may_share_memory_or_must_not_be_changed_is_refused_with_the_line(program):
    with pytest.raises(hookkit.HookError, match=r"changes a tensor in place .*test_in_place\.py:\d+"):
        thunder.jit(lambda x: program(x * 1))(matrix())


@pytest.mark.parametrize("share", [lambda h: h, lambda h: h[0]], ids=["itself", "view"])
def test_an_input_that_shares_memory_with_another_is_not_changed_without_its_gradient(share):
    def program(x, y):
        x.view(-1).mul_(2)
        return y * 1

    h = matrix() * 1
    with pytest.raises(hookkit.HookError, match=r"shares memory with another one \(.*test_in_place\.py:\d+"):
        thunder.jit(program)(h, share(h))
    torch.testing.assert_close(h, matrix())


@pytest.mark.parametrize("share", [torch.Tensor.detach, lambda h: h[:1].detach()], ids=["detached", "a part of it"])
@pytest.mark.parametrize("is_first", [True, False])
def test_inputs_that_share_memory_are_two_where_something_else_is_changed(share, is_first):
    def program(x, y, buffer):
        buffer.add_(1)
        return x * y.sum(0).sin() + buffer

    compiled = thunder.jit(program)
    gradients = []
    for function in (program, compiled):
        leaf = matrix()
        h, buffer = leaf * 1, torch.zeros(())
        output = function(*((share(h), h) if is_first else (h, share(h))), buffer)
        output.square().sum().backward()
        gradients.append((output.detach(), leaf.grad, buffer))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_an_input_is_not_changed_that_shares_memory_with_one_that_gets_a_gradient():
    def program(x, y):
        y.add_(1)
        return x * 2

    h = matrix() * 1
    with pytest.raises(hookkit.HookError, match=r"gets a gradient where the other gets none"):
        thunder.jit(program)(h, h.detach())


def test_a_detached_tensor_in_a_batch_norm_under_thunderfx():
    norm = torch.nn.BatchNorm1d(3)

    def program(x):
        y = x.tanh()
        return y * norm(y.detach()).sigmoid()

    compiled = thunderfx(program)
    assert_same(run(compiled, (matrix(),)), run(program, (matrix(),)))
    assert_same(run(compiled, (matrix(),)), run(program, (matrix(),)))


def test_a_buffer_without_grad_is_written_in_place():
    def program(x, cache):
        cache[:, 1:].copy_(x[:, 1:])
        return cache * 2

    cache = torch.zeros(2, 3)
    jitted = thunder.jit(program)
    torch.testing.assert_close(jitted(matrix().detach(), cache), 2 * cache)
    assert "scatter" not in str(thunder.last_traces(jitted)[-1])
    torch.testing.assert_close(cache[:, 1:], matrix().detach()[:, 1:])


def test_what_is_written_over_has_a_gradient_of_zeros():
    def program(x, y):
        h = x * 2
        h.copy_(y)
        return h * 3

    assert_agrees(program, matrix(), matrix())


@pytest.mark.xfail(reason="a compiled program cannot make a tensor from outside a part of its graph", strict=True)
def test_what_is_computed_outside_from_an_input_that_was_changed_has_its_gradient():
    def outcome(function):
        leaf = matrix()
        given = leaf * 2
        (function(given) + given).sum().backward()
        return leaf.grad

    def program(x):
        return x.mul_(3) * 1

    torch.testing.assert_close(outcome(thunder.jit(program)), outcome(program))


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad


@pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning")
@pytest.mark.parametrize("change", [lambda h: h.mul_(3), lambda h: Doubled.apply(h)], ids=["operation", "Function"])
def test_what_is_returned_before_and_after_a_change_is_one_tensor(change):
    def program(x):
        h = x * 2
        return h, change(h), h

    assert_agrees(program, matrix())
    first, second, third = thunder.jit(program)(matrix())
    assert first is second is third


@pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning")
def test_tensors_without_elements_share_no_memory():
    def program(x, numbers):
        changed, _ = Doubled.apply(numbers), x
        return x * 2, changed

    assert_agrees(program, torch.ones(0, 3, requires_grad=True), torch.ones(0, 3, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning")
@pytest.mark.xfail(strict=True, reason="an opaque call gets a copy of what it changes, and ctx keeps that")
def test_an_attribute_of_ctx_that_is_changed_after_the_call_has_its_last_value():
    class Kept(Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            ctx.kept = x
            return x

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad * ctx.kept

    def program(x):
        return Kept.apply(Kept.apply(x * 2))

    assert_agrees(program, matrix())


def test_what_an_opaque_call_returns_twice_is_not_changed_with_grad_mode_off():
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            return y, y

        @staticmethod
        def backward(ctx, first, second):
            return 100 * second

    def program(x):
        first, second = Twice.apply(x)
        with torch.no_grad():
            second.mul_(3)
        return first * 1

    rule, refused = (
        hookkit.rule(Twice, mode="opaque", register=False),
        pytest.raises(hookkit.HookError, match="in place"),
    )
    with hookkit.use(rule), refused:
        thunder.jit(program)(matrix())


@pytest.mark.parametrize("second", [2.0, lambda x, y: [y * 1, x * 1]], ids=["number", "list"])
def test_a_list_of_tensors_is_changed_by_one_operation(second):
    def program(x, y):
        both = [x * 1, y * 1]
        returned = torch._foreach_mul_(both, second if isinstance(second, float) else second(y, x))
        return both[0] + 1, both[1] * x, [t * 2 for t in returned or both]

    leaf = torch.linspace(-1, 1, 3).requires_grad_()
    assert_agrees(program, leaf, torch.linspace(1, 2, 3).requires_grad_())
    assert_agrees(program, leaf.detach(), leaf.detach() + 1)


def test_what_an_opaque_call_returns_beside_its_outputs_is_not_changed_without_their_changing():
    class Kept(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            return y, [y]

        @staticmethod
        def backward(ctx, grad, _):
            return 100 * grad

    def program(x):
        y, (kept,) = Kept.apply(x)
        y.add_(1)
        return y * kept.sigmoid()

    assert_agrees(program, matrix())
    with (
        hookkit.use(hookkit.rule(Kept, mode="opaque", register=False)),
        pytest.raises(hookkit.HookError, match="add_ changes in place what the result of Kept shares"),
    ):
        thunder.jit(program)(matrix())


@pytest.mark.parametrize("way", [thunder.jit, thunder.dynamo.thunderfx], ids=["jit", "thunderfx"])
def test_inputs_that_share_a_part_of_their_memory_are_not_taken_for_one(way):
    def program(a, b):
        a.add_(1)
        return a * 2, b * 3

    compiled = way(program)
    whole = torch.arange(6.0)
    compiled(whole, whole.view(2, 3))
    torch.testing.assert_close(whole, torch.arange(6.0) + 1)
    for first, second in ((slice(0, 4), slice(2, 6)), (slice(0, 5, 2), slice(0, 3)), (slice(0, 3), slice(3, 6))):
        with pytest.raises(hookkit.HookError, match="other places in that memory"):
            compiled(whole[first], whole[second])
    read = way(lambda a, b: (a * 2, b * 3))
    torch.testing.assert_close(read(whole[:4], whole[2:]), (whole[:4] * 2, whole[2:] * 3))
