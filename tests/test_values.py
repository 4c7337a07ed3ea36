"""The pure parts of the engine's lowest layer: trees, and the pairing of arguments and gradients by signature."""

import collections
import dataclasses

import pytest
import torch

import hookkit
from hookkit.call import Call
from hookkit.engine.values.binding import Bound
from hookkit.engine.values.wrapping import Slot, TensorMetadata, broadcasts_to, is_container, leaves, map_leaves

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Record:
    first: object
    second: object


class Names(dict):
    pass


TREES = [
    (1, [1]),
    ([1, (2, [3])], [1, 2, 3]),
    ({"b": 1, "a": [2]}, [1, 2]),
    (Pair(1, [2]), [1, 2]),
    (Record({"a": 1}, (2,)), [1, 2]),
    (Names(a=1, b=2), [1, 2]),
    ("ab", ["ab"]),
    ([], []),
    ([Record, int], [Record, int]),
]


class TestTrees:
    @pytest.mark.parametrize(("tree", "expected"), TREES)
    def test_leaves_come_in_order(self, tree, expected):
        assert list(leaves(tree)) == expected

    @pytest.mark.parametrize("tree", [t for t, found in TREES if all(isinstance(leaf, int) for leaf in found)])
    def test_a_mapped_tree_has_the_structure_and_the_classes_and_the_other_is_as_it_was(self, tree):
        before = repr(tree)
        mapped = map_leaves(lambda leaf: leaf + 10, tree)
        assert type(mapped) is type(tree) and repr(tree) == before
        assert list(leaves(mapped)) == [leaf + 10 for leaf in leaves(tree)]
        assert map_leaves(lambda leaf: leaf - 10, mapped) == tree

    def test_what_torch_returns_becomes_a_value_of_its_class(self):
        found = torch.return_types.max((torch.ones(1), torch.zeros(1)))
        mapped = map_leaves(lambda t: t + 1, found)
        assert [t.item() for t in mapped] == [2, 1]

    def test_a_class_is_no_container_and_its_instances_are(self):
        assert is_container(Record(1, 2)) and not is_container(Record)


@pytest.mark.parametrize(
    ("shape", "to", "expected"),
    [
        ((), (2, 3), True),
        ((3,), (2, 3), True),
        ((1, 3), (2, 3), True),
        ((2, 1), (2, 3), True),
        ((2,), (2, 3), False),
        ((2, 3), (3,), False),
        ((1, 2, 3), (2, 3), False),
        ((0,), (0,), True),
    ],
)
def test_what_broadcasts_is_what_torch_broadcasts(shape, to, expected):
    assert broadcasts_to(shape, to) is expected
    try:
        torch.empty(shape).expand(to)
    except RuntimeError:
        assert not expected
    else:
        assert expected


def test_metadata_makes_zeros_like_the_tensor():
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    metadata = TensorMetadata.of(tensor)
    assert str(metadata) == "bfloat16[2, 3] on cpu"
    zeros = metadata.zeros()
    assert TensorMetadata.of(zeros) == metadata and not zeros.any()


def target(x, y, /, *rest, scale=1.0, **options):
    """What is called; the tensors are slots."""


X, Y, Z = (Slot(i) for i in range(3))


def bound(forward, *args, track="positional", **kwargs):
    """A rule, and arguments bound for it."""
    rule = hookkit.rule(forward, register=False, track=track)(forward)
    return rule, Bound.of(rule, Call(forward, None, args, kwargs))


def pairs(rule, of_call, result):
    return [(name, tensor, gradient) for name, tensor, gradient in of_call.pair_gradients(rule, result)]


class TestPairing:
    def test_names_are_those_of_the_signature(self):
        _, found = bound(target, X, Y, Z, 4, scale=2.0, more=3)
        assert found.names == ("x", "y", "rest[0]", "rest[1]")
        assert found.by_name == {"x": X, "y": Y, "rest": (Z, 4), "scale": 2.0, "more": 3}
        assert found.omitted == ()
        assert bound(target, X, Y)[1].omitted == ("scale",)

    def test_what_cannot_be_bound_is_named_by_its_place(self):
        assert bound(target, X)[1].names == ("argument 0",)

    def test_needs_are_by_name_with_the_structure_of_containers(self):
        _, found = bound(target, X, [Y, 1], Z)
        assert found.needs([X, Z]) == {"x": True, "y": (False, False), "rest": (True,), "scale": False}

    def test_gradients_go_by_name_or_by_place(self):
        rule, found = bound(target, X, Y, Z)
        assert pairs(rule, found, {"y": 2, "x": 1}) == [("y", Y, 2), ("x", X, 1)]
        assert pairs(rule, found, (1, None, 3)) == [("x", X, 1), ("rest[0]", Z, 3)]
        assert pairs(rule, found, (1, None, 3, None)) == [("x", X, 1), ("rest[0]", Z, 3)]
        assert pairs(rule, found, {}) == []

    def test_one_gradient_needs_no_tuple(self):
        def one(x):
            return x

        rule, found = bound(one, X)
        assert pairs(rule, found, 1) == [("x", X, 1)]

    def test_gradients_of_containers_have_their_structure_where_trees_are_tracked(self):
        def of_tree(xs, named):
            return xs

        rule, found = bound(of_tree, [X, 1], {"a": Y}, track="tree")
        assert pairs(rule, found, {"xs": [1, None], "named": {"a": 2}}) == [("xs[0]", X, 1), ("named['a']", Y, 2)]
        with pytest.raises(hookkit.GradientError, match="1 gradients for xs; expected 2"):
            found.pair_gradients(rule, {"xs": [1]})
        with pytest.raises(hookkit.GradientError, match="int as the gradient of xs; expected list"):
            found.pair_gradients(rule, {"xs": 1})

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            (None, "is its return statement missing"),
            ({"z": 1}, "a gradient for 'z', which is no argument of the call"),
            ((1, 2), r"expected 3, got 2"),
            ((1, 2, 3, 4), r"expected 3, got 4"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, result, said):
        rule, found = bound(target, X, Y, Z)
        with pytest.raises(hookkit.GradientError, match=said):
            found.pair_gradients(rule, result)

    def test_a_gradient_of_what_is_no_tensor_is_refused(self):
        rule, found = bound(target, X, 2.0)
        with pytest.raises(hookkit.GradientError, match="for y, which is float and no tensor"):
            found.pair_gradients(rule, (1, 2))
