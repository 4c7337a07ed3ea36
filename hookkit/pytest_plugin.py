"""A plugin for pytest: one test for each check of :mod:`hookkit.testing`.

pytest loads it by itself, from the entry point ``pytest11``. It imports nothing of PyTorch before it meets the marker,
so that other tests do not wait for that.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

CHECK = "hookkit_check"


def _testing() -> Any:
    return importlib.import_module("hookkit.testing")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "check_rule(subject, *args, **kwargs): a test for each check of hookkit.testing.check_rule on these arguments",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each check of a function with the marker."""
    if metafunc.definition.get_closest_marker("check_rule"):
        metafunc.fixturenames.append(CHECK)
        metafunc.parametrize(CHECK, list(_testing().CHECKS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Make the check before the function's own lines; what does not apply to the arguments is skipped."""
    marker = pyfuncitem.get_closest_marker("check_rule")
    if marker is None:
        return
    check = _testing().run_check(str(pyfuncitem.callspec.params[CHECK]), *marker.args, **marker.kwargs)
    if check.passed is None:
        pytest.skip(check.detail)
    if not check.passed:
        pytest.fail(f"{check.name}: {check.detail}", pytrace=False)
