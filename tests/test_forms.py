"""One operation in all the forms in which programs write it."""

from __future__ import annotations

from typing import Any

import pytest
import thunder
import torch

import hookkit
import hookkit.testing


def exaggerated(targets: Any, **options: Any) -> Any:
    return hookkit.rule(targets, register=False, name="exaggerated", **options)(lambda x, *others: 100 * x)


FORMS = {
    "function": lambda x: torch.exp(x),
    "method": lambda x: x.exp(),
    "unbound method": lambda x: torch.Tensor.exp(x),
}


@pytest.mark.parametrize("given", [torch.exp, torch.Tensor.exp])
@pytest.mark.parametrize("program", FORMS.values(), ids=FORMS)
def test_every_form_is_taken(given: Any, program: Any) -> None:
    with hookkit.use(exaggerated(hookkit.forms(given))):
        assert thunder.jit(program)(torch.ones(1)) == 100


OPERATORS = {
    "operator": lambda x: x * 3,
    "reflected": lambda x: 3 * x,
    "two tensors": lambda x: x * x,
    "method": lambda x: x.mul(3),
    "function": lambda x: torch.mul(x, 3),
}


@pytest.mark.parametrize("program", OPERATORS.values(), ids=OPERATORS)
def test_operators_are_forms_of_their_functions(program: Any) -> None:
    rule = hookkit.rule(hookkit.forms(torch.mul), register=False)(lambda x, y: torch.add(x, 99))
    with hookkit.use(rule):
        assert thunder.jit(program)(torch.ones(1)) == 100


def test_in_place_forms_are_included_by_choice() -> None:
    names = {f.__name__ for f in hookkit.forms(torch.exp, in_place=True)}
    assert names == {"exp", "exp_"} and {f.__name__ for f in hookkit.forms(torch.exp)} == {"exp"}
    assert torch.Tensor.__iadd__ in hookkit.forms(torch.add, in_place=True)


@pytest.mark.parametrize("what", [len, lambda x: x, torch.nn.functional.relu])
def test_what_has_no_other_forms_is_refused(what: Any) -> None:
    with pytest.raises(hookkit.RegistrationError, match="no operation of torch that has other forms"):
        hookkit.forms(what)


@pytest.mark.parametrize("program", [FORMS["method"], FORMS["unbound method"]])
def test_explain_says_that_a_form_was_called_that_the_rule_does_not_match(program: Any) -> None:
    with hookkit.use(exaggerated(torch.exp)):
        explanation = hookkit.explain(program, torch.ones(1))
    assert "exp" in explanation.missed[0] and "is a form of torch" in explanation.missed[0]
    assert __file__ in explanation.missed[0]
    assert "does not match; hookkit.forms gives all (rule exaggerated)" in str(explanation)


def test_explain_says_nothing_of_forms_that_a_rule_matches() -> None:
    with hookkit.use(exaggerated(hookkit.forms(torch.exp))):
        assert hookkit.explain(lambda x: x.exp() + torch.exp(x), torch.ones(1)).missed == ()


def test_check_rule_names_the_forms_that_are_not_matched() -> None:
    rule = hookkit.rule(torch.exp, register=False)(lambda x: torch.exp(x))
    check = hookkit.testing.run_check("other forms of the target", rule, torch.ones(1))
    assert check.passed is None and "Tensor" in check.detail and "exp" in check.detail
