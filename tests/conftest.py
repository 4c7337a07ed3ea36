"""What every test has: hookkit enabled, and the rules that it registers taken away again."""

import contextlib

import pytest
import torch

import hookkit


@pytest.fixture(autouse=True)
def registered_rules():
    """Undoes what a test registers.

    A program whose compilation is broken off inside of a transform of torch.func leaves its context managers to the
    garbage collector, which ends them in any order: saved tensor hooks may stay switched off for the process. Those of
    a checkpoint stay where what it runs cannot be run again, as torch.cond of torch 2.7.
    """
    torch._C._autograd._saved_tensors_hooks_enable()
    with contextlib.suppress(RuntimeError):  # until there are none
        while True:
            torch._C._autograd._pop_saved_tensors_default_hooks()
    hookkit.enable()
    before = hookkit.rules()
    yield
    for rule in hookkit.rules():
        if rule not in before:
            rule.unregister()
    hookkit.enable()
