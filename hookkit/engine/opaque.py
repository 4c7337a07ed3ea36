"""An opaque call: one operator in the trace, run by PyTorch, with the backward that PyTorch recorded.

The operator returns the call's tensors and, where a gradient can be asked for, the state of its autograd graph, which
a second operator takes in the backward. Its metadata is found by running the call on tensors without data, or by a
meta function.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import attrs
import torch
from thunder.core import dtypes, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import Device, to_torch_device
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.trace import tracectx
from thunder.extend import ImplInfo
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from hookkit import compat, operators
from hookkit.engine import caching, gradflow, guards
from hookkit.engine.direct import DirectCall, NodeState
from hookkit.engine.eager import Autocast, EagerResult, OpaqueState, fill, provider_callee, run_eagerly, split_tensors
from hookkit.engine.effects import Generators, State, WritesUndone, following_natively
from hookkit.engine.nodes import set_materialize_grads
from hookkit.engine.outside import OUTSIDE, gets_gradients, parameters_of
from hookkit.engine.reach import Reach, none_defined, note_undefined
from hookkit.engine.reasons import in_words
from hookkit.engine.recomputation import is_recomputing, record_draws
from hookkit.engine.symbols import called, feed_undefined, make_symbol, symbol_name
from hookkit.engine.traced import Invocation
from hookkit.engine.tracing import Raised, add_note
from hookkit.engine.values import (
    PLAIN,
    Slot,
    TensorMetadata,
    is_differentiable_dtype,
    leaves,
    map_leaves,
    wrap_result,
)
from hookkit.errors import HookError, MetaError, MetaWarning, OpaqueFallbackWarning, UntraceableError, warn_at
from hookkit.patch import Patch
from hookkit.returned import output_and_residuals

__all__ = ["PATCHES", "OpaqueCall", "fall_back", "opaque_call", "record_constant"]


@attrs.define(eq=False)
class Expected:
    """What an opaque call returns.

    Attributes:
        structure: the output with a slot for each tensor.
        tensors: the metadata of each tensor.
        differentiable: for each tensor whether it requires grad, then the same for each argument that is changed.
        changed: the indices of arguments that are changed in place.
        dirty_outputs: from the place of an output to the index of the changed argument that it is.
        gradients: the indices of arguments that need a gradient; whether they get one is known at run time only.
        views: the places of outputs that share memory with an argument that is not changed.
        saved_bytes: how much PyTorch keeps for the backward; None if that is not known.
        without_data: what the call raised on tensors without data, if it was run on example values instead.
    """

    structure: Any
    tensors: list[TensorMetadata]
    differentiable: list[bool]
    changed: list[int]
    dirty_outputs: dict[int, int]
    gradients: list[int]
    views: list[int] = attrs.field(factory=list)
    direct: bool = False
    saved_bytes: int | None = None
    is_tuple: bool = False
    without_data: BaseException | None = None


@attrs.define(eq=False)
class OpaqueCall:
    """The operator of one opaque call.

    Attributes:
        description: the call, for messages.
        note: what is added to an exception that the call raises (PEP 678).
        callee: what PyTorch runs.
        arguments: positional and keyword arguments, with a slot for each proxy.
        needs: for each slot whether it requires grad.
        grad_mode: whether grad mode is on around the call.
        autocasts: the autocast regions around the call.
        written: the slots that it changes in place, by its schema.
        expected: what it returns.
        direct: the short way of the call, if it has one.
        inputs: the metadata of the slots that get a gradient.
        reach: to which of the program's outputs it leads, if not to all.
        output_sources: for each output that requires grad what its gradient is made from, see :mod:`.reach`.
        gradient_names: what the gradients that it gives are called there.
        handed_on: for each of them whether it may be None: nothing that thunder executes takes it.
        undefined: outputs of earlier calls to whose backward this one feeds zeros, see ``feed_undefined``.
        is_fed_undefined: whether another call returns None for the gradient of an output, so that its backward has to
            run without any gradient, as in eager.
        is_function: whether the callee is the ``apply`` of a Function, which looks for tensors in its arguments only.
        meta: the meta function, in words.
    """

    description: str
    note: str
    callee: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    needs: tuple[bool, ...]
    grad_mode: bool
    autocasts: tuple[Autocast, ...]
    written: frozenset[int] = frozenset()
    expected: Expected | None = None
    direct: DirectCall | None = None
    inputs: dict[int, TensorMetadata] = attrs.field(factory=dict)
    reach: Reach | None = None
    output_sources: Sequence[Reach] = ()
    gradient_names: Sequence[str] = ()
    handed_on: Sequence[bool] = ()
    undefined: list[TensorProxy] = attrs.field(factory=list)
    is_fed_undefined: bool = False
    is_function: bool = False
    meta: str = "its meta function"

    def tracked(self, args: Sequence[Any]) -> Sequence[Any]:
        """Those of the operator's arguments that are edges of the autograd graph."""
        if not self.is_function:
            return args
        return [args[a.index] for a in self.arguments[0] if isinstance(a, Slot)]

    def given_gradients(self, args: Sequence[Any]) -> list[Any]:
        """Those of the operator's arguments that get a gradient."""
        assert self.expected is not None
        return [args[i] for i in self.expected.gradients]

    def run(self, values: Sequence[Any], copied: Sequence[int] = ()) -> EagerResult:
        """Call the callee with values in the places of the slots."""
        return run_eagerly(
            self.callee,
            self.arguments,
            values,
            self.needs,
            grad_mode=self.grad_mode,
            autocasts=self.autocasts,
            copied=copied,
            with_root=self.is_fed_undefined,
            written=self.written,
            is_function=self.is_function,
        )

    @property
    def has_backward(self) -> bool:
        """Whether a gradient can be asked for."""
        assert self.expected is not None
        return any(self.expected.differentiable)

    @property
    def returns_state(self) -> bool:
        """Whether the operator returns its state: for the backward, or because it returns nothing else.

        thunder drops a symbol without outputs: ``remove_duplicate_number_proxies`` in thunder/core/transform_common.py.
        """
        assert self.expected is not None
        return self.has_backward or not (self.expected.tensors or self.expected.changed)

    def operator(self) -> Callable[..., Any]:
        """What the operator does at run time."""
        assert self.expected is not None
        if self.direct is not None:
            self.direct.outputs, is_tuple = self.expected.tensors, self.expected.is_tuple
            return self.direct.operator(is_tuple, self.note, self._refuse, lambda: self.is_fed_undefined)
        return self.forward

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """What the operator does at run time, for any callee."""
        assert self.expected is not None
        try:
            result = self.run(values, self.expected.changed)
        except Exception as error:
            add_note(error, self.note)
            raise
        tensors, structure = split_tensors(result.output)
        self._check(tensors, structure, result)
        self._refuse_hidden_leaves(result)
        outputs = [*tensors, *(result.changed[i] for i in self.expected.changed)]
        return (*outputs, result.state) if self.returns_state else tuple(outputs)

    def _refuse(self, output: Any) -> NoReturn:
        tensors, structure = split_tensors(output)
        self._check(tensors, structure, EagerResult(structure, [t.requires_grad for t in tensors], {}, {}, None))
        raise MetaError(
            f"{self.description} returned a tensor that does not require grad, although its metadata said so"
        )

    def _refuse_hidden_leaves(self, result: EagerResult) -> None:
        """An operator gives gradients to its arguments; those of other tensors that the callee uses would be lost."""
        if self.is_function or result.state is None:  # a Function's node knows its arguments only
            return
        hidden = result.state.hidden_leaves()
        if hidden:
            shown = ", ".join(f"{type(t).__name__} {TensorMetadata.of(t)}" for t in hidden[:3])
            raise HookError(
                f"{self.description} runs as one opaque operator, which gives gradients to its arguments, and it uses "
                f"tensors that require grad and are no arguments ({shown}{', ...' if len(hidden) > 3 else ''}): a "
                "parameter of a module or a global tensor, say. Let the call be traced, or give the rule to a function "
                "that takes them as arguments; where no gradient is wanted, call it under torch.no_grad()."
            )

    def backward_operator(self) -> Callable[..., tuple[Any, ...]]:
        """What the backward operator does at run time."""
        if self.direct is not None:
            self.direct.inputs = self.inputs
            return self.direct.backward_operator(self.backward, self._absent, self.note)
        return self.backward

    def backward(
        self, state: OpaqueState | None, *gradients: torch.Tensor | None, found: tuple[Any, ...] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """What the backward operator does at run time, for any callee.

        Args:
            state: what the forward operator returned.
            *gradients: for each output that requires grad its gradient.
            found: what the Function's backward returned, if it has run.
        """
        assert self.expected is not None
        if state is None:
            raise MetaError(f"{self.description} returned no tensor that requires grad, although its metadata said so")
        if none_defined(self.reach):
            return self._filled({})
        try:
            if isinstance(state, NodeState) and found is not None:
                return self._filled(state.validated(found))
            gradients = tuple(
                [None if none_defined(s) else g for s, g in zip(self.output_sources, gradients, strict=True)]
            )
            return self._filled(state.backward(gradients))
        except Exception as error:
            add_note(error, self.note)
            raise

    def _filled(self, found: dict[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients in order."""
        assert self.expected is not None
        gradients = [found.get(i) for i in self.expected.gradients]
        return tuple([self._absent(n) if g is None else g for n, g in enumerate(gradients)])

    def _absent(self, number: int) -> torch.Tensor | None:
        """What stands for a gradient that the callee does not give: zeros, where the trace computes with it."""
        assert self.expected is not None
        note_undefined(self.gradient_names[number])
        may_be_none = self.handed_on and self.handed_on[number]
        return None if may_be_none else self.inputs[self.expected.gradients[number]].zeros()

    def _check(self, tensors: list[torch.Tensor], structure: Any, result: EagerResult) -> None:
        """Compare what the call returned with its metadata.

        Raises:
            MetaError: if they differ.
        """
        assert self.expected is not None
        got = [TensorMetadata.of(t) for t in tensors]
        if got != self.expected.tensors or not _same_structure(structure, self.expected.structure):
            expected = fill(self.expected.structure, [str(t) for t in self.expected.tensors])
            raise MetaError(
                f"{self.description} returned {fill(structure, [str(t) for t in got])!r}; its metadata, with which the "
                f"program was compiled, is {expected!r}. If the result depends on the values of tensors "
                "(data-dependent), leave the call outside the compiled program; otherwise correct "
                f"{self.meta}."
            )
        if sorted(result.changed) != self.expected.changed:
            raise MetaError(
                f"{self.description} changed other arguments in place than when its metadata was found: "
                f"{sorted(result.changed)}, expected {self.expected.changed}"
            )
        if self.has_backward and result.state is not None and result.differentiable != self.expected.differentiable:
            raise MetaError(
                f"{self.description} returned tensors of which {result.differentiable} require grad; "
                f"its metadata says {self.expected.differentiable}"
            )


def _same_structure(a: Any, b: Any) -> bool:
    """Whether two outputs are the same but for their tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same_structure(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same_structure, a, b))
    if isinstance(a, (*PLAIN, Slot)):
        return bool(a == b or (a != a and b != b))
    if attrs.has(type(a)) or hasattr(type(a), "__dataclass_fields__"):
        return _same_structure(dict(vars(a)), dict(vars(b))) if hasattr(a, "__dict__") else bool(a == b)
    return a is b


def opaque_call(invocation: Invocation, pending: BaseException | None) -> Any:
    """Record a call as one operator.

    Args:
        invocation: the call.
        pending: why it could not be traced, if that was tried.

    Returns:
        The wrapped result of the call.

    Raises:
        Raised: with the user's own exception, if the call raises it in eager PyTorch too.
        MetaError: if its metadata cannot be found.
    """
    jit = get_jit_ctx()
    trace = jit.computation_trace
    operator, slots = _operator(invocation)
    operator.expected = expected = _find_metadata(invocation, operator, slots, pending)
    if expected.without_data is not None:
        warn_at(
            invocation.call.source or invocation.rule.declared_at,
            f"the metadata of {invocation.call} was found by running it on example values, because without data it "
            f"raised {type(expected.without_data).__name__}; declare a meta function to avoid that: rule = "
            "hookkit.rule(target, mode='opaque'), then @rule.meta",
            MetaWarning,
        )
        expected.without_data = None  # its traceback holds what the run made
    if not expected.direct:
        operator.direct = None
    name = symbol_name(trace, invocation.name)

    def meta(*_: Any) -> tuple[Any, ...]:
        tensors = [*expected.tensors, *(TensorMetadata.of_proxy(slots[i]) for i in expected.changed)]
        outputs: list[Any] = [t.proxy(d) for t, d in zip(tensors, expected.differentiable, strict=True)]
        if operator.returns_state:
            outputs.append(AnyProxy(None, prefix="state"))
        if not operator.has_backward:
            for output in outputs:
                output.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return tuple(outputs)

    meta.operator = operator  # type: ignore[attr-defined]
    # What it changes in place is not as it was when it would run again.
    again = is_recomputing() and not expected.changed
    draws = [record_draws()] if again else []
    run = partial(_with_same_draws, operator.operator()) if again else operator.operator()
    symbol = make_symbol(jit.ad_hoc_executor, name, meta, run, kind=gradflow.CALL, is_prim=True, keep=True)
    transform = symbol
    if operator.has_backward:
        transform = _gradient_transform(jit.ad_hoc_executor, symbol, name, operator, slots)
    jit.ad_hoc_executor._implmap[symbol.id] = ImplInfo(symbol=symbol, grad_transform=transform)
    with tracectx(trace):
        results = symbol(*slots, *draws)
    meta.views = frozenset(results[i].name for i in expected.views)  # type: ignore[attr-defined]  # mutation.check asks
    returned = fill(expected.structure, _write_back(invocation, slots, expected, list(results)))
    return wrap_result(returned, invocation.owner, *invocation.args)


def _with_same_draws(run: Callable[..., Any], *arguments: Any) -> Any:
    *values, draws = arguments
    with draws.same(values):
        return run(*values)


def record_constant(tensor: torch.Tensor) -> TensorProxy:
    """Record a tensor that no input of the program leads to (the default of a parameter, say) as an operator.

    It stands before whatever is being recorded, so that everything can use it.
    """
    jit = get_jit_ctx()
    trace = jit.computation_trace
    metadata = TensorMetadata.of(tensor)
    symbol = make_symbol(
        jit.ad_hoc_executor,
        symbol_name(trace, "constant"),
        lambda: metadata.proxy(False),
        lambda: tensor,
        kind=gradflow.CALL,
        is_prim=True,
    )
    jit.ad_hoc_executor._implmap[symbol.id] = ImplInfo(symbol=symbol, grad_transform=symbol)
    with tracectx(trace):
        trace.push_scope(trace.scopes[0])
        try:
            return symbol()
        finally:
            trace.pop_scope()


def fall_back(invocation: Invocation, error: BaseException) -> tuple[Any, str]:
    """Make a call opaque that could not be traced, or raise what it raises in eager PyTorch too.

    Args:
        invocation: the call.
        error: why it could not be traced.

    Returns:
        The wrapped result of the call, and the reason in words.

    Raises:
        Raised: with the user's own exception.
        UntraceableError: if the mode does not allow the call to be opaque.
    """
    call = invocation.call
    reason = in_words(error)
    if invocation.mode.mode == "trace":
        operator, slots = _operator(invocation)
        _find_metadata(invocation, operator, slots, error)
        raise UntraceableError(
            f"{call} cannot be traced: {reason}\n"
            f'Its mode is "trace" by {invocation.mode.said_by}; "auto" lets it run as one opaque operator.'
        ) from error
    result = opaque_call(invocation, error)
    warned_of = _warned_of.setdefault(invocation.subject, set())
    if reason not in warned_of:
        warned_of.add(reason)
        place = call.source or invocation.rule.declared_at
        warn_at(place, f"{call} cannot be traced and runs as one opaque operator: {reason}", OpaqueFallbackWarning)
    return result, reason


_warned_of: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _operator(invocation: Invocation) -> tuple[OpaqueCall, list[Proxy]]:
    """The operator of a call, its metadata still to be found, and the proxies that are its arguments."""
    rule, call = invocation.rule, invocation.call
    slots: list[Proxy] = []
    places: dict[str, Slot] = {}

    def place(value: Any) -> Any:
        if isinstance(value, dtypes.dtype):
            return dtypes.to_torch_dtype(value)
        if isinstance(value, Device):
            return to_torch_device(value)
        if not isinstance(value, Proxy):
            _refuse_hidden_proxies(invocation, value)
            return value
        if value.name not in places:
            places[value.name] = Slot(len(slots))
            slots.append(value)
        return places[value.name]

    arguments = map_leaves(place, (call.args, call.kwargs))
    if invocation.grad_mode and gets_gradients(rule, call) and (besides := parameters_of(invocation)):
        arguments = arguments[0], {**arguments[1], OUTSIDE: {name: place(proxy) for name, proxy in besides.items()}}
    trace = get_jit_ctx().computation_trace
    callee = call.callable if rule.opaque_callee else provider_callee(rule, call)
    autocasts = tuple(
        Autocast(device, _torch_dtype(dtype), bool(enabled))
        for device, dtype, enabled in get_compile_data().autocast_stack.stack
    )
    needs = tuple(gradflow.requires_grad(trace, p) for p in slots)
    function = call.function if rule.opaque_callee else None
    operator = OpaqueCall(
        description=str(call),
        note=invocation.note,
        callee=callee,
        arguments=arguments,
        needs=needs,
        grad_mode=invocation.grad_mode,
        autocasts=autocasts,
        written=frozenset(s.index for s in leaves(operators.written(callee, *arguments)) if isinstance(s, Slot)),
        direct=DirectCall.of(function, arguments, needs),
        is_function=function is not None,
    )
    return operator, slots


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else dtypes.to_torch_dtype(dtype)


def _refuse_hidden_proxies(invocation: Invocation, value: Any) -> None:
    """An operator gets real tensors for the proxies that it is given; it cannot for those that an object hides."""
    for part in (getattr(value, "__dict__", None), getattr(value, "__self__", None)):
        held = part if isinstance(part, dict) else {"__self__": part}
        for name, item in held.items():
            if isinstance(item, Proxy):
                raise MetaError(
                    f"{invocation.call} cannot run as one opaque operator: its argument {type(value).__name__} holds a "
                    f"tensor in the attribute {name!r}; pass the tensor as an argument of its own"
                )
    for cell in getattr(value, "__closure__", None) or ():
        if any(isinstance(leaf, Proxy) for leaf in leaves(_contents(cell))):
            raise MetaError(
                f"{invocation.call} cannot run as one opaque operator: {getattr(value, '__qualname__', value)} closes "
                "over a tensor of the program; pass the tensor as an argument"
            )


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _gradient_transform(
    executor: Any, symbol: Any, name: str, operator: OpaqueCall, slots: list[Any]
) -> Callable[..., Any]:
    expected = operator.expected
    assert expected is not None
    operator.inputs = {i: TensorMetadata.of_proxy(slots[i]) for i in expected.gradients}

    run_backward = operator.backward_operator()

    def transform(*args: Any) -> Any:
        results = symbol(*args)
        *outputs, state = results
        gradients = [prims.get_grad(o) for o, d in zip(outputs, expected.differentiable, strict=True) if d]

        def meta(*_: Any) -> tuple[TensorProxy, ...]:
            return tuple(TensorProxy(like=args[i], requires_grad=False) for i in expected.gradients)

        meta.operator = operator  # type: ignore[attr-defined]
        backward = make_symbol(
            executor, f"{name}_backward", meta, run_backward, kind=gradflow.OPAQUE_BACKWARD, is_prim=True
        )
        backward_results = backward(state, *gradients)
        for index, gradient in zip(expected.gradients, backward_results, strict=True):
            prims.put_grad(args[index], gradient)
        feed_undefined(operator.undefined)
        return results

    return transform


def _write_back(invocation: Invocation, slots: list[Proxy], expected: Expected, results: list[Any]) -> list[Any]:
    """Write what the call changed in place into its arguments, as an operation that thunder knows."""
    import thunder.torch as ltorch

    count = len(expected.tensors)
    returned = results[:count]
    for place, index in expected.dirty_outputs.items():
        if tuple(returned[place].shape) != tuple(slots[index].shape):
            raise MetaError(
                f"{invocation.call} changes the shape of its argument in place, which a compiled program cannot; use "
                "the operation that returns a new tensor"
            )
    with tracectx(get_jit_ctx().computation_trace):
        for index, new in zip(expected.changed, results[count : count + len(expected.changed)], strict=True):
            same = [i for i in range(count) if expected.dirty_outputs.get(i) == index]
            source = returned[same[0]] if same else new
            written = ltorch.copy_(slots[index], source)
            for i in same:
                returned[i] = written
    return returned


def _find_metadata(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], pending: BaseException | None
) -> Expected:
    """Run the call on tensors without data; where that fails, on example values."""
    provider = invocation.rule.meta_provider
    if provider is not None and invocation.rule.fits(invocation.call):
        return _from_meta_function(invocation, operator, slots, provider)
    # Of an operator that is a function of Python no fake function can be asked for.
    lacking = invocation.call.unsupported is not None and not invocation.operator_parts
    with _no_side_effects(invocation) as writes_undone:
        try:
            watch = _Watch(refuse_memory=not lacking)
            with FakeTensorMode(allow_non_fake_inputs=True), watch, writes_undone:
                return _probe(operator, [_example(p, None) for p in slots])
        except Exception as error:
            without_data = error
        if _is_same(without_data, pending):
            raise Raised(without_data, interpreted=False)
        if lacking:
            return _of_operation(invocation, operator, slots, without_data)
        try:
            with writes_undone:
                first, second = _on_examples(invocation, operator, slots)
        except Exception as error:
            if _is_same(error, pending) or _is_same(error, without_data):
                raise Raised(error, interpreted=False) from None
            raise MetaError(
                f"the metadata of {invocation.call} is not known: on tensors without data it raised "
                f"{type(without_data).__name__}: {without_data}; on example values {type(error).__name__}: {error}. "
                "Declare a meta function for it: rule = hookkit.rule(target, mode='opaque'), then @rule.meta."
            ) from error
    if first.tensors != second.tensors or not _same_structure(first.structure, second.structure):
        raise MetaError(
            f"{invocation.call}: the shape of its result is data-dependent: {first.tensors} for one set of values, "
            f"{second.tensors} for another; thunder needs it before the program runs. Declare a meta function with a "
            "bound, or leave the call outside the compiled program."
        )
    first.without_data = without_data
    return first


def _of_operation(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], without_data: Exception
) -> Expected:
    """The metadata of an operation of torch that looks at values, if the shapes of its results do not depend on them.

    Raises:
        Raised: if the operation refuses its arguments, in its own words.
        MetaError: if what it returns depends on the values of its arguments.
    """
    reason = f"{type(without_data).__name__}: {without_data}"
    how_to_tell = _how_to_tell(invocation.call.callable)
    if not isinstance(without_data, DynamicOutputShapeException) and not how_to_tell:
        try:
            first, second = _on_examples(invocation, operator, slots)
        except Exception as error:
            if type(error) is type(without_data) and not isinstance(error, NotImplementedError):
                raise Raised(error, interpreted=False) from None
        else:
            tensors_only = all(isinstance(leaf, Slot) for leaf in leaves(first.structure))
            if tensors_only and first.tensors == second.tensors and _same_structure(first.structure, second.structure):
                return first
    raise MetaError(
        f"{invocation.call} cannot be part of a compiled program: {invocation.call.unsupported}; and what it returns "
        f"depends on the values of tensors, so that it is not known before the program runs ({reason}). Call it "
        "outside the compiled program, or use operations whose shapes are known (torch.where(mask, x, 0) for x[mask])"
        f"{how_to_tell}"
    ) from without_data


def _how_to_tell(callee: Any) -> str:
    overload = operators.overload_of(callee)
    if overload is None or not operators.is_custom(overload):
        return ""
    return (
        f". If {overload.name()} has no fake function, which tells the shapes and dtypes of its results, add one: "
        f'@torch.library.register_fake("{overload.name()}")'
    )


def _on_examples(invocation: Invocation, operator: OpaqueCall, slots: list[Proxy]) -> tuple[Expected, Expected]:
    """Run a call on two sets of values.

    Where those are outside its domain, on the program's own as far as they are known, then with positive definite
    matrices for the others.
    """
    wrapped = (*invocation.args, *invocation.kwargs.values())
    own = {w.value.name: w.original_value for w in wrapped if isinstance(w.value, TensorProxy)}
    own = {name: value.detach() for name, value in own.items() if isinstance(value, torch.Tensor)}

    def probe(seed: int, known: dict[str, torch.Tensor], *, definite: bool = False) -> Expected:
        def value(proxy: Proxy) -> Any:
            if proxy.name in known:
                return known[proxy.name].clone()
            integer = seed if invocation.call.unsupported is not None else 0
            return _example(proxy, seed, definite=definite, integer=integer)

        with _Watch():
            return _probe(operator, [value(p) for p in slots])

    first_error = None
    for known, definite in (({}, False), (own, False), (own, True)):
        try:
            return probe(0, known, definite=definite), probe(1, known, definite=definite)
        except Exception as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _is_same(error: BaseException, other: BaseException | None) -> bool:
    """Whether two runs of a program failed in one way: the failure is then the program's own."""
    return other is not None and type(error) is type(other) and str(error) == str(other)


def _probe(operator: OpaqueCall, values: list[Any]) -> Expected:
    """Run a call, and see what comes out.

    Its backward is not tried: what it returns for these values says nothing about others.
    """
    result = operator.run(values)
    tensors, structure = split_tensors(result.output)
    views = [i for i in _sharing(tensors, values) if i not in result.dirty_outputs]
    if any(i in views for i in _sharing(tensors, [values[i] for i in result.changed])):
        raise HookError(
            f"{operator.description} changes an argument in place and returns it, or a view of it, without saying so, "
            "which a compiled program cannot follow. Call ctx.mark_dirty with the argument in forward (in a rule "
            "hookkit.mark with dirty=...) and return it itself, or change and return a clone."
        )
    for leaf in leaves(structure):
        if not isinstance(leaf, (*PLAIN, Slot)) and not callable(leaf) and not hasattr(leaf, "__module__"):
            raise MetaError(f"{operator.description} returned {type(leaf).__name__}, which is not known before it runs")
    saved_bytes = result.state.saved_bytes() if result.state is not None else 0
    return Expected(
        structure=structure,
        tensors=[TensorMetadata.of(t) for t in tensors],
        differentiable=list(result.differentiable),
        changed=sorted(result.changed),
        dirty_outputs=result.dirty_outputs,
        gradients=[i for i, n in enumerate(operator.needs) if n] if result.state is not None else [],
        views=views,
        saved_bytes=saved_bytes,
        direct=_can_go_directly(operator, result, structure, values),
        is_tuple=isinstance(structure, tuple),
    )


def _can_go_directly(operator: OpaqueCall, result: EagerResult, structure: Any, values: list[Any]) -> bool:
    """Whether a call can go the short way: all its outputs are tensors that one node owns, and it changes nothing."""
    flat = isinstance(structure, Slot) or (type(structure) is tuple and all(isinstance(s, Slot) for s in structure))
    plain = operator.grad_mode and not operator.autocasts and not result.changed
    if operator.direct is None or result.state is None or not flat or not plain or not all(result.differentiable):
        return False
    node = result.state.edges[0].node
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    # a tensor that is returned twice has the place of the last
    places = [(e.node, e.output_nr) for e in result.state.edges]
    return places == [(node, i) for i in range(len(places))] and operator.direct.keeps_its_inputs(node, values)


def _sharing(tensors: list[torch.Tensor], values: list[Any]) -> list[int]:
    """The places of outputs that share memory with a value."""
    given = [v for v in values if isinstance(v, torch.Tensor)]
    return [i for i, t in enumerate(tensors) if any(torch._C._is_alias_of(t, v) for v in given)]  # type: ignore[attr-defined]


def _from_meta_function(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], provider: Callable[..., Any]
) -> Expected:
    operator.meta = invocation.rule.described("meta function")
    with FakeTensorMode(allow_non_fake_inputs=True), compat.addresses_refused():
        args, kwargs = fill(operator.arguments, [_example(p, None) for p in slots])
        kwargs.pop(OUTSIDE, None)
        leading = (invocation.call.seen,) if invocation.rule.pass_call else ()
        try:
            output = provider(*leading, *args, **kwargs)
        except Exception as error:
            raise MetaError(
                f"{invocation.rule.described('meta function')} raised {type(error).__name__}: {error} for "
                f"{invocation.call}; it must return the outputs' metadata for these arguments"
            ) from error
        marked: set[int] = set()
        output, residuals = output_and_residuals(invocation.rule, output, "meta function")
        if residuals is not None:
            marked = {id(t) for t in residuals._marks.non_differentiable}
        tensors, structure = split_tensors(output)
    needed = operator.grad_mode and any(operator.needs)
    return Expected(
        structure=structure,
        tensors=[TensorMetadata.of(t) for t in tensors],
        differentiable=[needed and is_differentiable_dtype(t) and id(t) not in marked for t in tensors],
        changed=[],
        dirty_outputs={},
        gradients=[i for i, n in enumerate(operator.needs) if n],
    )


def _example(proxy: Proxy, seed: int | None, *, definite: bool = False, integer: int = 0) -> Any:
    """A value with a proxy's metadata: without data, or with values inside the usual domains.

    With ``definite`` square matrices are symmetric and positive definite.
    """
    if isinstance(proxy, NumberProxy):
        return proxy.value
    if isinstance(proxy, AnyProxy):
        return proxy._o
    if not isinstance(proxy, TensorProxy):
        raise MetaError(f"a value of the kind {type(proxy).__name__} cannot be given to an opaque call")
    shape = tuple(int(n) for n in proxy.shape)
    dtype, device = dtypes.to_torch_dtype(proxy.dtype), to_torch_device(proxy.device)
    if seed is None:
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.5 + 0.25
        if definite and len(shape) > 1 and shape[-1] == shape[-2]:
            values = values + values.mT + 2 * shape[-1] * torch.eye(shape[-1])
        return values.to(dtype=dtype, device=device)
    if dtype is torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    return torch.full(shape, integer, dtype=dtype, device=device)


_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


class _Watch(TorchFunctionMode):
    """While a call is tried out: no address of a tensor that has no data, and no gradients left on parameters.

    C code would read through such an address. A backward that calls ``torch.autograd.backward`` itself accumulates into
    the parameters of the modules that it was given.
    """

    _ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__})

    def __init__(self, refuse_memory: bool = False) -> None:
        super().__init__()
        self._refused = self._ADDRESSES if refuse_memory else frozenset()
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

    def __enter__(self) -> _Watch:
        _fake_tensor_log.disabled = True  # what fails here is said once, by whoever asked
        self._addresses.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._addresses.__exit__(None, None, None)
        _fake_tensor_log.disabled = False
        for parameter, gradient in self._gradients.values():
            parameter.grad = gradient


@contextlib.contextmanager
def _no_side_effects(invocation: Invocation) -> Iterator[WritesUndone]:
    """Leave Python state, tensors and random generators as they are; what raises leaves its mark, as in eager."""
    reachable = State.reachable_from([invocation.call.function or invocation.call.callable, *invocation.call.args])
    generators, writes = Generators.now(), WritesUndone()
    try:
        with torch.random.fork_rng(), following_natively(reachable):
            yield writes
        if invocation.guarded is not None:
            guards.drop_changed(invocation.guarded, caching.traced_program())
        reachable.restore()
    finally:
        writes.undo()
        generators.restore()


def _runs_functions(trace: Any) -> bool:
    return any(getattr(called(b), "is_function", False) for b in trace.bound_symbols)


PATCHES = [
    Patch(
        "torch.autograd.function:FunctionCtx.set_materialize_grads",
        lambda _: set_materialize_grads,
        "a Function that runs opaque may get zeros for a gradient that is undefined",
        takes=("self, value",),
        concerns=_runs_functions,
    )
]
