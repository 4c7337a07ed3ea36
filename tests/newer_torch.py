"""Run as a program: what hookkit's shipped rules make of a torch whose functions have changed, each in a process.

``added``: each Python function that a shipped rule stands for has a parameter more; ``reordered``: its parameters stand
in another order; ``taken away``: torch lacks it. Programs are right, or refused in words.
"""

import inspect
import os
import sys
import traceback
import warnings

import thunder
import torch
import torch.nn.functional as F

import hookkit

warnings.simplefilter("ignore")

# For each target a call. What is taken away is gone from torch, and from programs.
CALLS = {
    "relu": lambda x, **more: F.relu(x * 2, **more),
    "glu": lambda x, **more: F.glu(x * 2, **more),
    "elu": lambda x, **more: F.elu(x - 1, 2.0, **more),
    "celu": lambda x, **more: F.celu(x - 1, 2.0, **more),
    "selu": lambda x, **more: F.selu(x, **more),
    "mish": lambda x, **more: F.mish(x, **more),
    "nll_loss": lambda x, **more: F.nll_loss(F.log_softmax(x.reshape(2, 2), 1), torch.tensor([0, 1]), **more),
    "ctc_loss": lambda x, **more: F.ctc_loss(
        x.reshape(2, 1, 2).log_softmax(2), torch.ones(1, 1).long(), [2], [1], **more
    ),
}
OTHERS = {
    "sigmoid": lambda x: torch.sigmoid(x) * torch.clamp(x, -1, 1),
    "max": lambda x: torch.max(x.reshape(2, 2), 1)[0] + torch.ceil(x).sum(),
    "pow": lambda x: torch.pow(x.abs() + 1, 2.5),
}


def vector():
    return torch.linspace(-2, 2, 4, requires_grad=True)


def values(program):
    x = vector()
    y = program(x)
    y.sum().backward()
    return y.detach(), x.grad


def check(name, program):
    for found, expected in zip(values(thunder.jit(program)), values(program), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def check_refused(name, program, message):
    try:
        thunder.jit(program)(vector())
    except hookkit.HookError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{name} is not refused")


def newer(stock, reordered):
    """A function that is one of torch's with another signature."""
    parameters = list(inspect.signature(stock).parameters.values())
    extra = inspect.Parameter("added_later", inspect.Parameter.KEYWORD_ONLY, default=None)

    def function(*args, added_later=None, **options):
        return stock(*args, **options)

    if reordered:
        parameters = [inspect.Parameter("mode", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
    function.__signature__ = inspect.Signature(parameters if reordered else [*parameters, extra])
    function.__module__, function.__name__, function.__qualname__ = stock.__module__, stock.__name__, stock.__name__
    return function


def main(change):
    for name in CALLS:
        if change == "taken away":
            delattr(F, name)
        else:
            setattr(F, name, newer(getattr(F, name), change == "reordered"))
    if change == "taken away":
        del torch.combinations, torch.special.expit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hookkit.PluginWarning)
        assert any(rule.name == "autograd_function" for rule in hookkit.rules())
    named = [str(w.message) for w in caught if w.category is hookkit.PluginWarning]
    for name, program in OTHERS.items():
        check(name, program)
    if change == "reordered":
        (message,) = named
        for name, program in CALLS.items():
            assert f"nn.functional.{name}(" in message, name
            check_refused(name, program, "the installed target has another signature")
    else:
        assert not named, named
    if change == "added":
        for name, program in CALLS.items():
            check(name, program)
            check(name, lambda x, program=program: program(x, added_later=None))
            check_refused(
                name,
                lambda x, program=program: program(x, added_later=1),
                "it gives the argument added_later=1, which the installed target has and the rule does not know",
            )
    print(f"{change}: as it should be")


if __name__ == "__main__":
    for change in sys.argv[1:]:  # what is imported here is shared
        if os.fork() == 0:
            try:
                main(change)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.wait()
        if status:
            sys.exit(f"with targets {change}")
