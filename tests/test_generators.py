"""Generators of the program: what is thrown into them, what they return, and what a with statement undoes."""

import contextlib

import pytest
import thunder
import torch

SEEN = []


@contextlib.contextmanager
def noting(name="left"):
    try:
        yield
    finally:
        SEEN.append(name)


@contextlib.contextmanager
def handling():
    try:
        yield
    except ValueError as error:
        raise KeyError(str(error)) from error


def undoes_where_caught(x):
    with contextlib.suppress(ValueError), noting("outer"), noting("inner"):
        raise ValueError("mine")
    return x * 2


def raises_another(x):
    with contextlib.suppress(KeyError), noting(), handling():
        raise ValueError("mine")
    return x * 2


def hooks_are_there_again(x):
    with contextlib.suppress(ValueError), torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        raise ValueError("mine")
    return x * 2


def values_are_returned_and_thrown(x):
    def inner():
        try:
            yield x * 1
        except ValueError:
            yield x * 2
        return x * 3

    def outer():
        yield (yield from inner())

    generator = outer()
    return next(generator), generator.throw(ValueError("mine")), next(generator)


def a_delegate_raises(x):
    def inner():
        try:
            yield x
        finally:
            SEEN.append("inner")

    def outer():
        for way in (inner(), [x, x]):
            try:
                yield from way
            except ValueError as error:
                SEEN.append(str(error))
        yield x * 2

    generator = outer()
    next(generator)
    generator.throw(ValueError("first"))
    return generator.throw(ValueError("second"))


def closed(x):
    def inner():
        try:
            yield x
        finally:
            SEEN.append("inner")

    def outer():
        try:
            yield from inner()
        finally:
            SEEN.append("outer")

    generator = outer()
    next(generator)
    generator.close()
    return x * 2


def ends_by_an_exception(x):
    with noting():
        raise ValueError("mine")


PROGRAMS = [
    undoes_where_caught,
    raises_another,
    hooks_are_there_again,
    values_are_returned_and_thrown,
    a_delegate_raises,
    closed,
    ends_by_an_exception,
]


def outcome(program):
    SEEN.clear()
    try:
        returned = program(torch.ones(2))
    except Exception as error:
        returned = repr(error)
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return str(returned), tuple(SEEN), disabled


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_what_is_thrown_into_a_generator_runs_in_it(program):
    assert outcome(thunder.jit(program)) == outcome(program)


def test_each_assignment_to_an_object_counts():
    class Holder:
        first = second = 0

    def program(x, holder):
        holder.first = 1
        holder.second = 2
        holder.first = 3
        return x * 2

    holder = Holder()
    thunder.jit(program)(torch.ones(2), holder)
    assert (holder.first, holder.second) == (3, 2)
