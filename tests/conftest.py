"""What every test has: hookkit enabled, and the rules that it registers taken away again."""

import pytest
import torch

import hookkit


@pytest.fixture(autouse=True)
def registered_rules():
    """Undoes what a test registers.

    A program whose compilation is broken off inside of a transform of torch.func leaves its context managers to the
    garbage collector, which ends them in any order: saved tensor hooks may stay switched off for the process.
    """
    torch._C._autograd._saved_tensors_hooks_enable()
    hookkit.enable()
    before = hookkit.rules()
    yield
    for rule in hookkit.rules():
        if rule not in before:
            rule.unregister()
    hookkit.enable()
