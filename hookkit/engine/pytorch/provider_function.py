"""A rule's providers, run by PyTorch as one autograd Function.

The backward provider's gradients have derivatives of every order. Residuals that the forward computes have no graph,
because PyTorch runs the forward of a Function without one; where gradients are to have a graph the forward provider is
run again, with one, and the backward provider gets what it keeps then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from hookkit.call import Call
from hookkit.engine.interpreter.outside_tensors import OUTSIDE, Uses, gets_gradients, refuse_missing
from hookkit.engine.interpreter.side_effects import Generators
from hookkit.engine.values.binding import Bound
from hookkit.engine.values.captured import fill
from hookkit.engine.values.wrapping import Slot, broadcasts_to, leaves, map_leaves
from hookkit.errors import GradientError, HookError
from hookkit.residuals import Residuals
from hookkit.returned import check_takes, output_and_residuals
from hookkit.rule import Rule

__all__ = ["no_inputs_kept", "parameters", "provider_callee", "refusing", "split_tensors"]

_keeps_inputs: ContextVar[bool] = ContextVar("hookkit_keeps_inputs", default=True)

# What takes the values of a tensor out of PyTorch, which knows no derivative of what is made of them.
_TAKES_OUT = {
    getattr(torch.Tensor, name): name
    for name in ("numpy", "__array__", "item", "tolist", "__float__", "data_ptr", "__dlpack__")
}
_CONSTANTS = str | bytes | int | None | torch.dtype | torch.device


@contextlib.contextmanager
def no_inputs_kept() -> Iterator[None]:
    """The time in which calls are made of which only the first derivative is asked for."""
    token = _keeps_inputs.set(False)
    try:
        yield
    finally:
        _keeps_inputs.reset(token)


def provider_callee(rule: Rule[..., Any], call: Call) -> Callable[..., Any]:
    """A callable that runs a rule's providers as one autograd Function."""
    assert rule.forward is not None
    leading = (call.seen,) if rule.pass_call else ()
    forward = functools.partial(rule.forward, *leading)
    if rule.backward_provider is None:
        return lambda *args, **kwargs: output_and_residuals(rule, call, forward(*args, **kwargs))[0]
    backward = functools.partial(rule.backward_provider, *leading)

    class Providers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, args: Any, kwargs: Any, structure: list[Any], *tensors: torch.Tensor) -> Any:
            besides = kwargs.pop(OUTSIDE, {})
            by_name = Bound.of(rule, Call(forward, None, args, kwargs)).by_name
            uses: Any = contextlib.nullcontext()
            if any(ctx.needs_input_grad) and gets_gradients(rule, call):
                named = {id(t) for t in besides.values()}
                given = [t for t in tensors if id(t) not in named]
                uses = Uses(rule, call, by_name, given)
            generators = Generators.now() if _keeps_inputs.get() else None
            # where a gradient may get a graph, that has to lead to the tensors that the call is given
            with _standing_in(besides if generators is not None else {}, by_name), uses:
                result = forward(*args, **kwargs)
            ctx.used = uses.names if isinstance(uses, Uses) else ()
            result, kept = output_and_residuals(rule, call, result)
            residuals = kept if kept is not None else Residuals({})
            marks = residuals._marks
            values = {k: v for k, v in residuals.__dict__.items() if not k.startswith("_")}
            outputs, ctx.structure = split_tensors(result)
            ctx.again = None
            inputs: Sequence[torch.Tensor] = ()
            if generators is not None and _are_computed(values, [*leaves((args, kwargs)), *tensors, *outputs]):
                inputs = tensors
                ctx.again = _Again(forward, call, generators, bool(marks.dirty))
            places = {id(t): Slot(i) for i, t in enumerate(tensors)}
            args, kwargs, besides = map_leaves(lambda v: places.get(id(v), v), (args, kwargs, besides))
            ctx.arguments = (args, kwargs, besides)
            ctx.bound = attrs.evolve(Bound.of(rule, Call(forward, None, args, kwargs)), named=str(call))
            ctx.bound.outside = besides
            ctx.needs = ctx.bound.needs([Slot(i) for i, n in enumerate(ctx.needs_input_grad[3:]) if n])
            ctx.inputs = [Metadata.of(t) for t in tensors]
            saved, ctx.residuals = split_tensors(values)
            ctx.count = len(saved)
            ctx.save_for_backward(*saved, *inputs)
            ctx.mark_non_differentiable(*(t for t in marks.non_differentiable if isinstance(t, torch.Tensor)))
            ctx.mark_dirty(*marks.dirty)
            ctx.set_materialize_grads(marks.materialize_grads)
            structure.append(ctx.structure)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = ctx.saved_tensors
            residuals = Residuals(fill(ctx.residuals, saved[: ctx.count]))
            watch = _TakesOut(rule) if torch.is_grad_enabled() else None
            if watch is not None and ctx.again is not None:
                with watch:
                    residuals = ctx.again.residuals(rule, fill(ctx.arguments, saved[ctx.count :]), watch) or residuals
            residuals.__dict__["needs"] = ctx.needs
            items = ctx.structure if type(ctx.structure) is tuple else (ctx.structure,)
            arguments = [
                map_leaves(lambda v: gradients[v.index] if isinstance(v, Slot) else None, item) for item in items
            ]
            result: list[Any] = [None] * len(ctx.inputs)
            check_takes(rule, call, len(arguments))
            with watch or contextlib.nullcontext():
                found = backward(residuals, *arguments)
            refuse_missing(rule, call, ctx.used, found)
            for label, place, gradient in ctx.bound.pair_gradients(rule, found):
                if gradient is not None:
                    ctx.inputs[place.index].check(rule, call, label, gradient)
                    present = result[place.index]
                    result[place.index] = gradient if present is None else present + gradient
            if watch is not None and watch.why is not None:
                result = list(refusing(watch.message(call), result, [t for t in (*saved, *gradients) if t is not None]))
            return (None, None, None, *result)

    def callee(*args: Any, **kwargs: Any) -> Any:
        tensors = {id(v): v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)}
        structure: list[Any] = []
        outputs = Providers.apply(args, kwargs, structure, *tensors.values())  # type: ignore[no-untyped-call]
        return fill(structure[0], outputs)

    return callee


def parameters(rule: Rule[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call is given besides its arguments: the parameters of modules among them, by name."""
    found = {
        f"{name}.{path}": parameter
        for name, module in Bound.of(rule, Call(rule, None, args, kwargs)).by_name.items()
        if isinstance(module, torch.nn.Module)
        for path, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return {OUTSIDE: found} if found else {}


@contextlib.contextmanager
def _standing_in(besides: dict[str, torch.Tensor], by_name: dict[str, Any]) -> Iterator[None]:
    """The time in which modules among the arguments have the tensors that a call is given as their parameters."""
    changed = []
    try:
        for name, tensor in besides.items():
            root, *path, last = name.split(".")
            held = functools.reduce(getattr, path, by_name[root])._parameters
            if held[last] is not tensor:
                changed.append((held, last, held[last]))
                held[last] = tensor
        yield
    finally:
        for held, last, own in changed:
            held[last] = own


def _are_computed(residuals: dict[str, Any], known: Sequence[Any]) -> bool:
    """Whether some residual is neither an argument, nor an output, nor a constant."""
    found = {id(k) for k in known}
    return any(not (id(v) in found or isinstance(v, _CONSTANTS) or callable(v)) for v in leaves(residuals))


@attrs.frozen
class _Again:
    """What runs a forward provider a second time, with a graph.

    Attributes:
        forward: the forward provider.
        call: the call.
        generators: the random generators as they were when it ran first.
        is_dirty: whether it changes an argument in place.
    """

    forward: Callable[..., Any]
    call: Call
    generators: Generators
    is_dirty: bool

    def residuals(self, rule: Rule[..., Any], arguments: Any, watch: _TakesOut) -> Residuals | None:
        """What the forward provider keeps; None if it cannot be run again, which the watch is told."""
        if self.is_dirty:
            watch.why = "changes an argument in place"
            return None
        args, kwargs, besides = arguments
        by_name = Bound.of(rule, Call(self.forward, None, args, kwargs)).by_name
        now = Generators.now()
        self.generators.restore()
        try:
            with torch.enable_grad(), _standing_in(besides, by_name):
                return output_and_residuals(rule, self.call, self.forward(*args, **kwargs))[1]
        except Exception as error:  # a function in C, say, that takes no tensor with a graph
            watch.why = f"raises {type(error).__name__} where PyTorch follows it: {error}"
            return None
        finally:
            now.restore()


class _TakesOut(TorchFunctionMode):
    """Notes why PyTorch does not know the derivatives of what providers compute.

    Attributes:
        why: what a provider does; None as long as they are known.
    """

    def __init__(self, rule: Rule[..., Any]) -> None:
        super().__init__()
        self._rule = rule
        self.why: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _TAKES_OUT:
            self.why = self.why or f"calls Tensor.{_TAKES_OUT[function]}(), after which PyTorch knows no derivative"
        return function(*args, **(kwargs or {}))

    def message(self, call: Call) -> str:
        """What is said where a second derivative is asked for."""
        return (
            f"the second derivative of {call} is not known: the providers of the rule {self._rule.name}, declared at "
            f"{self._rule.declared_at}, give the first one, and one of them {self.why}. Keep the arguments by "
            "hookkit.save(...), and compute the gradient from them in the backward provider with operations of PyTorch."
        )


class _Refused(torch.autograd.Function):
    """Hands gradients on that have no derivative, and says so when one is asked for."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise HookError(ctx.message)


def refusing(message: str, gradients: Sequence[Any], inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Gradients whose own derivative raises an error.

    Args:
        message: what is said.
        gradients: tensors, and None where there is no gradient.
        inputs: on what the gradients depend: the way to these leads through the refusal.
    """
    tensors = [g for g in gradients if isinstance(g, torch.Tensor)]
    refused = iter(_Refused.apply(message, len(tensors), *tensors, *inputs))  # type: ignore[no-untyped-call]
    return tuple(next(refused) if isinstance(g, torch.Tensor) else g for g in gradients)


def split_tensors(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a tree, and the tree with a slot in each one's place."""
    tensors: list[torch.Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return Slot(len(tensors) - 1)

    return tensors, map_leaves(take, tree)


@attrs.frozen
class Metadata:
    """The shape and device of an input, against which its gradient is checked."""

    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """The metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.device)

    def check(self, rule: Rule[..., Any], call: Call, label: str, gradient: Any) -> None:
        """Refuse a gradient that does not fit.

        Raises:
            GradientError: if it is no tensor, on another device, or of a shape that does not reduce to the input's.
        """
        where = f"{rule.described('backward provider')} for {call} returned a gradient of {label}"
        if not isinstance(gradient, torch.Tensor):
            raise GradientError(f"{where} that is {gradient!r} ({type(gradient).__name__}); expected a tensor or None")
        # a shipped rule hands on what a Function's own backward returned, of which PyTorch takes integers, too
        if not (gradient.is_floating_point() or gradient.is_complex() or rule.ships):
            raise GradientError(f"{where} with dtype {gradient.dtype}; expected floating point, as {label} has")
        if gradient.device != self.device:
            raise GradientError(f"{where} on {gradient.device}; expected device {self.device}")
        if not broadcasts_to(self.shape, tuple(gradient.shape)):
            raise GradientError(
                f"{where} with shape {list(gradient.shape)}; expected shape {list(self.shape)}, or one that it "
                "broadcasts to"
            )
