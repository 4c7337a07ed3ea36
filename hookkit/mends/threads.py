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

from thunder.core.compile_data import get_compile_data

from hookkit.engine.dispatch.extensions import Extension
from hookkit.mends.mend import Mend
from hookkit.patch import Patch

__all__ = ["AUTOCAST_REGIONS", "GRAD_MODE", "MENDS", "PerThread", "one_at_a_time"]


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
def one_at_a_time(program: Any) -> Iterator[None]:
    """The time in which a program is traced; another thread that traces it waits."""
    compile_data = get_compile_data()
    with _lock:
        lock = _locks.setdefault(compile_data, threading.RLock())
    with lock:
        yield


MENDS = [
    Mend(
        "threads that run one program",
        "Grad mode and the regions of autocast, while a program is traced, are shared by all threads that trace it.",
        program="""
import _thread
import threading

inside, others_turn = _thread.allocate_lock(), _thread.allocate_lock()
inside.acquire()
others_turn.acquire()

@thunder.jit
def f(x, waits):
    with torch.no_grad():
        if waits:
            inside.release()
            others_turn.acquire(True, 0.5)
        return x * 2

def other():
    f(x, False)
    others_turn.release()

x = torch.ones(1, requires_grad=True)
results = []
first = threading.Thread(target=lambda: results.append(f(x, True)))
first.start()
inside.acquire()
second = threading.Thread(target=other)
second.start()
first.join()
second.join()
print(results[0].requires_grad)
""",
        stock="True",
        eager="False",
        patches=(
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
        ),
        extension=Extension(around=one_at_a_time),
    )
]
