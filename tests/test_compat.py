"""hookkit/compat.py; what it does to an import of thunder as a whole is in test_autoload.py."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd import Function
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule

from hookkit import compat

NAMED = ("align_as", "align_to", "has_names", "refine_names", "rename")


class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


class Counted(Double):
    @classmethod
    def apply(cls, *args):
        return super().apply(*args)


# Stand-ins


@pytest.fixture
def default_torch_ops():
    module = ModuleType("thunder.torch.default_torch_ops")
    module.torch_auto_registered_ops = {torch.Tensor: []}
    return module


def test_tensor_methods_that_torch_lacks_are_there_inside_and_gone_afterwards(default_torch_ops):
    before = dict(vars(torch.Tensor))
    with compat.importing_thunder(default_torch_ops):
        methods = [getattr(torch.Tensor, name) for name in NAMED]
    assert all(map(callable, methods))
    assert dict(vars(torch.Tensor)) == before


def test_tensor_methods_that_torch_has_are_left_alone(default_torch_ops, monkeypatch):
    own = {name: object() for name in NAMED}
    for name in NAMED:
        monkeypatch.setattr(torch.Tensor, name, own[name], raising=False)
    with compat.importing_thunder(default_torch_ops):
        assert {name: getattr(torch.Tensor, name) for name in NAMED} == own
        default_torch_ops.torch_auto_registered_ops[torch.Tensor] += own.values()
    assert {name: getattr(torch.Tensor, name) for name in NAMED} == own
    assert default_torch_ops.torch_auto_registered_ops[torch.Tensor] == list(own.values())


def test_stand_ins_for_tensor_methods_are_taken_out_of_what_thunder_registers(default_torch_ops, monkeypatch):
    monkeypatch.setattr(compat, "_TENSOR_METHODS", ("removed_method",))
    operations = default_torch_ops.torch_auto_registered_ops[torch.Tensor]
    with compat.importing_thunder(default_torch_ops):
        operations += [torch.Tensor.sin, torch.Tensor.removed_method]
    assert operations == [torch.Tensor.sin]


def test_an_error_of_the_import_passes_and_torch_is_as_before(default_torch_ops):
    before = dict(vars(torch.Tensor))
    with pytest.raises(ZeroDivisionError), compat.importing_thunder(default_torch_ops):
        raise ZeroDivisionError
    assert dict(vars(torch.Tensor)) == before


def test_a_c_classmethod_apply_has_a_python_one_in_its_place_inside_and_works(monkeypatch):
    monkeypatch.delattr(Function, "apply", raising=False)
    before = dict(vars(Function))
    with compat.importing_thunder(ModuleType("thunder.core.jit_ext")):
        assert callable(Function.apply.__func__)
        assert Double.apply(torch.ones(2)).tolist() == [2, 2]
    assert dict(vars(Function)) == before
    assert not hasattr(Function.apply, "__func__")


def test_a_python_classmethod_apply_is_left_alone(monkeypatch):
    monkeypatch.setattr(Function, "apply", classmethod(lambda cls: cls))
    own = vars(Function)["apply"]
    with compat.importing_thunder(ModuleType("thunder.core.jit_ext")):
        assert vars(Function)["apply"] is own
    assert vars(Function)["apply"] is own


def test_other_modules_get_nothing():
    before = dict(vars(torch.Tensor)), dict(vars(Function))
    with compat.importing_thunder(ModuleType("thunder.clang")):
        assert (dict(vars(torch.Tensor)), dict(vars(Function))) == before


# The owner of an apply


@pytest.fixture(params=["this torch", "a C classmethod"])
def _either_apply(request, monkeypatch):
    if request.param == "a C classmethod":
        monkeypatch.delattr(Function, "apply", raising=False)


@pytest.mark.usefixtures("_either_apply")
def test_the_owner_of_an_apply_is_its_class():
    assert compat.function_owner(Double.apply) is Double
    assert compat.function_owner(super(Counted, Counted).apply) is Counted


@pytest.mark.usefixtures("_either_apply")
@pytest.mark.parametrize(
    "function",
    [
        Counted.apply,
        Double.forward,
        Double,
        torch.sin,
        torch.ones(1).sin,
        torch.ones(1).apply_,
        torch.nn.Linear(1, 1).apply,
        torch.ops.aten.sin,
        [].append,
        len,
        lambda: None,
        None,
    ],
)
def test_other_callables_have_no_owner(function):
    assert compat.function_owner(function) is None


def test_an_apply_found_before_thunder_is_imported_on_a_new_torch_has_its_owner():
    # A process of its own: the module is imported when apply is a C classmethod already.
    source = """
import torch
from torch.autograd import Function
if hasattr(Function.apply, "__func__"):
    del Function.apply
from hookkit import compat
class Double(Function): pass
assert compat.function_owner(Double.apply) is Double
"""
    subprocess.run([sys.executable, "-c", source], check=True, cwd=Path(__file__).parent.parent)


# Graph modules


def lazy(function):
    module = _LazyGraphModule.from_graphmodule(symbolic_trace(function))
    assert module._needs_recompile()
    return module


def test_a_lazy_graph_module_is_made_real():
    module = lazy(lambda x: x + 1)
    compat.realise_graph_module(module)
    assert not module._needs_recompile()
    assert "lazy" not in type(module).forward.__name__
    assert module(1) == 2


def test_lazy_graph_modules_inside_another_are_made_real():
    graph = Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    root = torch.nn.Module()
    root.inner = lazy(lambda x: x + 1)
    outer = GraphModule(root, graph)
    compat.realise_graph_module(outer)
    assert not outer.inner._needs_recompile()


def test_a_real_graph_module_is_not_compiled_again():
    module = symbolic_trace(lambda x: x + 1)
    forward = type(module).forward
    compat.realise_graph_module(module)
    assert type(module).forward is forward


@pytest.mark.parametrize("other", [torch.nn.Linear(1, 1), torch.sin, None, 3])
def test_what_is_not_a_graph_module_is_left_alone(other):
    before = dict(vars(other)) if hasattr(other, "__dict__") else {}
    assert compat.realise_graph_module(other) is None
    assert all(vars(other)[name] is value for name, value in before.items())


# The higher-order operator


def test_the_higher_order_operator_is_found_under_both_names_once():
    targets = compat.higher_order_apply_targets()
    assert torch.ops.higher_order.autograd_function_apply in targets
    assert torch._functorch.autograd_function.autograd_function_apply in targets
    assert len(set(targets)) == len(targets)


def test_where_the_two_names_differ_both_are_targets(monkeypatch):
    other = object()
    monkeypatch.setattr(torch._functorch.autograd_function, "autograd_function_apply", other)
    assert compat.higher_order_apply_targets() == (torch.ops.higher_order.autograd_function_apply, other)


def test_a_torch_without_one_of_the_names_has_one_target(monkeypatch):
    monkeypatch.delattr(torch._functorch.autograd_function, "autograd_function_apply")
    assert compat.higher_order_apply_targets() == (torch.ops.higher_order.autograd_function_apply,)


# The autograd graph


def test_a_gradient_edge_keeps_a_custom_functions_node_when_its_output_is_gone():
    class Hundredfold(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 100 * ctx.saved_tensors[0] * grad

    x = torch.full((2,), 3.0, requires_grad=True)
    edge = compat.gradient_edge(Hundredfold.apply(x))
    assert len(edge.node.saved_tensors) == len(edge.node.next_functions) == 1
    (gradient,) = torch.autograd.grad([edge], [x], [torch.ones(2)])
    assert gradient.tolist() == [300.0, 300.0]
