"""Tensors that a callable leads to without being given them: in its closure, in a partial, in the object of a method.

PyTorch lifts them to arguments of its higher-order operators, and an opaque call does the same with its own: it is
given them beside its arguments, so that they have values when the program runs, and gradients. What lives here finds
them, and makes a callable with others in their places. Nothing of the original is changed.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, _interpret_call, wrap, wrap_const
from thunder.core.proxies import TensorProxy
from torch._subclasses.fake_tensor import FakeTensor

from hookkit.engine.values.python_code import contents, is_own, names_in
from hookkit.engine.values.wrapping import Slot, map_leaves
from hookkit.errors import HookError

__all__ = [
    "Captured",
    "Path",
    "Step",
    "fill",
    "held",
    "is_looked_into",
    "paths",
    "settled",
    "trying",
    "with_parts",
    "wrapped_at",
]

# What a graph module keeps of its making.
_OF_GRAPHS = ("torch.fx", "torch._dynamo", "torch._subclasses", "torch._ops")


@attrs.frozen
class Step:
    """A step from an object to one that it holds.

    Attributes:
        kind: ``"cell"`` of a closure, by its place; ``"global"`` of a function; ``"attribute"``; ``"item"``;
            ``"parameter"`` of a module of ``torch.jit``, by its whole name.
        key: which.
    """

    kind: str
    key: Any

    def of(self, holder: Any) -> Any:
        """What is there."""
        if self.kind == "cell":
            return holder.__closure__[self.key].cell_contents
        if self.kind == "global":
            return holder.__globals__[self.key]
        if self.kind == "attribute":
            own = getattr(holder, "__dict__", {})
            return own[self.key] if self.key in own else getattr(holder, self.key)
        if self.kind == "parameter":
            return functools.reduce(getattr, self.key.split("."), holder)
        return holder[self.key]

    def of_wrapped(self, holder: Any) -> Any:
        """What is there, in an interpreter value that knows where it comes from."""
        if self.kind == "cell":
            closure = _interpret_call(getattr, holder, wrap_const("__closure__"))
            cell = _interpret_call(_item, closure, wrap_const(self.key))
            return _interpret_call(getattr, cell, wrap_const("cell_contents"))
        if self.kind == "global":
            names = _interpret_call(getattr, holder, wrap_const("__globals__"))
            return _interpret_call(_item, names, wrap_const(self.key))
        if self.kind == "parameter":
            return functools.reduce(_attribute, self.key.split("."), holder)
        if self.kind == "attribute" and isinstance(holder.value, functools.partial):
            return _attribute(holder, self.key)
        if self.kind == "attribute":
            return _interpret_call(getattr, holder, wrap_const(self.key))
        return _interpret_call(_item, holder, wrap_const(self.key))


def _attribute(holder: Any, name: str) -> Any:
    """An attribute that C code, or what stands before it, looks up, which is not to be interpreted.

    A number is the name of a module in a list of them, to which the prologue comes by indexing.
    """
    key: Any = int(name) if name.isdecimal() else name
    how = PseudoInst.BINARY_SUBSCR if name.isdecimal() else PseudoInst.LOAD_ATTR
    steps = [holder.provenance, wrap_const(key).provenance]
    return wrap(getattr(holder.value, name), provenance=ProvenanceRecord(how, steps))


def _item(holder: Any, key: Any) -> Any:
    return holder[key]


Path = tuple[Step, ...]


def paths(value: Any) -> list[Path]:
    """The ways from a callable, or from an object that one may be in, to each tensor that it leads to."""
    return _paths(value, {}, set())


def wrapped_at(path: Path, wrapped: Any) -> Any:
    """The tensor at the end of a path, as an interpreter value."""
    return functools.reduce(lambda holder, step: step.of_wrapped(holder), path, wrapped)


def _paths(value: Any, known: dict[int, list[Path]], open_: set[int]) -> list[Path]:
    if isinstance(value, torch.Tensor | TensorProxy):
        return [] if isinstance(value, FakeTensor) else [()]
    if id(value) in known:
        return known[id(value)]
    if id(value) in open_:  # it leads to itself
        return []
    open_.add(id(value))
    found = [(step, *rest) for step, part in held(value) for rest in _paths(part, known, open_)]
    open_.discard(id(value))
    known[id(value)] = found
    return found


def held(value: Any) -> Iterator[tuple[Step, Any]]:
    """What an object holds that may be, or lead to, a tensor."""
    if isinstance(value, types.FunctionType):
        yield from _held_by_function(value)
    elif isinstance(value, types.MethodType):
        yield Step("attribute", "__self__"), value.__self__
        yield Step("attribute", "__func__"), value.__func__
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield Step("attribute", name), getattr(value, name)
    elif isinstance(value, torch.jit.ScriptModule):
        for name, tensor in value.named_parameters():  # its buffers it keeps up to date by itself
            yield Step("parameter", name), tensor
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield Step("item", i), item
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            yield Step("item", key), item
    elif is_looked_into(value):
        for name, item in list(value.__dict__.items()):
            yield Step("attribute", name), item


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    for i, cell in enumerate(function.__closure__ or ()):
        try:
            yield Step("cell", i), cell.cell_contents
        except ValueError:  # it is empty
            continue
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            yield Step("attribute", name), getattr(function, name)
    if is_own(function.__module__):
        for name in sorted(names_in(function.__code__)):
            if name in function.__globals__:
                yield Step("global", name), function.__globals__[name]


def is_looked_into(value: Any) -> bool:
    """Whether the attributes of an object may be, or lead to, tensors of a program's."""
    if isinstance(value, type | types.ModuleType) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    if isinstance(value, torch.nn.Module):
        return True
    module = str(type(value).__module__)
    if module.startswith("torch.nn."):
        return True
    return is_own(module) and not module.startswith(_OF_GRAPHS)


@attrs.frozen(eq=False)
class Captured:
    """A callable, or an object that holds one, and the tensors that it leads to, which it is to have others for.

    Attributes:
        value: the callable.
        places: for each path to a tensor the slot of the value that is to be there.
    """

    value: Any
    places: dict[Path, Slot]

    def filled(self, values: Sequence[Any]) -> Any:
        """The callable with values in the places of its slots; itself if that is what it has there."""
        settling = _settling.get()
        return _rebuilt(self.value, self.places, values, {} if settling is None else settling.rebuilt)


def _rebuilt(value: Any, places: dict[Path, Slot], values: Sequence[Any], known: dict[Any, Any]) -> Any:
    """An object with values in its places; one that is reached in two ways stays one."""
    if () in places:
        return values[places[()].index]
    key = id(value), frozenset(places.items())
    if key not in known:
        known[key] = _rebuilt_once(value, places, values, known)
    return known[key]


def _rebuilt_once(value: Any, places: dict[Path, Slot], values: Sequence[Any], known: dict[Any, Any]) -> Any:
    below: dict[Step, dict[Path, Slot]] = {}
    for path, slot in places.items():
        below.setdefault(path[0], {})[path[1:]] = slot
    changed = {}
    for step, rest in below.items():
        present = step.of(value)
        new = _rebuilt(present, rest, values, known)
        if new is not present:
            changed[step] = new
    return with_parts(value, changed) if changed else value


def with_parts(value: Any, parts: dict[Step, Any]) -> Any:
    """A copy of an object that holds other things."""
    by_name = {step.key: new for step, new in parts.items()}
    if isinstance(value, torch.jit.ScriptModule):
        return _with_its_own(value, parts)
    if isinstance(value, types.FunctionType):
        return _function_with_parts(value, parts)
    if isinstance(value, types.MethodType):
        return types.MethodType(by_name.get("__func__", value.__func__), by_name.get("__self__", value.__self__))
    if isinstance(value, functools.partial):
        function, args = by_name.get("func", value.func), by_name.get("args", value.args)
        return type(value)(function, *args, **by_name.get("keywords", value.keywords))
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update(by_name)
        return _noted(value, copied)
    if isinstance(value, list | tuple):
        items = [by_name.get(i, item) for i, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else _noted(value, type(value)(items))
    result = object.__new__(type(value))
    result.__dict__.update(value.__dict__)
    result.__dict__.update(by_name)
    _noted(value.__dict__, result.__dict__)
    return result


def _with_its_own(module: Any, parts: dict[Step, Any]) -> Any:
    """A module of ``torch.jit``, which can be given no other parameters; where it is tried out its own will do."""
    for step, new in parts.items():
        if not (_is_trying.get() or torch._C._is_alias_of(new, step.of(module))):  # type: ignore[attr-defined]
            raise HookError(
                f"{module.original_name}, a module of torch.jit, is to run with another {step.key} than its own, which "
                "it cannot. Use the module from which it was made."
            )
    return module


_is_trying: ContextVar[bool] = ContextVar("hookkit_is_trying", default=False)


@contextmanager
def trying() -> Iterator[None]:
    """The time in which calls are tried out, to find out what they return."""
    token = _is_trying.set(True)
    try:
        yield
    finally:
        _is_trying.reset(token)


@attrs.define
class _Settling:
    """What a callable that is filled was given copies of.

    Attributes:
        copies: lists and dicts, attributes of objects among them, and cells; their copies; what those held at first.
        given: the lists and dicts among the arguments, and what they held at first.
        rebuilt: the copies of objects that hold other things, by what was copied.
    """

    copies: list[tuple[Any, Any, Any]] = attrs.field(factory=list)
    given: list[tuple[Any, Any]] = attrs.field(factory=list)
    rebuilt: dict[Any, Any] = attrs.field(factory=dict)


_settling: ContextVar[_Settling | None] = ContextVar("hookkit_settling", default=None)


def _noted(original: Any, copied: Any) -> Any:
    settling = _settling.get()
    if settling is not None and isinstance(original, list | dict):
        settling.copies.append((original, copied, copied.copy()))
    return copied


@contextmanager
def settled() -> Iterator[None]:
    """The time in which a callable is filled and called: what it writes to copies it has written to the originals.

    Raises:
        HookError: if it changes a list or a dict that is its argument, of which the program has another.
    """
    settling = _Settling()
    token = _settling.set(settling)
    try:
        yield
    finally:
        _settling.reset(token)
        for original, copied, before in settling.copies:
            _write_back(original, copied, before)
    for given, before in settling.given:
        # what runs compiled code may empty the list of its arguments, so that their memory is free
        if given and not _is_as_before(given, before):
            raise HookError(
                f"an opaque call changes a {type(given).__name__} that is its argument, and the program has another, "
                "in which the change would be missing. Return what it holds, or change a copy of it."
            )


def _is_as_before(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == list(before) and all(value[key] is before[key] for key in before)
    return len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True))


def _write_back(original: Any, copied: Any, before: Any) -> None:
    if isinstance(original, types.CellType):
        if contents(copied) is not before:
            original.cell_contents = contents(copied)
        return
    if isinstance(original, list):
        if not _is_as_before(copied, before):
            kept = {id(b): a for a, b in zip(original, before, strict=True)}
            original[:] = [kept.get(id(item), item) for item in copied]
        return
    for key in [key for key in before if key not in copied]:
        original.pop(key, None)
    for key, item in copied.items():
        if key not in before or item is not before[key]:
            original[key] = item


def _function_with_parts(function: types.FunctionType, parts: dict[Step, Any]) -> types.FunctionType:
    cells, settling = function.__closure__ or (), _settling.get()
    names = {step.key: new for step, new in parts.items() if step.kind == "global"}
    kept = [Step("cell", i) not in parts and contents(cell) is not function for i, cell in enumerate(cells)]
    result = types.FunctionType(
        function.__code__,
        _noted(function.__globals__, {**function.__globals__, **names}) if names else function.__globals__,
        function.__name__,
        parts.get(Step("attribute", "__defaults__"), function.__defaults__),
        tuple(cell if keep else types.CellType() for cell, keep in zip(cells, kept, strict=True)),
    )
    result.__kwdefaults__ = parts.get(Step("attribute", "__kwdefaults__"), function.__kwdefaults__)
    result.__dict__.update(function.__dict__)
    result.__qualname__, result.__module__ = function.__qualname__, function.__module__
    for i, (cell, keep) in enumerate(zip(result.__closure__ or (), kept, strict=True)):
        if not keep:
            cell.cell_contents = parts.get(Step("cell", i), result)
            if settling is not None:
                settling.copies.append((cells[i], cell, cell.cell_contents))
    return result


def fill(tree: Any, values: Sequence[Any]) -> Any:
    """A copy of a tree with values in the place of its slots; containers are new."""
    settling = _settling.get()

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return leaf.filled(values) if isinstance(leaf, Captured) else leaf

    result = map_leaves(filled, tree)
    if settling is not None:
        settling.given += [(c, c.copy()) for c in _containers(result, tree)]
    return result


def _containers(filled: Any, tree: Any) -> Iterator[Any]:
    """The lists and dicts of a filled tree, but for those that were filled in."""
    if type(filled) is not type(tree) or not isinstance(tree, list | dict | tuple):
        return
    if not isinstance(filled, tuple):
        yield filled
    pairs = [(filled[k], tree[k]) for k in tree] if isinstance(tree, dict) else zip(filled, tree, strict=True)
    for pair in pairs:
        yield from _containers(*pair)
