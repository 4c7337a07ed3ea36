"""What conditions, predicates and meta functions see of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import thunder
import torch

import hookkit


def double(x: Any, *others: Any, **options: Any) -> Any:
    return 2 * x


@pytest.fixture
def ask() -> Iterator[Any]:
    """Has a function asked about the first argument of a call, in a condition, and returns its answer."""
    rules = []

    def ask(question: Any, *args: Any, program: Any = double) -> Any:
        answers: list[Any] = []
        made = hookkit.rule(double, register=False)(lambda x, *others, **options: 200 * x)
        made.when(lambda x, *others, **options: answers.append(question(x, *others)) or True)
        rules.append(made)
        with hookkit.use(made):
            thunder.jit(lambda *a: program(*a))(*args)
        return answers[0]

    yield ask


QUESTIONS = {
    "dtype": lambda x: x.dtype == torch.float64,
    "dtype is": lambda x: x.dtype is torch.float64,
    "device": lambda x: x.device == torch.device("cpu"),
    "device type": lambda x: x.device.type,
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "is_tensor": torch.is_tensor,
    "finfo": lambda x: torch.finfo(x.dtype).bits,
    "layout": lambda x: x.layout,
    "is_floating_point": torch.is_floating_point,
    "its method": lambda x: x.is_floating_point(),
    "is_complex": lambda x: x.is_complex(),
    "numel": lambda x: (x.numel(), torch.numel(x), x.nelement()),
    "shape": lambda x: (type(x.shape), x.shape, x.size(), x.size(0), x.shape.numel(), len(x), x.ndim, x.dim()),
    "bytes": lambda x: (x.element_size(), x.itemsize, x.nbytes),
    "kinds": lambda x: (x.is_cuda, x.is_sparse, x.is_meta, x.is_quantized, x.is_nested),
    "requires_grad": lambda x: x.requires_grad,
    "result_type": lambda x: torch.result_type(x, 1.0),
    "parameter": lambda x: isinstance(x, torch.nn.Parameter),
    "promotion": lambda x: torch.promote_types(x.dtype, torch.float32),
    "types": lambda x: x.dtype.is_floating_point,
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("make", [torch.ones, lambda *shape, **o: torch.nn.Parameter(torch.ones(*shape, **o))])
def test_metadata_is_what_eager_pytorch_says(ask: Any, question: Any, make: Any) -> None:
    x = make(3, 4, dtype=torch.float64)
    assert ask(question, x) == question(x)


def test_an_intermediate_says_whether_it_requires_grad(ask: Any) -> None:
    for needs in (True, False):
        x = torch.ones(3, requires_grad=needs)
        assert ask(lambda y: (y.requires_grad, y.dtype), x, program=lambda x: double(x.double() * 2)) == (
            needs,
            torch.float64,
        )


def test_tensors_in_containers_are_seen_so_too(ask: Any) -> None:
    question = lambda _, pair: [t.dtype for t in pair]  # noqa: E731
    seen = ask(question, torch.ones(2), program=lambda x: double(x, [x, x.half()]))
    assert seen == [torch.float32, torch.float16]


def triple(x: Any) -> Any:
    return 3 * x


def test_one_tensor_given_twice_is_one_object(ask: Any) -> None:
    assert ask(lambda x, y: x is y, torch.ones(2), program=lambda x: double(x, x))


READING = {
    "item": lambda x: x.item(),
    "bool": bool,
    "float": float,
    "comparison": lambda x: (x > 0).all(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "index": lambda x: x[0],
    "iteration": list,
    "arithmetic": lambda x: x + 1,
    "torch function": torch.isnan,
    "equal": lambda x: torch.equal(x, x),
    "in": lambda x: 1.0 in x,
}


@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_reading_values_is_refused_in_words(ask: Any, read: Any) -> None:
    with pytest.raises(hookkit.HookError, match=r"float32\[1\] on cpu only shape, dtype, device.*no values"):
        ask(read, torch.ones(1))


@pytest.mark.parametrize("name", ["stride", "is_contiguous", "data_ptr", "storage_offset"])
def test_the_memory_layout_is_refused_with_the_reason(ask: Any, name: str) -> None:
    with pytest.raises(hookkit.HookError, match=rf"{name}\(\) of the tensor float32\[2\].*all memory layouts"):
        ask(lambda x: getattr(x, name)(), torch.ones(2))


def test_a_predicate_sees_torchs_dtypes() -> None:
    def is_double(call: hookkit.Call) -> bool:
        return (
            call.callable is double and isinstance(call.args[0], torch.Tensor) and call.args[0].dtype is torch.float64
        )

    rule = hookkit.rule(hookkit.where(is_double), register=False)(lambda x: 200 * x)
    program = thunder.jit(lambda x: double(x))
    with hookkit.use(rule):
        assert program(torch.ones(2, dtype=torch.float64))[0] == 200
        assert program(torch.ones(2))[0] == 2


@pytest.mark.filterwarnings("ignore::hookkit.errors.OpaqueFallbackWarning")
@pytest.mark.parametrize("mode", ["auto", "opaque"])
def test_a_call_that_is_passed_has_torchs_metadata_in_every_provider(mode: Any) -> None:
    seen = {}

    @hookkit.rule(triple, register=False, mode=mode, pass_call=True)
    def rule(call: hookkit.Call, x: Any) -> Any:
        seen["forward"] = call.args[0].dtype, x.dtype
        return 200 * x

    @rule.meta
    def _(call: hookkit.Call, x: Any) -> Any:
        seen["meta"] = call.args[0].dtype, x.dtype
        return torch.empty_like(x)

    @rule.when
    def _(call: hookkit.Call, x: Any) -> Any:
        seen["when"] = call.args[0].dtype, x.dtype
        return call.args[0] is x

    with hookkit.use(rule):
        thunder.jit(lambda x: triple(x))(torch.ones(2, dtype=torch.float64))
    expected = dict.fromkeys(["when", "meta", "forward"] if mode == "opaque" else ["when"], (torch.float64,) * 2)
    assert expected.items() <= seen.items()


def test_looking_at_a_callable_alone_makes_no_inputs() -> None:
    rule = hookkit.rule(hookkit.where(lambda call: call.name == "nothing"), register=False)(lambda *a: a)
    with hookkit.use(rule):
        program = thunder.jit(lambda x, y: double(x, y))
        program(torch.ones(2), torch.ones(2))
    assert len(thunder.last_traces(program)[0].args) == 1
