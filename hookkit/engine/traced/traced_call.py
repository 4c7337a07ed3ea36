"""A traced call: run the providers in the interpreter, check what they return, and record one composite symbol."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, unwrap, wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.trace import tracectx

from hookkit.engine.interpreter import prologue_guards
from hookkit.engine.interpreter.attempt import Attempt
from hookkit.engine.interpreter.outside_tensors import gets_gradients, outside, refuse_missing
from hookkit.engine.interpreter.side_effects import Generators, State
from hookkit.engine.joint.differentiation import RESIDUAL
from hookkit.engine.trace import gradflow
from hookkit.engine.trace.composite import Composite, Origin, bind, free
from hookkit.engine.trace.functionalize import functionalise
from hookkit.engine.trace.in_place_check import views_of_arguments
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.values.wrapping import (
    broadcasts_to,
    is_container,
    is_differentiable_dtype,
    leaves,
    map_leaves,
    proxies_in,
    tensors_in,
    wrap_result,
)
from hookkit.errors import GradientError, UntraceableError
from hookkit.residuals import Residuals
from hookkit.returned import check_takes, output_and_residuals

__all__ = ["bind_call", "record_call", "trace_call"]


def trace_call(invocation: Invocation, before: State) -> tuple[Composite, Any]:
    """Trace a call's forward and, where a gradient can be asked for, its backward.

    Args:
        invocation: the call.
        before: the Python state that the call's code can reach.

    Returns:
        The operations, and what the call returns.

    Raises:
        Raised: if a provider, or thunder while it interprets one, raises.
        UntraceableError: if what was recorded cannot be made one symbol.
        GradientError: if the backward provider's gradients do not fit.
    """
    rule = invocation.rule
    differentiate = rule.backward_provider is not None
    guarded = prologue_guards.mark()
    generators = Generators.now()
    inner_mode = invocation.grad_mode and not differentiate
    with Attempt(grad_mode=inner_mode):
        with Attempt(grad_mode=inner_mode) as forward:
            assert rule.forward is not None
            wrapped = forward.run(rule.forward, *invocation.provider_arguments(), **invocation.kwargs)
        if any(not invocation.is_made_by_program(modified) for modified, _ in forward.written()):
            raise UntraceableError("it sets attributes of an object from outside, which a trace does not repeat")
        if forward.enters_autocast and rule.opaque_callee:
            raise UntraceableError("it switches autocast, under which thunder casts fewer operations than PyTorch")
        output, wrapped_residuals = _split(invocation, wrapped)
        residuals = unwrap(wrapped_residuals) if wrapped_residuals is not None else Residuals({})
        if residuals._marks.dirty:
            raise UntraceableError("the forward changes an argument in place")
        if differentiate:
            result = _with_backward(invocation, output, residuals, wrapped_residuals, forward)
        else:
            result = _without_backward(invocation, output, forward)
        unguarded = prologue_guards.uncheckable(guarded)
        if unguarded:
            raise UntraceableError(f"it depends on values that cannot be guarded: {', '.join(unguarded)}")
        changed = before.changed()
        if changed:
            raise UntraceableError(f"it changes Python state ({', '.join(changed)}), which a trace does not repeat")
        if generators.drawn_from():
            raise UntraceableError(
                "it draws random numbers outside of PyTorch's operations, which a trace would repeat"
            )
    return result


def bind_call(invocation: Invocation, composite: Composite, returned: Any) -> Any:
    """Record a call's operations as one symbol.

    Returns:
        The wrapped result of the call.
    """
    record_call(invocation, composite, returned)
    return wrap_result(returned, invocation.owner, *invocation.args)


def record_call(invocation: Invocation, composite: Composite, returned: Any) -> None:
    """Record a call's operations as one symbol, which knows the call that it stands for."""
    jit = get_jit_ctx()
    composite.origin = Origin(invocation.rule, invocation.call, returned, jit._proxy_swapmap)
    bind(jit.computation_trace, jit.ad_hoc_executor, composite)


def _split(invocation: Invocation, wrapped: Any) -> tuple[Any, Any]:
    """The plain output, and the wrapped residuals or None."""
    output, residuals = output_and_residuals(invocation.rule, invocation.call, unwrap(wrapped))
    if residuals is None:
        return output, None
    wrapped.track_items()
    return output, wrapped.item_wrappers[1]


def _without_backward(invocation: Invocation, output: Any, forward: Attempt) -> tuple[Composite, Any]:
    """A composite that thunder differentiates by differentiating its operations."""
    trace = get_jit_ctx().computation_trace
    recorded, last_values = functionalise(trace, forward.bound_symbols)
    symbols = list(recorded)
    produced = {o.name for b in symbols for o in b.flat_proxy_outs}

    def own(value: Any) -> Any:
        if not isinstance(value, TensorProxy):
            return value
        value = last_values.get(variableify(value), value)
        return value if value.name in produced else prims.shallow_copy(value)

    with tracectx(trace):
        trace.push_scope(symbols)
        try:
            output = map_leaves(own, output)
        finally:
            trace.pop_scope()
    outputs = tuple({p.name: p for p in leaves(output) if isinstance(p, Proxy)}.values())
    return Composite.of_operations(invocation.name, invocation.subject, symbols, outputs), output


def _with_backward(
    invocation: Invocation, output: Any, residuals: Residuals, wrapped_residuals: Any, forward: Attempt
) -> tuple[Composite, Any]:
    """A composite with the gradient that the backward provider gives."""
    trace = get_jit_ctx().computation_trace
    inputs = invocation.differentiable_inputs() if invocation.grad_mode else []
    forward_symbols, last_values = functionalise(trace, forward.bound_symbols)
    forward_symbols = list(forward_symbols)
    if invocation.grad_mode and gets_gradients(invocation.rule, invocation.call):
        invocation.bound.outside = outside(invocation, free(forward_symbols))
        inputs += [p for p in invocation.bound.outside.values() if gradflow.requires_grad(trace, p)]
    outputs, returned, own = _own_outputs(invocation, output, residuals, bool(inputs), forward_symbols, last_values)
    composite = Composite(
        name=invocation.name,
        inputs=(),
        outputs=tuple(outputs),
        forward=forward_symbols,
        subject=invocation.subject,
        materializes=residuals._marks.materialize_grads,
        outside=invocation.bound.outside,
    )
    differentiable = [o for o in outputs if isinstance(o, TensorProxy) and o.requires_grad]
    backward_symbols: list[Any] = []
    gradients: dict[str, Proxy] = {}
    if inputs and differentiable:
        arguments, composite.output_gradients = _output_gradients(invocation, outputs, returned, residuals)
        residuals.__dict__["needs"] = invocation.bound.needs(inputs)
        backward_symbols, gradients = _run_backward(invocation, wrapped_residuals, arguments, inputs)
        swap = {**last_values, **own}
        backward_symbols = [b.from_bsym_swap_proxies(swap, skip_output=True) for b in backward_symbols]
        gradients = {n: swap.get(variableify(g), g) for n, g in gradients.items()}
        composite.backward = backward_symbols
        made = {o.name: o for b in forward_symbols for o in b.flat_proxy_outs}
        for proxy in free(backward_symbols):
            if proxy.name in made:
                made[proxy.name].tags.add(RESIDUAL)
    known = {g.name for g in composite.output_gradients if g is not None}
    unmade = free([*forward_symbols, *backward_symbols], known=known)
    # Also those that get no gradient: where none does, the outputs require grad all the same.
    tracked = inputs if composite.backward is not None else []
    composite.inputs = tuple({p.name: p for p in (*tracked, *unmade)}.values())
    composite.tracked_count = len(tracked)
    composite.input_gradients = tuple(gradients.get(p.name) for p in composite.inputs)
    composite.views = views_of_arguments(forward_symbols, outputs)
    if composite.backward is None:
        composite.output_gradients = tuple(None for _ in outputs)
        for constant in outputs:
            constant.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return composite, returned


def _own_outputs(
    invocation: Invocation,
    output: Any,
    residuals: Residuals,
    any_needed: bool,
    forward: list[Any],
    last_values: dict[Any, Proxy],
) -> tuple[list[Proxy], Any, dict[Any, Proxy]]:
    """Give every returned tensor a proxy of its own, made by the forward; say which of them require grad.

    The forward ran with grad mode off, which tags its results as detached; the call's outputs are not.

    Returns:
        The outputs, each once; the returned tree with them; from what the forward called them to what they are now.
    """
    trace = get_jit_ctx().computation_trace
    marked = {p.name for p in leaves(residuals._marks.non_differentiable) if isinstance(p, Proxy)}
    top = {id(o) for o in (output if type(output) is tuple else (output,))}
    tree = invocation.rule.track == "tree"
    produced = {o.name for b in forward for o in b.flat_proxy_outs}
    # PyTorch's x.to(x.dtype) returns x itself
    may_be_argument = views_of_arguments(forward, tensors_in(output))
    # PyTorch makes a tensor of its own of each place at which a Function returns an argument
    arguments = set() if tree else {a.name for a in invocation.call.args if isinstance(a, TensorProxy)}
    swap: dict[Any, Proxy] = {}
    outputs: list[Proxy] = []
    owned: dict[str, TensorProxy] = {}

    def own(value: Any, nested: bool) -> Any:
        if not isinstance(value, TensorProxy):
            return value
        tracked = (tree or id(value) in top) and value.name not in marked and is_differentiable_dtype(value)
        requires = bool(any_needed and tracked)
        outside = value.name not in produced
        if outside and not tree and (nested or id(value) not in top):
            return value  # a tensor from outside, handed on in a container that is not looked into
        if value.name in owned and value.name not in arguments:
            return owned[value.name]
        source = last_values.get(variableify(value), value)
        with tracectx(trace):
            mine = owned[value.name] = TensorProxy(like=value, requires_grad=requires)
            if outside or source is not value or value.name in may_be_argument:
                forward.append(ltorch.detach.bind(source, output=mine))
            else:
                swap[variableify(value)] = mine
        outputs.append(mine)
        return mine

    def own_item(item: Any) -> Any:
        return map_leaves(partial(own, nested=is_container(item)), item)

    returned = tuple(map(own_item, output)) if type(output) is tuple else own_item(output)
    if swap:
        forward[:] = [b.from_bsym_swap_proxies(swap) for b in forward]
    return outputs, returned, swap


def _output_gradients(
    invocation: Invocation, outputs: list[Proxy], returned: Any, residuals: Residuals
) -> tuple[list[Any], tuple[TensorProxy | None, ...]]:
    """The backward provider's arguments for the outputs, and for each output the proxy of its gradient."""
    trace = get_jit_ctx().computation_trace
    materialize = residuals._marks.materialize_grads
    if not materialize and sum(getattr(o, "requires_grad", False) for o in outputs) > 1:
        raise UntraceableError("materialize_grads is off: which gradients are None is known at run time only")
    by_name: dict[str, TensorProxy] = {}
    with tracectx(trace):
        for output in outputs:
            if isinstance(output, TensorProxy) and output.requires_grad:
                by_name[output.name] = TensorProxy(like=output, requires_grad=False, prefix="grad")

    def gradient(value: Any, is_last: bool) -> Any:
        if not isinstance(value, TensorProxy):
            return None
        if is_last and value.name in by_name:
            return by_name[value.name]
        return _Zeros(value) if materialize else None

    items = returned if type(returned) is tuple else (returned,)
    if invocation.rule.track == "positional":
        items = tuple(None if is_container(item) else item for item in items)
    # torch gives the gradient of a tensor that is returned twice to the last place; the others are not used
    last = {v.name: place for place, item in enumerate(items) for v in leaves(item) if isinstance(v, TensorProxy)}

    def at_place(place: int, value: Any) -> Any:
        return gradient(value, last.get(getattr(value, "name", None)) == place)

    arguments = [map_leaves(partial(at_place, place), item) for place, item in enumerate(items)]
    return arguments, tuple(by_name.get(o.name) for o in outputs)


@attrs.frozen
class _Zeros:
    """The gradient of an output that does not require grad: zeros in its metadata, made where the backward is."""

    like: TensorProxy

    def make(self) -> TensorProxy:
        return clang.full(self.like.shape, 0, device=self.like.device, dtype=self.like.dtype)


def _run_backward(
    invocation: Invocation, wrapped_residuals: Any, arguments: list[Any], inputs: Sequence[TensorProxy]
) -> tuple[list[Any], dict[str, Proxy]]:
    """The backward's operations, and the gradient of each input by the input's name."""
    trace = get_jit_ctx().computation_trace
    rule = invocation.rule
    check_takes(rule, invocation.call, len(arguments))
    origin = ProvenanceRecord(PseudoInst.NEW, inputs=[wrap_const(Residuals).provenance])
    if wrapped_residuals is None:
        wrapped_residuals = wrap(Residuals({}), provenance=origin)
    with Attempt(grad_mode=False, autocast=False) as backward:
        with tracectx(trace):
            made = map_leaves(lambda a: a.make() if isinstance(a, _Zeros) else a, arguments)
        wrapped_arguments = [wrap(a, provenance=origin) for a in made]
        leading = (invocation.wrapped_call(),) if rule.pass_call else ()
        kept = State.reachable_from(_held(unwrap(wrapped_residuals)))
        assert rule.backward_provider is not None
        result = unwrap(backward.run(rule.backward_provider, *leading, wrapped_residuals, *wrapped_arguments))
        if kept.overwritten() or any(value is not None for _, value in backward.written()):
            raise UntraceableError(
                "its backward changes what the forward kept for it: a second backward would see that"
            )
        wanted = {i.name for i in inputs}
        used = [n for n, p in invocation.bound.outside.items() if p.name in wanted]
        refuse_missing(rule, invocation.call, used, result)
        pairs = invocation.bound.pair_gradients(rule, result)
        with tracectx(trace):
            gradients = _accumulate(invocation, pairs, wanted)
            # What the backward returns and did not make, a saved tensor say, must not share memory with the gradient:
            # autograd takes what it is given for ``.grad``.
            new = {o.name for b in backward.bound_symbols for o in b.flat_proxy_outs}
            new.update(p.name for p in proxies_in(made))
            gradients = {n: g if g.name in new else ltorch.clone(g) for n, g in gradients.items()}
    if backward.enters_autocast and rule.opaque_callee:
        raise UntraceableError(
            "its backward switches autocast, under which thunder casts fewer operations than PyTorch"
        )
    symbols, last_values = functionalise(trace, backward.bound_symbols)
    return list(symbols), {n: last_values.get(variableify(g), g) for n, g in gradients.items()}


def _held(residuals: Residuals) -> list[Any]:
    """The dicts in which residuals, and objects such as ctx among them, hold values."""
    values = list(vars(residuals).values())
    return [vars(residuals), *(vars(v) for v in values if type(getattr(v, "__dict__", None)) is dict)]


def _accumulate(
    invocation: Invocation, pairs: list[tuple[str, TensorProxy, Any]], wanted: set[str]
) -> dict[str, Proxy]:
    """Fit each gradient to its input as autograd does, and add those of a tensor that was given more than once."""
    gradients: dict[str, Proxy] = {}
    for label, tensor, gradient in pairs:
        if gradient is None or tensor.name not in wanted:
            continue
        fitted = _fit(invocation, label, tensor, gradient)
        present = gradients.get(tensor.name)
        gradients[tensor.name] = fitted if present is None else ltorch.add(present, fitted)
    return gradients


def _fit(invocation: Invocation, label: str, tensor: TensorProxy, gradient: Any) -> Proxy:
    """A gradient in the shape and dtype of its input.

    torch: ``validate_outputs`` in torch/csrc/autograd/engine.cpp.
    """
    where = f"{invocation.rule.described('backward provider')} for {invocation.call}"
    if not isinstance(gradient, TensorProxy):
        raise GradientError(
            f"{where} returned {gradient!r} ({type(gradient).__name__}) as the gradient of {label}; "
            "expected a tensor or None"
        )
    if gradient.device != tensor.device:
        raise GradientError(
            f"{where} returned a gradient of {label} on {gradient.device}; expected device {tensor.device}"
        )
    expected, got = tuple(tensor.shape), tuple(gradient.shape)
    if got != expected:
        if not broadcasts_to(expected, got):
            raise GradientError(
                f"{where} returned a gradient of {label} with shape {list(got)}; expected shape {list(expected)}, "
                "or one that it broadcasts to"
            )
        lead = len(got) - len(expected)
        dims = [*range(lead), *(i + lead for i, n in enumerate(expected) if n == 1 and got[i + lead] != 1)]
        gradient = ltorch.reshape(ltorch.sum(gradient, dims), expected)
    if not (dtypes.is_inexact_dtype(gradient.dtype) or invocation.rule.ships):
        raise GradientError(
            f"{where} returned a gradient of {label} with dtype {dtypes.to_torch_dtype(gradient.dtype)}; expected "
            f"{dtypes.to_torch_dtype(tensor.dtype)}, as {label} has"
        )
    if gradient.dtype != tensor.dtype:
        if dtypes.is_complex_dtype(gradient.dtype) and not dtypes.is_complex_dtype(tensor.dtype):
            raise GradientError(
                f"{where} returned a complex gradient ({gradient.dtype}) of {label}, which is real ({tensor.dtype}); "
                "return its real part"
            )
        gradient = clang.maybe_convert_to_dtype(gradient, tensor.dtype)
    return gradient
