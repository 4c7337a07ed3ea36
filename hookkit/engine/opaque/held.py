"""Tensors that a function captures which an opaque call is given: they are arguments of the operator, too.

A function reaches tensors by its closure, its globals and defaults, the object that it is a method of, a module's
parameters, a ``functools.partial``. While the program is traced their places hold proxies, or tensors that are inputs
of the program; while the operator runs, they hold what it is given for them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch
from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, get_interpreterruntimectx, unwrap, wrap_const
from thunder.core.proxies import Proxy

from hookkit.engine.interpreter.attempt import is_made
from hookkit.engine.values.python_code import is_own, names_in
from hookkit.engine.values.wrapping import PLAIN, Slot, unwrap_arguments
from hookkit.errors import HookError

__all__ = ["HELD", "Held", "find_held"]

HELD = "hookkit_held"  # the keyword under which an opaque call is given what its functions capture

_one_at_a_time = threading.RLock()  # the places are the program's own objects, which threads share


@attrs.frozen(eq=False)
class _Place:
    """Where something is held that contains tensors.

    Attributes:
        get: gives what is held there.
        put: puts something there.
        tree: what is to be held, with slots for what the operator is given, also inside of tuples.
        is_made: whether the program makes the place itself, while it is traced.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    tree: Any
    is_made: bool

    def holds(self, value: Any) -> bool:
        """Whether it holds a value, or a tuple with the same in it."""
        return _is_same(self.get(), value)


@attrs.define(eq=False)
class Held:
    """A callee whose functions capture tensors.

    Attributes:
        callee: what PyTorch runs.
        places: where the tensors are held.
        description: the call, for messages.
    """

    callee: Callable[..., Any]
    places: list[_Place]
    description: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = kwargs.pop(HELD)
        with self._holding(values):
            return self.callee(*args, **kwargs)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The time in which others look at what the places hold and may put it back; it is as it was afterwards."""
        before = [place.get() for place in self.places]
        try:
            yield
        finally:
            for place, held in zip(self.places, before, strict=True):
                if not place.holds(held):
                    place.put(held)

    @contextlib.contextmanager
    def _holding(self, values: list[Any]) -> Iterator[None]:
        """The time in which the places hold what the operator was given."""
        with _one_at_a_time, contextlib.ExitStack() as stack:
            held = []
            for place in self.places:
                before, wanted = place.get(), _filled(place.tree, values)
                held.append(wanted)
                if before is not wanted:
                    stack.callback(place.put, before)
                    place.put(wanted)
            yield
            if not all(p.holds(h) for p, h in zip(self.places, held, strict=True) if p.is_made):
                raise HookError(
                    f"{self.description}: a function that it calls changes a Python object that the program makes, and "
                    "the program goes on with the object as it was when it was traced. Return what the function finds "
                    "(has_aux=True), or make the object outside of the program."
                )


def find_held(wrapped: Iterator[Any] | tuple[Any, ...], slot: Callable[[Proxy], Slot]) -> list[_Place]:
    """The places of tensors that functions among a call's arguments capture.

    Args:
        wrapped: the arguments, as values of the interpreter.
        slot: gives a proxy its slot among what is captured.
    """
    search = _Search(slot)
    for value in wrapped:
        search.argument(value)
    return search.places


class _Search:
    """Looks for tensors in what a function can reach; what is reached twice is looked at once."""

    def __init__(self, slot: Callable[[Proxy], Slot]) -> None:
        self._slot = slot
        self._seen: dict[int, Any] = {}
        self.places: list[_Place] = []

    def argument(self, wrapped: Any) -> None:
        """An argument of the call; tensors among those have slots of their own."""
        value = unwrap(wrapped)
        if isinstance(value, tuple | list | dict):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            for key in keys:
                if not isinstance(_raw(value, key), (torch.Tensor, Proxy, *PLAIN)):
                    self.argument(_item(wrapped, key))
        elif not isinstance(value, torch.Tensor | Proxy):
            self._look(wrapped)

    def _look(self, wrapped: Any) -> Any:
        """What is to be held instead of a value: with slots, or the value itself."""
        value = unwrap(wrapped)
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.Tensor | Proxy):
            return self._tensor(wrapped)
        if isinstance(value, tuple):
            items = [self._look(_item(wrapped, i)) for i in range(len(value))]
            if not _has_slots(tuple(items)):
                return value
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        if id(value) in self._seen:
            return value
        self._seen[id(value)] = value  # alive, so that nothing else gets its identity
        if isinstance(value, list | dict):
            self._container(wrapped, value)
        elif isinstance(value, FunctionType):
            self._function(wrapped, value)
        elif isinstance(value, MethodType):
            self._look(_attribute(wrapped, "__self__"))
            self._look(_attribute(wrapped, "__func__"))
        elif isinstance(value, functools.partial):
            self._partial(wrapped, value)
        elif isinstance(value, torch.nn.Module):
            self._module(wrapped, value)
        elif isinstance(value, type):
            self._class(wrapped, value)
        elif not isinstance(value, ModuleType) and is_own(type(value).__module__):
            self._object(wrapped, value)
        return value

    def _tensor(self, wrapped: Any) -> Any:
        value = unwrap(wrapped)
        if isinstance(value, torch.Tensor) and _is_made(wrapped):
            return value  # thunder cannot ask for it again: what is there when the program runs is used
        ((proxy,), _) = unwrap_arguments((wrapped,), {})
        return self._slot(proxy) if isinstance(proxy, Proxy) else value

    def _container(self, wrapped: Any, value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not _is_made(wrapped):
            for key in keys:
                self._hold(value, key, _item(wrapped, key))
            return
        items = [self._look(_item(wrapped, key)) for key in keys]

        def get() -> Any:
            return tuple(value.items() if isinstance(value, dict) else value)

        def put(held: Any) -> None:
            value.clear()
            value.update(held) if isinstance(value, dict) else value.extend(held)

        self._put(get, put, tuple(zip(keys, items, strict=True) if isinstance(value, dict) else items), always=True)

    def _hold(self, holder: Any, key: Any, wrapped: Any, *, always: bool = False) -> None:
        """An item of a container, or of an object's attributes."""
        if wrapped is not None:
            put = functools.partial(holder.__setitem__, key)
            self._put(functools.partial(_raw, holder, key), put, self._look(wrapped), always=always)

    def _put(self, get: Callable[[], Any], put: Callable[[Any], None], tree: Any, *, always: bool = False) -> None:
        """Note a place.

        Args:
            get: gives what is held there.
            put: puts something there.
            tree: what is to be held.
            always: whether it is to be held although there are no tensors in it: the program may change the place
                after the call, and is not there when the operator runs.
        """
        if always or _has_slots(tree):
            self.places.append(_Place(get, put, tree, always))

    def _function(self, wrapped: Any, function: FunctionType) -> None:
        for index, cell in enumerate(function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty one
                cell.cell_contents  # noqa: B018
                holder = _item(_attribute(wrapped, "__closure__"), index)
                self._put(
                    functools.partial(getattr, cell, "cell_contents"),
                    functools.partial(setattr, cell, "cell_contents"),
                    self._look(_attribute(holder, "cell_contents")),
                    always=_is_made(holder),
                )
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                tree = self._look(_attribute(wrapped, name))
                self._put(functools.partial(getattr, function, name), functools.partial(setattr, function, name), tree)
        names = function.__globals__
        if is_own(names.get("__name__")):
            used = names_in(function.__code__)
            for name in sorted(used & names.keys()):
                if isinstance(names[name], ModuleType):
                    self._namespace(_item(_attribute(wrapped, "__globals__"), name), used)
                elif not isinstance(names[name], PLAIN):
                    self._hold(names, name, _item(_attribute(wrapped, "__globals__"), name))

    def _namespace(self, wrapped: Any, used: set[str]) -> None:
        """Of a Python module what code that names it may name of it."""
        module = unwrap(wrapped)
        if is_own(module.__name__):
            for name in sorted(used & vars(module).keys()):
                if not isinstance(vars(module)[name], (ModuleType, *PLAIN)):
                    self._hold(vars(module), name, _attribute(wrapped, name))

    def _partial(self, wrapped: Any, partial: functools.partial[Any]) -> None:
        parts = [self._look(_attribute(wrapped, name)) for name in ("func", "args", "keywords")]

        def put(held: Any) -> None:
            partial.__setstate__((*held, partial.__dict__))  # type: ignore[attr-defined]

        self._put(lambda: (partial.func, partial.args, partial.keywords), put, tuple(parts))

    def _module(self, wrapped: Any, module: torch.nn.Module) -> None:
        for held in (module._parameters, module._buffers, module._modules):
            for name, value in held.items():
                if value is not None:
                    self._hold(held, name, _attribute(wrapped, name))
        self._object(wrapped, module, without=("_parameters", "_buffers", "_modules"))

    def _class(self, wrapped: Any, cls: type[Any]) -> None:
        for name, held in list(vars(cls).items()) if is_own(cls.__module__) else ():
            if isinstance(held, torch.Tensor):
                self._put(
                    functools.partial(getattr, cls, name),
                    functools.partial(setattr, cls, name),
                    self._look(_attribute(wrapped, name)),
                )
            elif isinstance(held, staticmethod | classmethod | FunctionType):
                self._look(_attribute(wrapped, name))

    def _object(self, wrapped: Any, value: Any, without: tuple[str, ...] = ()) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            for name in list(attributes):
                made = _is_made(wrapped)
                if name not in without and (made or not isinstance(attributes[name], PLAIN)):
                    self._hold(attributes, name, _attribute(wrapped, name), always=made)
        for cls in type(value).__mro__:
            for name, method in list(vars(cls).items()) if is_own(cls.__module__) else ():
                if isinstance(method, FunctionType) and id(method) not in self._seen:
                    bound = _attribute(wrapped, name)
                    if bound is not None and isinstance(unwrap(bound), MethodType):
                        self._look(_attribute(bound, "__func__"))


def _is_made(wrapped: Any) -> bool:
    """Whether something was made while the program is traced, or put there by hookkit; nothing else can change it."""
    return is_made(wrapped.provenance) or not _begins_outside(wrapped.provenance)


def _begins_outside(provenance: Any) -> bool:
    inst = getattr(provenance.inst, "value", provenance.inst)
    return inst in ("INPUT_ARGS", "INPUT_KWARGS", "INPUT_FN") or any(map(_begins_outside, provenance.inputs))


def _has_slots(tree: Any) -> bool:
    return isinstance(tree, Slot) or (isinstance(tree, tuple) and any(map(_has_slots, tree)))


def _filled(tree: Any, values: list[Any]) -> Any:
    if isinstance(tree, Slot):
        return values[tree.index]
    if not _has_slots(tree):
        return tree
    items = [_filled(item, values) for item in tree]
    return tree._make(items) if hasattr(tree, "_make") else tuple(items)


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    both = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
    return both and all(map(_is_same, a, b))


def _raw(holder: Any, key: Any) -> Any:
    return holder[key]


def _attribute(wrapped: Any, name: str) -> Any:
    return _interpreted(getattr, wrapped, wrap_const(name))


def _item(wrapped: Any, key: Any) -> Any:
    return _interpreted(lambda holder, key: holder[key], wrapped, wrap_const(key))


def _interpreted(function: Callable[..., Any], *args: Any) -> Any:
    if args[0] is None:
        return None
    result = _interpret_call(function, *args)
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        get_interpreterruntimectx().curexc = None
        return None
    return result
