"""The pure parts of the engine that look at a trace: which tensors share memory, and which lead to which.

The traces are made by hand, operation by operation; no program is compiled.
"""

from contextlib import contextmanager

import pytest
import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.devices import cpu
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from hookkit.engine.trace import gradflow, reachability
from hookkit.engine.trace.aliasing import Sharing, changes_in_place, keeps_order, may_view, note_sharing, viewed
from hookkit.engine.trace.gradflow import requires_grad


@contextmanager
def recording():
    """A trace that operations are recorded in."""
    trace = TraceCtx()
    with tracectx(trace):
        yield trace


def tensor(*shape, grad=True):
    """A tensor of the trace that is being recorded."""
    return TensorProxy(shape=shape or (4, 3), device=cpu, dtype=dtypes.float32, requires_grad=grad)


def recorded(operation, *shape):
    """The tensor that an operation is given, what it returns, and its bound symbol."""
    with recording() as trace:
        x = tensor(*shape)
        y = operation(x)
    return x, y, trace.bound_symbols[-1]


class TestSharing:
    def test_a_tensor_shares_memory_with_itself(self):
        assert Sharing().group("a") == {"a"}

    def test_sharing_goes_both_ways_and_on(self):
        sharing = Sharing()
        sharing.join("a", "b")
        sharing.join("c", "d")
        assert sharing.group("a") == {"a", "b"} and sharing.group("d") == {"c", "d"}
        sharing.join("d", "a")
        assert all(sharing.group(name) == {"a", "b", "c", "d"} for name in "abcd")


VIEWS = {
    "a slice": lambda x: ltorch.getitem(x, slice(0, 2)),
    "an item": lambda x: ltorch.getitem(x, (0, None)),
    "transpose": lambda x: ltorch.transpose(x, 0, 1),
    "permute": lambda x: ltorch.permute(x, 1, 0),
    "unsqueeze": lambda x: ltorch.unsqueeze(x, 0),
    "select": lambda x: ltorch.select(x, 0, 1),
    "a reshape that splits": lambda x: ltorch.reshape(x, 2, 2, 3),
}
PERHAPS = {
    "a reshape that joins": lambda x: ltorch.reshape(x, 12),
    "detach": lambda x: ltorch.detach(x),
}
COPIES = {
    "an operation": lambda x: ltorch.mul(x, 2.0),
    "items of a list": lambda x: ltorch.getitem(x, [0, 1]),
    "clone": lambda x: ltorch.clone(x),
}
REORDERED = {"a slice", "an item", "transpose", "permute", "select"}


class TestViews:
    @pytest.mark.parametrize("name", VIEWS)
    def test_a_view_is_certain_and_shares_memory(self, name):
        x, y, bsym = recorded(VIEWS[name])
        assert may_view(bsym) and viewed(bsym) is x
        assert keeps_order(bsym) is (name not in REORDERED)
        sharing = Sharing()
        note_sharing(sharing, bsym)
        assert sharing.group(y.name) == {x.name, y.name}

    @pytest.mark.parametrize("name", PERHAPS)
    def test_what_may_be_a_view_shares_memory_and_is_not_certain(self, name):
        x, y, bsym = recorded(PERHAPS[name])
        assert may_view(bsym) and viewed(bsym) is None
        sharing = Sharing()
        note_sharing(sharing, bsym)
        assert sharing.group(x.name) == {x.name, y.name}

    @pytest.mark.parametrize("name", COPIES)
    def test_a_copy_shares_nothing(self, name):
        x, y, bsym = recorded(COPIES[name])
        assert viewed(bsym) is None
        sharing = Sharing()
        note_sharing(sharing, bsym)
        assert sharing.group(x.name) == {x.name} and sharing.group(y.name) == {y.name}

    def test_an_operation_in_place_changes_and_returns_what_it_is_given(self):
        with recording() as trace:
            x = tensor()
            y = ltorch.mul_(x, 2.0)
        bsym = trace.bound_symbols[-1]
        assert changes_in_place(bsym)
        sharing = Sharing()
        note_sharing(sharing, bsym)
        assert sharing.group(y.name) == {x.name, y.name}
        assert not changes_in_place(recorded(lambda x: ltorch.mul(x, 2.0))[2])


class TestRequiresGrad:
    def test_a_result_requires_grad_if_an_operand_does(self):
        with recording() as trace:
            x, y = tensor(), tensor(grad=False)
            z = x * y
            assert requires_grad(trace, x) and not requires_grad(trace, y)
            assert requires_grad(trace, z) and not requires_grad(trace, y * 2)
            assert not requires_grad(trace, z > 0)
            assert not requires_grad(trace, ltorch.detach(z))
            assert not requires_grad(trace, 2.0)

    def test_what_is_stated_holds_for_what_is_made_of_it(self):
        with recording() as trace:
            x = tensor()
            y = x * 2
            gradflow.set_requires_grad(trace, y, False)
            assert not requires_grad(trace, y * 3)


def all_arguments(bsym):
    return bsym.flat_proxy_args, None


class TestReachability:
    @pytest.fixture
    def trace(self):
        """Two outputs: a leads to the first, b to both, c to none, d is not differentiable."""
        with recording() as trace:
            self.a, self.b, self.c, self.d = tensor(), tensor(), tensor(), tensor(grad=False)
            self.lone = self.c * 2
            self.shared = self.b * self.d
            self.first = self.a * self.shared
            self.second = self.shared * 3
            trace.args = (self.a, self.b, self.c, self.d)
            prims.python_return((self.first, self.second))
        return trace

    def test_each_operation_leads_to_the_outputs_that_are_made_of_it(self, trace):
        reach = reachability.reach_of_calls(trace, [self.first, self.second], all_arguments)
        made = {bsym.output.name: place for place, bsym in enumerate(trace.bound_symbols[:-1])}
        assert reach == {
            made[self.shared.name]: {0, 1},
            made[self.first.name]: {0},
            made[self.second.name]: {1},
        }

    def test_one_output_needs_nothing_told_apart(self, trace):
        assert reachability.reach_of_calls(trace, [self.first], all_arguments) == {}

    def test_an_argument_that_leads_to_no_output_is_not_reached(self, trace):
        assert reachability.unreached_arguments(trace, [self.first, self.second]) == {self.c.name}
        assert reachability.unreached_arguments(trace, [self.second]) == {self.a.name, self.c.name}

    def test_where_something_is_changed_in_place_nothing_is_known(self):
        with recording() as trace:
            x, y = tensor(), tensor()
            ltorch.mul_(x, 2.0)
            z, w = x * 1, y * 1
            trace.args = (x, y)
            prims.python_return((z, w))
        assert reachability.reach_of_calls(trace, [z, w], all_arguments) == {}
        assert reachability.unreached_arguments(trace, [z]) == set()


class TestUndefinedGradients:
    def test_a_gradient_is_undefined_if_all_its_sources_are(self):
        with reachability.running([False, True, True], "node"):
            assert reachability.running_node() == "node" and reachability.anything_undefined()
            assert reachability.none_defined(frozenset([1, 2]))
            assert not reachability.none_defined(frozenset([0, 1]))
            assert not reachability.none_defined(frozenset(["t3"]))
            reachability.note_undefined("t3")
            assert reachability.none_defined(frozenset([1, "t3"]))
            assert not reachability.none_defined(None)
        assert reachability.running_node() is None and not reachability.anything_undefined()

    def test_one_backward_inside_of_another_has_its_own(self):
        with reachability.running([True], "outer"):
            with reachability.running([False], "inner"):
                assert not reachability.none_defined(frozenset([0]))
            assert reachability.none_defined(frozenset([0])) and reachability.running_node() == "outer"
