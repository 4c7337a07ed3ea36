"""Python state that a call's code can reach, so that looking at a call leaves no trace in it.

A Function may count its calls, append to a list, or keep a tensor on a module. thunder runs Python once, when it
traces; eager PyTorch at every call. A call that changes such state is therefore run opaque, and what was run to find
that out is undone. Looked at are the cells and globals of the code, the attributes of what is held there, and lists,
dicts and sets in them.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from hookkit import compat
from hookkit.engine.values.python_code import contents, is_own, names_in

__all__ = [
    "Generators",
    "State",
    "WritesUndone",
    "following",
    "following_natively",
    "not_followed",
    "note_called",
]

_DEPTH = 3
_MISSING = object()
_CONTAINERS = (list, dict, set, deque)


@attrs.define(eq=False)
class State:
    """What could be reached, as it was when it was looked at."""

    containers: dict[int, tuple[Any, Any]] = attrs.field(factory=dict)
    cells: dict[int, tuple[Any, Any]] = attrs.field(factory=dict)
    names: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = attrs.field(factory=dict)
    attributes: dict[tuple[int, str], tuple[type[Any], str, Any]] = attrs.field(factory=dict)
    slots: dict[tuple[int, str], tuple[Any, str, Any]] = attrs.field(factory=dict)
    classes: dict[int, type[Any]] = attrs.field(factory=dict)
    seen: set[int] = attrs.field(factory=set)
    codes: dict[int, types.CodeType] = attrs.field(factory=dict)
    compiles: bool = False  # whether a higher-order operator was called that compiles what it is given

    @classmethod
    def reachable_from(cls, roots: Iterable[Any], depth: int = _DEPTH) -> State:
        """Look at what functions, classes and objects can reach."""
        state = cls()
        for root in roots:
            state._visit(root, depth)
        return state

    def changed(self) -> list[str]:
        """What is not as it was, in words."""
        found = [f"a {type(o).__name__}" for o, copy in self.containers.values() if not _same(o, copy)]
        cells = self.cells.values()
        found += ["a variable of an enclosing function" for c, v in cells if contents(c, _MISSING) is not v]
        found += [f"the name {name!r}" for d, name, v in self.names.values() if d.get(name, _MISSING) is not v]
        found += [f"{c.__qualname__}.{n}" for c, n, v in self.attributes.values() if vars(c).get(n, _MISSING) is not v]
        found += [f"the attribute {n!r}" for o, n, v in self.slots.values() if getattr(o, n, _MISSING) is not v]
        return found

    def changed_here(self) -> str | None:
        """What a program changed that it holds itself, a variable or a container, in words; None if nothing."""
        if any(contents(cell, _MISSING) is not value for cell, value in self.cells.values()):
            return "a variable"
        return next((f"a {type(o).__name__}" for o, copy in self.containers.values() if not _same(o, copy)), None)

    def overwritten(self) -> bool:
        """Whether a container holds another value than it did; one taken out, or None in its place, frees memory."""
        return any(
            any(v is not None and v is not copy.get(k, _MISSING) for k, v in original.items())
            if isinstance(original, dict)
            else not _same(original, copy)
            for original, copy in self.containers.values()
        )

    def restore(self) -> None:
        """Put everything back."""
        for original, copy in self.containers.values():
            if not _same(original, copy):
                _put_back(original, copy)
        for cell, value in self.cells.values():
            if contents(cell, _MISSING) is not value:
                cell.cell_contents = value
        for holder, name, value in self.names.values():
            if holder.get(name, _MISSING) is not value:
                if value is _MISSING:
                    holder.pop(name, None)
                else:
                    holder[name] = value
        for cls, name, value in self.attributes.values():
            if vars(cls).get(name, _MISSING) is not value:
                setattr(cls, name, value)
        for value, name, held in self.slots.values():
            if getattr(value, name, _MISSING) is held:
                continue
            if held is _MISSING:
                delattr(value, name)
            else:
                setattr(value, name, held)

    def visit_called(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Look at the globals that code names which is about to run, however deep it is called.

        What its cells hold may be the program's own, made while it runs.
        """
        if id(code) not in self.codes and is_own(names.get("__name__")):
            self.codes[id(code)] = code
            self._visit_globals(code, names, _DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        if depth < 0 or id(value) in self.containers:
            return
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            self._visit(value.__func__, depth)
            if isinstance(value, types.MethodType):
                self._visit(value.__self__, depth - 1)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, _CONTAINERS):
            self.containers[id(value)] = (value, value.copy())
            for item in list(value.values()) if isinstance(value, dict) else list(value):
                if isinstance(item, _CONTAINERS):
                    self._visit(item, depth - 1)
        elif isinstance(value, type):
            if is_own(value.__module__):
                for base in value.__mro__:
                    if is_own(base.__module__):
                        self._visit_class(base, depth)
        elif _is_kernel(value):  # what it has compiled and tuned it need not compile and tune again
            return
        elif type(value).__module__ != "builtins" and not isinstance(value, torch.Tensor | types.ModuleType):
            attributes = getattr(value, "__dict__", None)
            own = is_own(type(value).__module__)
            if type(attributes) is dict and (own or isinstance(value, torch.nn.Module)):
                self._visit(attributes, depth)
            for cls in type(value).__mro__ if own else ():
                slots = vars(cls).get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    self.slots.setdefault((id(value), name), (value, name, getattr(value, name, _MISSING)))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if id(function) in self.seen or not is_own(function.__module__):
            return
        self.seen.add(id(function))
        self._visit(getattr(function, "__wrapped__", None), depth)
        for cell in function.__closure__ or ():
            if id(cell) not in self.cells:
                content = contents(cell, _MISSING)
                self.cells[id(cell)] = (cell, content)
                self._visit(content, depth - 1)
        self._visit_globals(function.__code__, function.__globals__, depth)

    def _visit_globals(self, code: types.CodeType, names: dict[str, Any], depth: int) -> None:
        for name in names_in(code):
            if name in names:
                content = names[name]
                self.names.setdefault((id(names), name), (names, name, content))
                self._visit(content, depth - 1)

    def _visit_class(self, cls: type[Any], depth: int) -> None:
        self.classes[id(cls)] = cls
        for name, value in list(vars(cls).items()):
            if isinstance(value, staticmethod | classmethod | types.FunctionType | list | dict | set):
                self._visit(value, depth)
            if not name.startswith("__"):
                self.attributes.setdefault((id(cls), name), (cls, name, value))


_following: ContextVar[tuple[State, ...]] = ContextVar("hookkit_following_states", default=())


@contextmanager
def following(*states: State) -> Iterator[None]:
    """While it lasts, the globals of functions that are interpreted are looked at before they run."""
    token = _following.set((*_following.get(), *states))
    try:
        yield
    finally:
        _following.reset(token)


@contextmanager
def following_natively(state: State) -> Iterator[None]:
    """While it lasts, the globals of functions that Python runs in this thread are looked at before they run."""
    before: Any = sys.getprofile()

    def look(frame: types.FrameType, event: Any, argument: Any) -> None:
        if event == "call":
            state.visit_called(frame.f_code, frame.f_globals)
            state.compiles |= compat.is_compiled_operator(frame)
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def not_followed() -> Iterator[None]:
    """While it lasts, functions that Python runs in this thread are not looked at, as if nobody followed them."""
    before: Any = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


def note_called(function: Any) -> None:
    """A function is about to be interpreted."""
    if isinstance(function, types.FunctionType):
        for state in _following.get():
            state.visit_called(function.__code__, function.__globals__)


@attrs.define(eq=False)
class Generators:
    """The random generators whose numbers a trace would repeat: Python's, NumPy's and torch's own."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> Generators:
        """Look at the generators."""
        numpy = sys.modules.get("numpy")
        drawn = numpy.random.get_state() if numpy is not None else None
        return cls(random.getstate(), drawn, torch.random.get_rng_state())

    def drawn_from(self) -> bool:
        """Whether a number has been drawn since."""
        return self.drawn_elsewhere() or not torch.equal(torch.random.get_rng_state(), self.torch)

    def drawn_elsewhere(self) -> bool:
        """Whether a number has been drawn since from a generator that is not torch's."""
        now = Generators.now()
        numpys = now.numpy is not None and self.numpy is not None and _key(now.numpy) != _key(self.numpy)
        return bool(now.python != self.python or numpys)

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.random.set_rng_state(self.torch)


def _key(numpy_state: Any) -> Any:
    return numpy_state[1].tobytes(), numpy_state[2:]


class WritesUndone(TorchDispatchMode):
    """Afterwards every tensor that was written to, and every generator that was drawn from, is as it was before.

    What a higher-order operator does is not looked at: those that write say so by a schema of their own.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        self.written: set[int] = set()  # the storages
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __enter__(self) -> WritesUndone:
        # TorchDispatchMode's own notes it for the process, and the mode of another thread that it was so before: of
        # PyTorch up to 2.10 Dynamo would compile nothing any more.
        _push_mode(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [] if isinstance(function, HigherOrderOperator) else self._given(function, args, kwargs)
        for parameter, value in given:
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._note(tensor)
            elif isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = (value, value.get_state())
        return function(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        has_storage = tensor.layout is torch.strided
        with torch._C.DisableTorchFunction():  # a mode that refuses the storage of tensors without data
            if has_storage:
                self.written.add(tensor.untyped_storage()._cdata)
            if type(tensor) is torch.Tensor and id(tensor) not in self._tensors:
                place = _place(tensor) if has_storage else None
                with unset_fake_temporarily():
                    self._tensors[id(tensor)] = (tensor, tensor.clone(), place)

    @staticmethod
    def _given(function: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        parameters = function._schema.arguments
        return [*zip(parameters, args, strict=False), *((p, kwargs[p.name]) for p in parameters if p.name in kwargs)]

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, before, place in reversed(self._tensors.values()):
                if tensor.shape != before.shape and place is not None:  # by `set_`, or as the `out` of an operation
                    tensor.set_(*place)
                tensor.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)


def _place(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()


def _is_kernel(value: Any) -> bool:
    """Whether a value is a kernel of Triton, or of a class made from one of Triton's."""
    return any(str(cls.__module__).partition(".")[0] == "triton" for cls in type(value).__mro__)


def _put_back(original: Any, copy: Any) -> None:
    """Make a container what it was, without a moment at which it lacks what others may look for.

    Names that were added to a module stay: an import adds them, in another thread too.
    """
    if isinstance(original, dict):
        for key in list(original) if not _is_namespace(original) else ():
            if key not in copy:
                del original[key]
        for key, value in copy.items():
            if original.get(key, _MISSING) is not value:
                original[key] = value
        if list(original) != list(copy) and not _is_namespace(original):
            for key in copy:
                original[key] = original.pop(key)
    elif isinstance(original, list):
        original[:] = copy
    elif isinstance(original, set):
        original |= copy
        original &= copy
    else:
        original.clear()
        original.extend(copy)


def _is_namespace(names: dict[Any, Any]) -> bool:
    """Whether a dict is a module's, the globals of functions."""
    return "__builtins__" in names or ("__name__" in names and "__spec__" in names)


def _same(original: Any, copy: Any) -> bool:
    if len(original) != len(copy):
        return False
    if isinstance(original, dict):
        return all(k in copy and copy[k] is v for k, v in original.items())
    if isinstance(original, set):
        return bool(original == copy)
    return all(a is b for a, b in zip(original, copy, strict=True))
