"""scripts/distribution.py with two processes: gradients are those of one, and an error in one process ends both."""

import distribution
import pytest

pytestmark = pytest.mark.long


def test_gradients_of_two_processes_are_those_of_one():
    found = distribution.outcomes_with(2)
    assert {name: found[name] for name in distribution.SCENARIOS} == {name: {"same"} for name in distribution.SCENARIOS}
    assert all(found[name] != {"works"} for name in distribution.REFUSED)


def test_an_error_in_one_process_ends_both_in_words():
    assert distribution.error_with(2) == "ValueError: a fault of one process"
