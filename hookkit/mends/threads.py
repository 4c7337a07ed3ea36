"""A program that several threads compile and run at once.

thunder keeps in the data of a compiled program what holds while it is traced: grad mode, and the regions of autocast.
It is per thread here. And one thread at a time traces a program, because the program's executor is one.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hookkit.patch import Patch

__all__ = ["AUTOCAST_REGIONS", "GRAD_MODE", "PATCHES", "PerThread", "one_at_a_time"]


class PerThread:
    """An attribute that has a value of its own in each thread.

    The value that was set last, in whatever thread, is what the object has without this descriptor.
    """

    def __init__(self, name: str, default: Callable[[], Any]) -> None:
        self._name = name
        self._default = default
        self._local = threading.local()

    def __get__(self, holder: Any, owner: type[Any]) -> Any:
        if holder is None:
            return self
        values = self._values()
        if holder not in values:
            values[holder] = self._default()
        return values[holder]

    def __set__(self, holder: Any, value: Any) -> None:
        self._values()[holder] = holder.__dict__[self._name] = value

    def _values(self) -> weakref.WeakKeyDictionary[Any, Any]:
        try:
            return self._local.values  # type: ignore[no-any-return]
        except AttributeError:
            self._local.values = weakref.WeakKeyDictionary()
            return self._local.values  # type: ignore[no-any-return]


GRAD_MODE = PerThread("is_grad_enabled", lambda: True)
AUTOCAST_REGIONS = PerThread("stack", deque)

_lock = threading.Lock()
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


@contextmanager
def one_at_a_time(compile_data: Any) -> Iterator[None]:
    """The time in which a program is traced; another thread that traces it waits."""
    with _lock:
        lock = _locks.setdefault(compile_data, threading.RLock())
    with lock:
        yield


PATCHES = [
    Patch(
        "thunder.common:CompileData.is_grad_enabled",
        lambda _: GRAD_MODE,
        "threads that run one program share its grad mode",
        adds=True,
        set_by="__init__",
        needed=True,
    ),
    Patch(
        "thunder.core.utils:AutocastStack.stack",
        lambda _: AUTOCAST_REGIONS,
        "threads that run one program share its autocast regions",
        adds=True,
        set_by="__init__",
        needed=True,
    ),
]
