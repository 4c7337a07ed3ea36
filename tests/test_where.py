"""Where a call stands is always a line of the user's: in a program, in a graph of Dynamo's, in a cell of a notebook."""

import sys
import types

import pytest
import thunder
import torch
from thunder.dynamo import thunderfx

import hookkit
from hookkit.call import Source


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def linear(input, weight, bias=None):
    return input @ weight.mT


@pytest.fixture
def linear_rule():
    return hookkit.rule(torch.nn.functional.linear)(linear)


def where(jitted):
    return [(call.name, call.source.file, call.source.line) for call in hookkit.report(jitted).calls]


def test_of_a_module_of_torch_it_is_the_line_that_calls_the_compiled_program(linear_rule):
    jitted = thunder.jit(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)))
    jitted(torch.ones(2))
    line = sys._getframe().f_lineno - 1
    assert where(jitted) == [("linear", __file__, line)]


def test_of_a_function_that_is_compiled_as_it_is(linear_rule):
    jitted = thunder.jit(Twice.apply)
    jitted(torch.ones(2))
    line = sys._getframe().f_lineno - 1
    assert where(jitted) == [("Twice", __file__, line)]
    (call,) = hookkit.explain(Twice.apply, torch.ones(2)).calls
    assert (call.source.file, call.source.line) == (__file__, line + 3)


def test_of_a_graph_of_dynamos_it_is_the_line_of_the_program(linear_rule):
    def program(x):
        y = torch.nn.functional.linear(x, x)
        return y + 1

    jitted = thunderfx(program)
    jitted(torch.ones(2, 2))
    assert where(jitted) == [("linear", __file__, program.__code__.co_firstlineno + 1)]


def test_in_a_rule_that_ships_it_is_the_program(linear_rule):
    def program(x):
        return torch.utils.checkpoint.checkpoint(torch.nn.functional.linear, x, x, use_reentrant=False)

    jitted = thunder.jit(program)
    jitted(torch.ones(2, 2))
    places = {(file, line) for _, file, line in where(jitted)}
    assert places == {(__file__, program.__code__.co_firstlineno + 1)}


def test_a_cell_of_a_notebook_is_named_as_its_author_sees_it(monkeypatch):
    names = {"/tmp/ipykernel_7/123.py": ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert str(Source("/tmp/ipykernel_7/123.py", 2)) == "cell In[3], line 2"
    assert str(Source("/home/user/program.py", 2)) == "/home/user/program.py:2"


def test_warnings_of_a_transform_point_to_the_users_line():
    jitted = thunder.jit(lambda x: x * 3)
    from hookkit.engine.joint import transforms

    transforms._warned.clear()
    with pytest.warns(hookkit.TransformWarning) as caught:
        torch.func.grad(lambda x: jitted(x).sum())(torch.ones(2))
    assert {w.filename for w in caught if w.category is hookkit.TransformWarning} == {__file__}
