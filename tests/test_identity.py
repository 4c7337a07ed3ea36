"""What a program is told of a tensor as an object of Python is what eager PyTorch tells (mends.tensor_identity)."""

import pytest
import thunder
import torch
from agreement import assert_agrees
from torch.distributions import Normal

import hookkit


def matrix():
    return torch.linspace(0.1, 1.2, 12).reshape(3, 4).requires_grad_()


QUESTIONS = {
    "is_tensor_like": torch.overrides.is_tensor_like,
    "is_tensor": torch.is_tensor,
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "isinstance of several": lambda x: isinstance(x, (int, torch.Tensor)),
    "isinstance of another": lambda x: isinstance(x, (int, float)),
    "is a parameter": lambda x: isinstance(x, torch.nn.Parameter),
    "type": lambda x: type(x) is torch.Tensor,
    "__class__": lambda x: x.__class__ is torch.Tensor,
    "hasattr": lambda x: hasattr(x, "shape") and not hasattr(x, "no_such_attribute"),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("made", [lambda x: x, torch.sin], ids=["an input", "made by the program"])
def test_a_branch_on_what_a_tensor_is_is_eagers(ask, made):
    assert_agrees(lambda x: x * 2 if ask(made(x)) else x * 3, matrix())


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_the_same_of_a_parameter(ask):
    class Asks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight * (2 if ask(self.weight) else 3)

    assert_agrees(Asks(), matrix())


def test_a_program_is_compiled_again_for_an_input_of_another_class():
    jitted = thunder.jit(lambda x: x * 2 if isinstance(x, torch.nn.Parameter) else x * 3)
    assert jitted(torch.ones(1)).item() == 3
    assert jitted(torch.nn.Parameter(torch.ones(1))).item() == 2
    assert jitted(torch.ones(1)).item() == 3


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "batch_first": True}], ids=str)
def test_a_recurrent_module_gives_its_parameters_their_gradients(kind, options):
    assert_agrees(kind(4, 3, **options), torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_())


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_a_recurrent_cell_does(kind):
    assert_agrees(kind(4, 3), matrix())


def test_a_distribution_that_checks_no_values_is_differentiated():
    assert_agrees(lambda x: Normal(x, 1.5, validate_args=False).log_prob(x * 2), matrix())


def test_a_distribution_that_checks_values_is_refused():
    with pytest.raises(NotImplementedError, match="data dependency"):
        thunder.jit(lambda x: Normal(x, 1.5, validate_args=True).log_prob(x))(matrix())


def test_a_leaf_is_asked_for_outside():
    with pytest.raises(hookkit.HookError, match="is_leaf of an argument that requires grad is not supported"):
        thunder.jit(lambda x: x * 2 if x.is_leaf else x)(matrix())


def test_a_tensor_is_one_of_the_class_that_it_has():
    assert_agrees(lambda x: (x * 2).as_subclass(torch.Tensor) * 3, matrix())


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda x: x.as_subclass(torch.nn.Parameter) * 2,
            r"as_subclass\(\) at .*test_identity.py:\d+ is not supported",
        ),
        (lambda x: x * 2 if x.view(-1)._base is x else x, "_base of a tensor is not supported"),
    ],
)
def test_what_a_tensor_is_besides_is_refused(ask, words):
    with pytest.raises(hookkit.HookError, match=words):
        thunder.jit(ask)(matrix())


def test_a_module_with_a_parametrisation_of_several_tensors():
    torch.manual_seed(0)
    assert_agrees(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)), matrix())


@pytest.mark.filterwarnings("ignore::hookkit.OpaqueFallbackWarning", "ignore::hookkit.MetaWarning")
def test_a_function_may_make_a_generator():
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            generator = torch.Generator(device=x.device)
            generator.manual_seed(3)
            return x + torch.rand(x.shape, generator=generator)

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    jitted = assert_agrees(Noise.apply, matrix())
    assert torch.equal(jitted(matrix()), Noise.apply(matrix()))
