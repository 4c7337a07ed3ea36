"""What a program compiled by thunder cannot do with autograd, refused in words; a Function that does it runs opaque.

thunder differentiates a trace after it is made: while the program is traced there is no graph to ask for gradients.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import hookkit
from hookkit.rules._names import both, of_torch

__all__ = [
    "as_subclass",
    "autograd_inside",
    "detach_",
    "grad",
    "grad_fn",
    "kernel",
    "register_hook",
    "resizing",
    "retain_grad",
    "saved_tensors_hooks",
    "script_module",
    "to_python",
]

FUNCTIONS = of_torch(
    *("autograd.backward", "Tensor.backward"),
    *("autograd.forward_ad.enter_dual_level", "autograd.forward_ad.make_dual", "autograd.forward_ad.unpack_dual"),
    "autograd.forward_ad.dual_level.__enter__",
)


@hookkit.rule(FUNCTIONS, mode="trace", pass_call=True, priority=-100)
def autograd_inside(call: hookkit.Call, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to differentiate inside a traced program."""
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder: there is no autograd graph while it is traced. "
        "Call it outside the compiled program, or inside a torch.autograd.Function, which then runs as one operator."
    )


@hookkit.rule(of_torch("Tensor.grad_fn.__get__"), mode="trace", pass_call=True, priority=-100)
def grad_fn(call: hookkit.Call, *args: Any) -> NoReturn:
    """Refuses to look at the autograd graph."""
    raise hookkit.HookError(
        f"grad_fn of a tensor is not supported inside a program compiled by thunder (at {call.source}): there is no "
        "autograd graph while it is traced. Ask for requires_grad instead."
    )


@hookkit.rule(of_torch("Tensor.grad.__get__"), mode="trace", pass_call=True, priority=-100)
def grad(call: hookkit.Call, *args: Any) -> NoReturn:
    """Refuses to read the gradient that a tensor has so far."""
    raise hookkit.HookError(
        f"grad of a tensor is not supported inside a program compiled by thunder (at {call.source}): what it is "
        "then is not known while the program is traced. Ask for it outside the compiled program, or inside a "
        "torch.autograd.Function, which then runs as one operator."
    )


REGISTER_HOOK = of_torch("Tensor.register_hook", "Tensor.register_post_accumulate_grad_hook")


@hookkit.rule(REGISTER_HOOK, mode="trace", pass_call=True, priority=-100)
def register_hook(call: hookkit.Call, self: Any, hook: Any) -> NoReturn:
    """Refuses to have a function called with a gradient."""
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder: there is no autograd graph while it is traced. "
        "Register the hook outside the compiled program, on a tensor that it takes or returns; or change the gradient "
        "in the backward of a torch.autograd.Function."
    )


@hookkit.rule(of_torch("Tensor.as_subclass"), mode="trace", pass_call=True, priority=-100)
def as_subclass(call: hookkit.Call, self: Any, cls: Any) -> Any:
    """Refuses to make a tensor one of another class; of torch's own it is already."""
    if cls is torch.Tensor:
        return self.view_as(self)
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder, whose tensors are all of the class "
        "torch.Tensor. Do it to what the compiled program takes or returns, or inside a torch.autograd.Function."
    )


TO_PYTHON = of_torch("Tensor.is_nonzero", "Tensor.numpy", "Tensor.tolist", "is_nonzero")


@hookkit.rule(TO_PYTHON, mode="trace", pass_call=True, priority=-100)
def to_python(call: hookkit.Call, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to look at values that only the run knows."""
    raise hookkit.DataDependencyError(
        f"{call} makes Python values of a tensor (data dependency), which are known only when the program runs. "
        "Compute with tensors; or call it outside the compiled program, or in a function that runs as one operator: "
        "hookkit.opaque(function), or the forward of a torch.autograd.Function"
    )


RESIZING = of_torch("Tensor.resize_", "Tensor.resize_as_", "resize_as_", "Tensor.set_")


@hookkit.rule(RESIZING, mode="trace", pass_call=True, priority=-100)
def resizing(call: hookkit.Call, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to give a tensor another shape, or other memory."""
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder, where a tensor keeps its shape and its memory. "
        "Make a new tensor: x.reshape(...), x.new_empty(...) or torch.empty(...)."
    )


@hookkit.rule(both("detach_"), mode="trace", pass_call=True, priority=-100)
def detach_(call: hookkit.Call, *args: Any) -> NoReturn:
    """Refuses to cut a tensor off from its gradient in place."""
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder, which would go on to differentiate the tensor. "
        "Write x = x.detach()."
    )


@hookkit.rule(of_torch("Tensor.retain_grad"), mode="trace", pass_call=True, priority=-100)
def retain_grad(call: hookkit.Call, tensor: torch.Tensor) -> NoReturn:
    """Refuses to promise the gradient of a tensor that is made inside."""
    raise hookkit.HookError(
        f"{call} is not supported inside a program compiled by thunder, whose tensors get no .grad. Return the tensor, "
        "and call retain_grad on what the compiled program returns."
    )


@hookkit.rule(of_torch("autograd.graph.saved_tensors_hooks.__enter__"), mode="trace", pass_call=True, priority=-100)
def saved_tensors_hooks(call: hookkit.Call, self: Any) -> NoReturn:
    """Refuses to have functions called with what is kept for the backward."""
    raise hookkit.HookError(
        f"{type(self).__name__} is not supported inside a program compiled by thunder (at {call.source}), "
        "which decides what is kept for the backward. Enter it outside the compiled program, or inside a "
        "torch.autograd.Function, which then runs as one operator."
    )


@saved_tensors_hooks.when
def _(call: hookkit.Call, self: Any) -> Any:
    where = isinstance(self, torch.autograd.graph.save_on_cpu)
    return not where or hookkit.decline("where it is kept makes no difference to what is computed")


# until Triton 3.4 an interpreted kernel has a method of its own
LAUNCHES = [
    "triton.runtime.jit:KernelInterface.__getitem__",
    "triton.runtime.interpreter:InterpretedFunction.__getitem__",
]


@hookkit.rule(LAUNCHES, mode="trace", pass_call=True, priority=-100)
def kernel(call: hookkit.Call, self: Any, grid: Any) -> NoReturn:
    """Refuses to launch a kernel of Triton, and to look into Triton, which patches its own modules meanwhile."""
    raise hookkit.HookError(
        f"the program launches the kernel {getattr(self, '__name__', type(self).__name__)!r} of Triton (at "
        f"{call.source}), which is not supported inside a program compiled by thunder: a kernel needs the addresses of "
        "tensors. Launch it in the forward or backward of a torch.autograd.Function, or in a function that runs as "
        "one operator: hookkit.opaque(function)."
    )


def is_script_module(call: hookkit.Call) -> bool:
    """Whether a method of a module of ``torch.jit`` is called, or one that is the program itself."""
    return isinstance(call.callable, tuple(of_torch("jit.ScriptModule", "ScriptMethod")))


@hookkit.rule(hookkit.where(is_script_module), mode="trace", pass_call=True, priority=-100)
def script_module(call: hookkit.Call, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to run a module whose parameters cannot be seen."""
    raise hookkit.HookError(
        f"{type(call.callable).__name__} of torch.jit is not supported inside a program compiled by thunder (at "
        f"{call.source}), which cannot look into it for its parameters. Use the module from which it was made, or, in "
        "place of a method or of the program itself, call the module in a function; or call it outside the compiled "
        "program, or inside a torch.autograd.Function."
    )
