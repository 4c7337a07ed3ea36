"""hookkit.save and hookkit.mark: what a forward provider says beside its outputs."""

import pytest
import torch

import hookkit


def test_what_is_saved_is_an_attribute_under_its_name():
    x = torch.ones(2)
    saved = hookkit.save(x=x, scale=2.0, axis=None)
    assert saved.x is x
    assert (saved.scale, saved.axis) == (2.0, None)


def test_residuals_print_as_the_call_that_made_them():
    assert repr(hookkit.save(scale=2.0, axis=1)) == "save(scale=2.0, axis=1)"
    assert repr(hookkit.save()) == "save()"


def test_a_name_that_was_not_saved_is_told_with_those_that_were():
    with pytest.raises(AttributeError, match=r"no residual is called 'y'; hookkit.save\(...\) was given x, scale$"):
        hookkit.save(x=1, scale=2).y  # noqa: B018
    assert not hasattr(hookkit.save(), "x")


@pytest.mark.parametrize("name", ["needs", "_hidden", "_marks"])
def test_names_that_hookkit_uses_itself_are_refused(name):
    with pytest.raises(hookkit.HookError, match=f"the name '{name}' is reserved; choose another one"):
        hookkit.save(**{name: 1})


def test_marks_are_those_of_ctx_and_default_to_what_ctx_has():
    saved = hookkit.save()
    marks = saved._marks
    assert (marks.non_differentiable, marks.dirty, marks.materialize_grads) == ((), (), True)
    x, y = torch.ones(1), torch.ones(2)
    assert hookkit.mark(saved, non_differentiable=[x], dirty=(y,), materialize_grads=False) is saved
    marks = saved._marks
    assert marks.non_differentiable[0] is x
    assert marks.dirty[0] is y
    assert marks.materialize_grads is False
