"""Errors about providers: each names the provider's file and line beside the call's, and says what is missing."""

import re

import pytest
import thunder
import torch

import hookkit

X = torch.ones(3, dtype=torch.float64)


def product(x, y):
    return x * y


def forward(x, y):
    return x * y, hookkit.save(x=x, y=y)


def program(x, y):
    return product(x, y)


CALL = f"product() at {__file__}:{program.__code__.co_firstlineno + 1}"


def run(backward, mode, meta=None):
    """Compiles and differentiates the program under a rule with these providers."""
    rule = hookkit.rule(product, mode=mode)(forward)
    rule.backward(backward)
    if meta is not None:
        rule.meta(meta)
    inputs = X.clone().requires_grad_(), X.clone().requires_grad_()
    return torch.autograd.grad(thunder.jit(program)(*inputs).sum(), inputs)


def place(function):
    return f"{__file__}:{function.__code__.co_firstlineno}"


def nothing(value):
    return value


WRONG = {
    "too many parameters": (
        lambda saved, a, b: {},
        "for CALL takes (saved, a, b), and the call gives it the residuals and the",
    ),
    "None on one path": (lambda saved, a: nothing(None), "for CALL returned None: is its return statement missing?"),
    "an integer gradient": (
        lambda saved, a: {"x": a.long()},
        "returned a gradient of x with dtype torch.int64; expected",
    ),
    "a gradient of bools": (lambda saved, a: {"x": a > 0}, "returned a gradient of x with dtype torch.bool; expected"),
    "no such argument": (lambda saved, a: {"z": a}, "for CALL returned a gradient for 'z', which is no argument"),
    "another shape": (lambda saved, a: {"x": a[:2]}, "for CALL returned a gradient of x with shape [2]; expected"),
    "no tensor": (lambda saved, a: {"x": "s"}, "'s' (str)"),
    "too many gradients": (
        lambda saved, a: (a, a, a),
        "for CALL returned an incorrect number of gradients (expected 2",
    ),
}


@pytest.mark.parametrize("mode", ["trace", "opaque"])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_about_a_backward_provider_names_its_place_and_the_calls(wrong, mode):
    backward, message = WRONG[wrong]
    with pytest.raises(hookkit.GradientError) as caught:
        run(backward, mode)
    assert message.replace("CALL", CALL) in str(caught.value)
    assert f"the backward provider of the rule forward ({place(backward)})" in str(caught.value)
    assert CALL in str(caught.value)


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("mode", ["auto", "opaque"])
def test_what_a_backward_raises_has_a_note_with_both_places(mode):
    with pytest.raises(
        AttributeError, match=r"no residual is called 'z'; hookkit.save\(...\) was given x, y"
    ) as caught:
        run(lambda saved, grad: {"x": saved.z}, mode)
    (note,) = caught.value.__notes__
    assert note == f"raised in {CALL}, which hookkit's rule forward, declared at {place(forward)}, takes over"


def test_a_meta_function_that_raises_is_named_with_its_place_and_the_calls():
    def meta(x, y):
        return x.no_such_attribute

    with pytest.raises(hookkit.MetaError) as caught:
        run(lambda saved, grad: {}, "opaque", meta)
    assert f"the meta function of the rule forward ({place(meta)}) raised AttributeError" in str(caught.value)
    assert CALL in str(caught.value)


def forgetful(x, y):
    x * y


def forgetful_of_one(x):
    x * 2


class TestAMissingReturnIsSaidWhereTheProviderIsDeclared:
    def test_of_a_forward_provider(self):
        message = rf"the forward provider of the rule forgetful \({re.escape(place(forgetful))}\) returns None"
        with pytest.raises(hookkit.RegistrationError, match=message):
            hookkit.rule(product)(forgetful)

    def test_of_a_forward_provider_for_a_function_of_torch(self):
        with pytest.raises(hookkit.RegistrationError, match=r"its target torch.exp does not: is its return statement"):
            hookkit.rule(torch.exp)(forgetful_of_one)

    def test_of_a_forward_provider_for_a_function_class(self):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

        with pytest.raises(hookkit.RegistrationError, match="is its return statement missing"):
            hookkit.rule(Twice)(forgetful_of_one)

    def test_of_a_backward_provider(self):
        rule = hookkit.rule(product)(forward)
        with pytest.raises(
            hookkit.RegistrationError, match=r"the backward provider of the rule forward \(.*\) returns None"
        ):
            rule.backward(forgetful)

    def test_of_a_meta_function(self):
        rule = hookkit.rule(product, mode="opaque")
        with pytest.raises(
            hookkit.RegistrationError, match=r"the meta function of the rule product \(.*\) returns None"
        ):
            rule.meta(forgetful)

    def test_of_a_condition(self):
        rule = hookkit.rule(product)(forward)
        with pytest.raises(hookkit.RegistrationError, match="so that the rule never takes a call"):
            rule.when(forgetful)

    def test_not_where_the_target_returns_nothing_or_a_path_raises(self):
        def log(x):
            print(x)

        def silent(x):
            pass

        def refuse(x, y):
            raise NotImplementedError

        hookkit.rule(log)(silent)
        hookkit.rule(product)(refuse)
        hookkit.rule(torch.exp)(lambda x: None)  # that lacks no return


def test_a_condition_without_a_return_on_one_path_says_so_where_it_declines():
    rule = hookkit.rule(product)(forward)
    rule.backward(lambda saved, grad: {})

    @rule.when
    def _(x, y):
        if x.ndim > 7:
            return True

    (call,) = hookkit.explain(program, X, X).calls
    assert call.declined == {"forward": "its .when returned None"}


@pytest.mark.parametrize(
    ("provider", "message"),
    [(lambda x: x, "no place for the positional argument 'y'"), (lambda x, y, z: x, "the target never gives 'z'")],
)
@pytest.mark.parametrize("kind", ["forward", "meta", "when"])
def test_too_many_or_too_few_parameters_are_refused_where_the_provider_is_declared(kind, provider, message):
    with pytest.raises(hookkit.RegistrationError, match=message) as caught:
        if kind == "forward":
            hookkit.rule(product)(provider)
        else:
            getattr(hookkit.rule(product, mode="opaque")(forward), kind)(provider)
    assert f"declared at {place(provider)}" in str(caught.value)


def test_a_backward_provider_without_a_gradient_is_refused_where_it_is_declared():
    rule = hookkit.rule(product)(forward)
    with pytest.raises(hookkit.RegistrationError, match=r"it takes the residuals and the gradient of each output"):
        rule.backward(lambda saved: {})


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning")
@pytest.mark.parametrize("mode", ["auto", "trace", "opaque"])
def test_what_a_backward_raises_by_itself_reaches_the_user_as_it_is_in_every_mode(mode):
    names, rows = ["x", "y"], []

    def backward(saved, grad):
        return {name: grad * rows[place] for place, name in enumerate(names)}

    with pytest.raises(IndexError, match="list index out of range"):
        run(backward, mode)


def generator(x, y):
    yield x


async def coroutine(x, y):
    return x


class Product:
    def __init__(self, x, y):
        pass


@pytest.mark.parametrize("provider", [generator, coroutine, Product])
def test_what_is_called_and_returns_nothing_of_use_is_refused_where_it_is_declared(provider):
    rule = hookkit.rule(product, mode="opaque", register=False)(forward)
    for declare in (hookkit.rule(product), rule.backward, rule.meta, rule.when):
        with pytest.raises(hookkit.RegistrationError, match=r"is a (generator|coroutine|class); expected a function"):
            declare(provider)
    hookkit.rule(product)(forward)


ANSWERS = {"text": "no", "decline": hookkit.decline, "NotImplemented": NotImplemented, "bytes": b""}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("kind", ["condition", "predicate"])
def test_an_answer_that_is_neither_true_nor_false_is_refused(kind, answer):
    if kind == "condition":
        hookkit.rule(product)(lambda x, y: x).when(lambda x, y: answer)
    else:
        hookkit.rule(hookkit.where(lambda call: call.callable is product and answer))(lambda x, y: x)
    with pytest.raises(hookkit.HookError, match=r"which is neither true nor false"):
        thunder.jit(program)(X, X)


def test_options_of_another_kind_are_refused():
    for name in (3, ""):
        with pytest.raises(hookkit.RegistrationError, match="expected a string"):
            hookkit.rule(product, name=name)
    with pytest.raises(hookkit.RegistrationError, match="expected the reason"):
        hookkit.decline(3)


class Holder:
    @staticmethod
    def product(x):
        return x * 2


compiled = torch.compile(lambda x: x * 2, backend="eager")


@pytest.mark.parametrize(
    ("target", "call"),
    [(Holder.__dict__["product"], lambda x: Holder.product(x)), (compiled, lambda x: compiled(x))],
    ids=["a staticmethod of the class's body", "what torch.compile returned"],
)
def test_a_target_that_is_called_by_what_is_in_it_is_taken(target, call):
    hookkit.rule(target)(lambda x: x * 1000)
    torch.testing.assert_close(thunder.jit(lambda x: call(x))(X), X * 1000)
