"""Graphs of thunderfx that are split inside of torch.no_grad have eager's gradients, and its mode afterwards."""

import pytest
import torch
from thunder.dynamo import thunderfx


def split(x):
    return x.frac() + 0 * x


def between(x):
    y = x * 2
    with torch.no_grad():
        z = split(y)
        w = split(z.sin())
    v = w * x
    return y * z + split(v) * 3


def at_the_start(x):
    with torch.no_grad():
        y = split(x) * 2
    return split(x) * y, y


def at_the_end(x):
    y = x * 3
    with torch.no_grad():
        z = split(x.exp())
    return y, z


def nested(x):
    with torch.no_grad():
        a = split(x)
        with torch.enable_grad():
            b = split(x * 2)
        c = split(b)
    return a, b, c * x


def left_off(x):
    y = split(x) * 2
    torch.set_grad_enabled(False)
    return y, split(y)


def left_off_by_name(x):
    y = split(x) * 2
    torch.set_grad_enabled(mode=False)
    return y, split(y)


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("enabled", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("program", [between, at_the_start, at_the_end, nested, left_off, left_off_by_name])
def test_a_graph_split_inside_of_no_grad_has_eagers_gradients_and_mode(program, enabled):
    compiled = thunderfx(program)

    def run(f):
        torch.set_grad_enabled(enabled)
        x = torch.tensor([0.3, 1.7], requires_grad=True)
        results = f(x)
        mode = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        results = results if isinstance(results, tuple) else (results,)
        recorded = [r for r in results if r.requires_grad]
        if recorded:
            sum(r.sum() for r in recorded).backward()
        gradient = torch.zeros(0) if x.grad is None else x.grad
        return [r.detach() for r in results], [r.requires_grad for r in results], gradient, mode

    expected = run(program)
    for _ in range(3):
        values, recorded, gradient, mode = run(compiled)
        assert (recorded, mode) == (expected[1], expected[3])
        torch.testing.assert_close((values, gradient), (expected[0], expected[2]))
