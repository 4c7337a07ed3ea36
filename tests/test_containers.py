"""Containers of tensors that Python's own functions read, and named tuples that a program returns."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import NamedTuple

import pytest
import thunder
import torch

import hookkit
from tests.agreement import assert_agrees, assert_same, run


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


PAIR = Pair(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
NAMED = {"left": PAIR.left, "right": PAIR.right}


class TimesHundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


READING = {
    "sum": sum,
    "reduce": lambda items: functools.reduce(operator.add, items),
    "chain": lambda items: list(itertools.chain(items, items))[3],
    "nested chain": lambda items: list(itertools.chain.from_iterable([items, items]))[3],
    "islice": lambda items: next(itertools.islice(items, 1, 2)),
    "sorted": lambda items: sorted(items, key=lambda item: 1)[1],
    "itemgetter": operator.itemgetter(1),
    "concatenation": lambda items: (items + items)[3],
    "a function of torch's, mapped": lambda items: list(map(torch.sin, items))[1],
}


@pytest.mark.parametrize("read", READING)
def test_pythons_functions_read_containers_of_inputs_and_of_globals(read):
    def program(x, pair):
        return READING[read](PAIR) * READING[read](tuple(pair)) * TimesHundred.apply(x)

    inputs = [torch.tensor([v, v + 1.0], requires_grad=True) for v in (1.0, 2.0, 3.0)]
    compiled = thunder.jit(program)
    assert_same(run(lambda x, a, b: compiled(x, (a, b)), inputs), run(lambda x, a, b: program(x, (a, b)), inputs))


def test_pythons_functions_read_the_values_of_a_dict():
    assert_agrees(
        lambda x: (sum(NAMED.values()) + sorted(NAMED.items(), key=operator.itemgetter(0))[1][1]) * x,
        torch.tensor([1.0, 2.0], requires_grad=True),
    )


def test_what_is_read_from_a_global_container_is_read_anew_at_each_call():
    compiled = thunder.jit(lambda x: sum(NAMED.values()) * x)
    x = torch.ones(2)
    compiled(x)
    before = NAMED["left"]
    try:
        NAMED["left"] = torch.tensor([10.0, 20.0])
        assert compiled(x).tolist() == [13.0, 24.0]
    finally:
        NAMED["left"] = before


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Pair(TimesHundred.apply(x), x + 1),
        lambda x: {"pair": [Pair(TimesHundred.apply(x), Pair(x, x * 3))]},
        lambda x: PAIR._replace(right=TimesHundred.apply(x)),
        lambda x: (Pair(TimesHundred.apply(x), 3), torch.sort(x)),
    ],
)
def test_a_program_returns_named_tuples(program):
    assert_agrees(program, torch.tensor([1.0, 2.0], requires_grad=True))


def test_a_named_tuple_that_is_returned_is_of_its_class():
    x = torch.ones(2)
    found = thunder.jit(lambda x: Pair(x * 2, x))(x)
    assert type(found) is Pair
    assert found.left.tolist() == [2.0, 2.0]


def test_another_class_of_tuples_is_refused_where_it_is_returned():
    class Labelled(tuple):
        pass

    with pytest.raises(hookkit.HookError, match=r"returns a tuple of the class .*Labelled"):
        thunder.jit(lambda x: Labelled((x * 2,)))(torch.ones(2))
