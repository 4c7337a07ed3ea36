"""What holds while a call is tried out: no address of a tensor without data is told, no gradient stays on a parameter.

C code would read through such an address. Python code asks for it by methods of tensors, which are refused. C++ asks
the tensor itself, which refuses the address to write to and answers 0 for the one to read from: an extension is not
called.
"""

from __future__ import annotations

import logging
import sys
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hookkit import compat

__all__ = ["NeedsData", "TriedOut"]


class NeedsData(BaseException):
    """Something cannot be called without data. The program does not catch it: Python looks at no call afterwards."""


_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


class TriedOut(TorchFunctionMode):
    """While a call is tried out: no address of a tensor that has no data, and no gradients left on parameters.

    C code would read through such an address. A backward that calls ``torch.autograd.backward`` itself accumulates into
    the parameters of the modules that it was given.
    """

    _ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__})

    def __init__(self, without_data: bool = False) -> None:
        super().__init__()
        self._without_data = without_data
        self._refused = self._ADDRESSES if without_data else frozenset()
        self._profile: Any = None  # the function that is told of calls around this
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._addresses = compat.addresses_refused()  # this mode is off in a backward that the call runs itself

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._refused:
            raise NotImplementedError(f"a tensor without data has no {function.__name__}")
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.nn.Parameter) and id(value) not in self._gradients:
                with torch._C.DisableTorchFunction():
                    self._gradients[id(value)] = value, value.grad
                    value.grad = None
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> TriedOut:
        _fake_tensor_log.disabled = True  # what fails here is said once, by whoever asked
        self._addresses.__enter__()
        if self._without_data:
            self._profile = sys.getprofile()
            sys.setprofile(self._look)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._without_data:
            sys.setprofile(self._profile)
        self._addresses.__exit__(None, None, None)
        _fake_tensor_log.disabled = False
        for parameter, gradient in self._gradients.values():
            parameter.grad = gradient

    def _look(self, frame: FrameType, event: Any, called: Any) -> None:
        """Refuse to call a function of an extension that takes tensors, before it runs."""
        if event == "c_call" and _takes_tensors(called):
            raise NeedsData(f"{called.__name__} of the extension {called.__module__} needs data")
        if self._profile is not None:
            self._profile(frame, event, called)


def _takes_tensors(function: Any) -> bool:
    """Whether a function is one that pybind11 has made of one of C++, not torch's, and may take tensors."""
    if type(function) is not BuiltinFunctionType or not _is_record(function.__self__):
        return False
    signature = function.__doc__ or "Tensor"
    return "Tensor" in signature and str(function.__module__).partition(".")[0] != "torch"


def _is_record(owner: Any) -> bool:
    """Whether something is what pybind11 puts behind a function: a capsule, since its version 3 a class of its own."""
    name = type(owner).__name__
    return name == "PyCapsule" or (name.startswith("pybind11") and "function_record" in name)
