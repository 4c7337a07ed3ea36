"""Functions that transforms of ``torch.func`` made, and the random numbers with which one began to run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["generator_states", "generators_in", "is_made_by_transform", "made_by_transform", "recorded"]


def made_by_transform(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that a transform made before the program was traced.

    Args:
        function: what the transform returned.
        *args: what it is called with.
        **kwargs: the same, by keyword.
    """
    return function(*args, **kwargs)


def recorded(outputs: Any, inputs: Any) -> Any:
    """The part of a program that leads from tensors to others, and what it reads besides; while one is traced only.

    Args:
        outputs: a tensor, or a sequence of tensors.
        inputs: the same, or a dict of tensors.
    """
    raise NotImplementedError("recorded() has a meaning in a program that is being traced only")


@functools.cache
def _codes() -> frozenset[CodeType]:
    func: Any = torch.func
    names = ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "functionalize")
    return frozenset(getattr(func, name)(torch.sin).__code__ for name in names)


def is_made_by_transform(function: Any) -> bool:
    """Whether a transform of ``torch.func`` returned a function; what ``vjp`` and ``linearize`` return is none."""
    return isinstance(function, FunctionType) and function.__code__ in _codes()


def generator_states() -> tuple[torch.Tensor, ...]:
    """The state of torch's generators, the CPU's first, then those of all CUDA devices if they have been used."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), *cuda


@contextmanager
def generators_in(states: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """The time in which torch's generators begin in given states; afterwards they are as they were before.

    Args:
        states: what `generator_states` returned. Without data they are not known, and nothing is done.
    """
    if any(isinstance(state, FakeTensor) for state in states):
        yield
        return
    cpu, *cuda = states
    with torch.random.fork_rng(devices=range(len(cuda))):
        torch.set_rng_state(cpu)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        yield
