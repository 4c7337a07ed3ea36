"""What every test has: hookkit enabled, and the rules that it registers taken away again."""

import pytest

import hookkit


@pytest.fixture(autouse=True)
def registered_rules():
    """Undoes what a test registers."""
    hookkit.enable()
    before = hookkit.rules()
    yield
    for rule in hookkit.rules():
        if rule not in before:
            rule.unregister()
    hookkit.enable()
