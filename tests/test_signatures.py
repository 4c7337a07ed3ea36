"""hookkit.signatures: what a provider can take of its target's arguments, and shipped rules with newer targets."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hookkit
from hookkit.signatures import difference, misfit


def signature(function):
    return inspect.signature(function)


def given(x, y=2, *, scale=1.0):
    pass


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (lambda x, y=2, *, scale=1.0: None, None),
        (lambda x, y=2: None, None),
        (lambda y, x=2: None, "argument 0 is called 'x', in the target 'y'"),
        (lambda x, y=3: None, "its default is 2 for 'y'; the target's is 3"),
        (lambda x, y=2.0: None, "its default is 2 for 'y'; the target's is 2.0"),
        (lambda x, y=2, z=3: None, "it has no place for the positional argument 'z'"),
        (lambda x, y=2, *, other=1: None, "it has no place for the keyword argument 'other'"),
        (lambda x, *rest: None, "it has no place for *rest"),
        (lambda x, **rest: None, "it has no place for **rest"),
        (lambda y=2: None, "argument 0 is called 'x', in the target 'y'"),
        (lambda: None, "the target never gives 'x'"),
    ],
)
def test_a_misfit_says_which_argument_it_is(target, why):
    assert misfit(signature(target), signature(given)) == why


def test_without_a_difference_there_is_none():
    assert difference(signature(given), signature(given)) is None
    assert difference(signature(given), signature(lambda *args, **kwargs: None)) is None


def newer(x, added=None, y=2, *, scale=1.0, more=0):
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "known"),
    [
        ((1,), {}, ((1,), {})),
        ((1, None, 3), {}, ((1, 3), {})),
        ((1,), {"y": 3, "scale": 2.0, "more": 0}, ((1, 3), {"scale": 2.0})),
        ((1,), {"added": None}, ((1,), {})),
    ],
)
def test_parameters_that_are_new_are_left_out_while_they_are_at_their_defaults(args, kwargs, known):
    found = difference(signature(newer), signature(given))
    assert found is not None and found.misfit is None
    assert found.arguments("rule", args, kwargs) == known


@pytest.mark.parametrize(("args", "kwargs", "name"), [((1, 5), {}, "added=5"), ((1,), {"more": 1}, "more=1")])
def test_a_parameter_that_is_new_and_given_is_refused(args, kwargs, name):
    found = difference(signature(newer), signature(given))
    with pytest.raises(hookkit.HookError, match=f"it gives the argument {name}, which the installed target has"):
        found.arguments("rule", args, kwargs)


def test_what_a_target_takes_by_any_keyword_is_not_what_it_has_been_given_since():
    found = difference(
        signature(lambda f, *args, added=None, **kwargs: None), signature(lambda f, *args, **kwargs: None)
    )
    assert found.arguments("rule", (1, 2), {"added": None, "own": 3}) == ((1, 2), {"own": 3})


def test_of_the_shipped_rules_none_is_missing_or_refuses_its_target():
    assert [rule for rule in hookkit.rules() if rule.misfits] == []


def test_shipped_rules_and_a_torch_that_has_changed():
    script, changes = Path(__file__).with_name("newer_torch.py"), ["added", "reordered", "taken away"]
    ran = subprocess.run([sys.executable, script, *changes], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == [f"{change}: as it should be" for change in changes]


def test_rules_that_cannot_be_declared_are_an_error_at_each_call(monkeypatch):
    from hookkit.registry import Registry

    monkeypatch.setitem(sys.modules, "hookkit.rules", None)
    registry = Registry()
    for _ in range(2):
        with pytest.raises(hookkit.RegistrationError, match=r"cannot be declared \(ModuleNotFoundError"):
            registry.load()
