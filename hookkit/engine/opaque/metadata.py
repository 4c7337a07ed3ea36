"""What an opaque call returns, found before the program runs.

By a meta function; else by a run on tensors without data, else by runs on example values. Nothing that such a run does
to Python state, tensors or random generators stays.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from hookkit import compat, operators
from hookkit.engine.interpreter import cache_guards, prologue_guards
from hookkit.engine.interpreter.attempt import Raised
from hookkit.engine.interpreter.outside_tensors import OUTSIDE
from hookkit.engine.interpreter.side_effects import Generators, State, WritesUndone, following_natively, not_followed
from hookkit.engine.opaque.held import Held
from hookkit.engine.opaque.operator import Expected, OpaqueCall, same_structure
from hookkit.engine.opaque.tried_out import NeedsData, TriedOut
from hookkit.engine.opaque.unseen_writes import Watched, Written, written_in_backward
from hookkit.engine.pytorch.graph_run import EagerResult, autocast_regions
from hookkit.engine.pytorch.provider_function import split_tensors
from hookkit.engine.traced import replay
from hookkit.engine.traced.invocation import Invocation
from hookkit.engine.values.captured import fill, trying
from hookkit.engine.values.wrapping import PLAIN, Slot, TensorMetadata, is_differentiable_dtype, leaves
from hookkit.errors import HookError, MetaError
from hookkit.returned import output_and_residuals

__all__ = ["example", "find_metadata", "probe"]


@attrs.frozen
class _Known:
    """What was found for a call, with the Python state that its code can reach, and what its key names by identity."""

    expected: Expected
    state: State
    constants: list[Any]


_known: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()


def find_metadata(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], pending: BaseException | None
) -> Expected:
    """What a call returns; for one like an earlier one of the same program what was found for that."""
    provider = invocation.rule.meta_provider
    if provider is not None and invocation.rule.fits(invocation.call):
        expected = _from_meta_function(invocation, operator, slots, provider)
        # of a custom operator the schema says what it writes; what ships stands for operations of PyTorch
        if not (invocation.rule.ships or operators.is_custom(operator.callee)):
            expected.may_overwrite(slots)
        return expected
    known = _known.setdefault(get_jit_ctx().computation_trace, {})
    given = tuple(TensorMetadata.of_proxy(s) if isinstance(s, TensorProxy) else s.name for s in slots)
    key = (replay.key_of(invocation), invocation.itself, given, operator.needs)
    if key in known and not known[key].state.changed():
        return known[key].expected
    reachable = State.reachable_from([invocation.call.function or invocation.call.callable, *invocation.call.args])
    captured = operator.callee.kept() if isinstance(operator.callee, Held) else contextlib.nullcontext()
    with captured:
        expected = _by_trying(invocation, operator, slots, pending, reachable)
    known[key] = _Known(expected, reachable, replay.constants_of(invocation))
    return expected


def _by_trying(
    invocation: Invocation,
    operator: OpaqueCall,
    slots: list[Proxy],
    pending: BaseException | None,
    reachable: State,
) -> Expected:
    """Run a call on tensors without data; where that fails, on example values."""
    without_data: Exception
    # Of an operator that is a function of Python no fake function can be asked for.
    lacking = invocation.call.unsupported is not None and not invocation.operator_parts
    with _no_side_effects(invocation, reachable) as writes_undone:
        try:
            watch = TriedOut(without_data=not lacking)
            with FakeTensorMode(allow_non_fake_inputs=True), watch, writes_undone:
                expected = probe(operator, [example(p, None) for p in slots], writes_undone)
                if any(_is_unknown(p) for p in slots):
                    other = probe(operator, [example(p, None, number=2) for p in slots], writes_undone)
                    if other.tensors != expected.tensors:
                        raise NotImplementedError(f"{expected.tensors} for one number, {other.tensors} for another")
            if reachable.compiles:  # uncompiled, as here, torch.cond does not return the same inside of a transform
                raise NotImplementedError("it calls an operator that compiles what it is given")
            _look_again(invocation, operator, slots, expected, writes_undone)
            return expected
        except NeedsData as needs:
            without_data = NotImplementedError(str(needs))
        except Exception as error:
            without_data = error
        if _is_same(without_data, pending):
            raise Raised(without_data)
        if lacking:
            return _of_operation(invocation, operator, slots, without_data, writes_undone)
        try:
            if reachable.compiles or _compiles(without_data):
                with not_followed(), torch.compiler.set_stance("default"):
                    first, second = _on_examples(invocation, operator, slots, writes_undone, plainly=True)
            else:
                with writes_undone:
                    first, second = _on_examples(invocation, operator, slots, writes_undone)
                    _add_rare_writes(operator, slots, first, writes_undone)
        except Exception as error:
            if _is_same(error, pending) or _is_same(error, without_data):
                raise Raised(error) from None
            raise MetaError(
                f"the metadata of {invocation.call} is not known: on tensors without data it raised "
                f"{type(without_data).__name__}: {without_data}; on example values {type(error).__name__}: {error}. "
                "Declare a meta function for it: rule = hookkit.rule(target, mode='opaque'), then @rule.meta."
            ) from error
    if first.tensors != second.tensors or not same_structure(first.structure, second.structure):
        raise MetaError(
            f"{invocation.call}: the shape of its result is data-dependent: {first.tensors} for one set of values, "
            f"{second.tensors} for another; thunder needs it before the program runs. Declare a meta function with a "
            "bound, or leave the call outside the compiled program."
        )
    first.without_data = without_data
    first.add_writes(second)
    return first


def _look_again(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], expected: Expected, writes_undone: WritesUndone
) -> None:
    """Look on example values for what is overwritten, if the backward does not run on tensors without data.

    If it does not run there either, everything that the call and its backward are given may be overwritten.
    """
    if expected.is_seen:
        return
    found: tuple[Expected, ...] = ()
    with writes_undone, contextlib.suppress(Exception):  # what is wrong with the call is said when it runs, as in eager
        found = _on_examples(invocation, operator, slots, writes_undone)
    for seen in found:
        expected.add_writes(seen)
    if found and all(seen.is_seen for seen in found):
        with writes_undone:
            _add_rare_writes(operator, slots, expected, writes_undone)
    else:
        expected.may_overwrite(slots)


def _add_rare_writes(operator: OpaqueCall, slots: list[Proxy], expected: Expected, writes_undone: WritesUndone) -> None:
    """Look for what is overwritten on other values, of both signs and large: what clips or rectifies changes those."""
    with TriedOut(), contextlib.suppress(Exception):  # they may be outside of the call's domain
        values = [example(p, 2) for p in slots]
        floats = (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
        for value in floats:
            value.sub_(0.5).mul_(400)
        expected.add_writes(probe(operator, values, writes_undone, scale=-300))


def _of_operation(
    invocation: Invocation,
    operator: OpaqueCall,
    slots: list[Proxy],
    without_data: Exception,
    writes_undone: WritesUndone,
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
            first, second = _on_examples(invocation, operator, slots, writes_undone)
        except Exception as error:
            is_own = type(error) is type(without_data) and not isinstance(error, NotImplementedError)
            if is_own and not any(_is_unknown(p) for p in slots):
                raise Raised(error) from None
        else:
            tensors_only = all(isinstance(leaf, Slot) for leaf in leaves(first.structure))
            if tensors_only and first.tensors == second.tensors and same_structure(first.structure, second.structure):
                return first
    raise MetaError(
        f"{invocation.call} cannot be part of a compiled program: {invocation.call.unsupported}; and what it returns "
        f"depends on the values of tensors, so that it is not known before the program runs ({reason}). Call it "
        "outside the compiled program, or use operations whose shapes are known (torch.where(mask, x, 0) for x[mask]), "
        "or make the function around it, if what that returns has a known shape, one operator: "
        "hookkit.opaque(function)"
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


def _compiles(error: BaseException) -> bool:
    """Whether what failed calls ``torch.compile``, which works without modes only, or an operator that does."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any("_dynamo" in file or "_higher_order_ops" in file for file in files)


def _on_examples(
    invocation: Invocation,
    operator: OpaqueCall,
    slots: list[Proxy],
    writes_undone: WritesUndone,
    *,
    plainly: bool = False,
) -> tuple[Expected, Expected]:
    """Run a call on two sets of values.

    Where those are outside its domain, on the program's own as far as they are known, then with positive definite
    matrices for the others.

    Args:
        invocation: the call.
        operator: its operator.
        slots: the arguments of that.
        writes_undone: what sees the writes of PyTorch's operations.
        plainly: whether to run it without looking at what it does.
    """
    wrapped = (*invocation.args, *invocation.kwargs.values())
    own = {w.value.name: w.original_value for w in wrapped if isinstance(w.value, TensorProxy)}
    own = {name: value.detach() for name, value in own.items() if isinstance(value, torch.Tensor)}

    def attempt(seed: int, known: dict[str, torch.Tensor], *, definite: bool = False) -> Expected:
        def value(proxy: Proxy) -> Any:
            if proxy.name in known:
                return known[proxy.name].clone()
            integer = seed if invocation.call.unsupported is not None else 0
            return example(proxy, seed, definite=definite, integer=integer, number=1 + seed)

        with contextlib.nullcontext() if plainly else TriedOut():
            return probe(operator, [value(p) for p in slots], writes_undone)

    first_error = None
    for known, definite in (({}, False), (own, False), (own, True)):
        try:
            return attempt(0, known, definite=definite), attempt(1, known, definite=definite)
        except Exception as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _is_same(error: BaseException, other: BaseException | None) -> bool:
    """Whether two runs of a program failed in one way: the failure is then the program's own.

    Where a recursion without end comes to its end depends on who calls.
    """
    same_words = str(error) == str(other) or isinstance(error, RecursionError)
    return other is not None and type(error) is type(other) and same_words


def probe(operator: OpaqueCall, values: list[Any], writes_undone: WritesUndone, *, scale: float = 0.75) -> Expected:
    """Run a call, and see what comes out, and what it and its backward overwrite.

    What its backward returns for these values says nothing about others.

    Args:
        operator: the operator of the call.
        values: its arguments.
        writes_undone: what sees the writes of PyTorch's operations.
        scale: the values of the gradients that the backward is given.
    """
    watched = Watched(values, writes_undone)
    result = operator.run(values)
    tensors, structure = split_tensors(result.output)
    views = sorted({*_sharing(tensors, values), *_sharing_memory(tensors)} - result.dirty_outputs.keys())
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
    direct = _can_go_directly(operator, result, structure, values)  # before the backward frees what is kept
    overwritten = watched.written()
    made = [t for t, d in zip([*tensors, *result.changed.values()], result.differentiable, strict=True) if d]
    # without data the kernel of a custom operator does not run; its schema says what it writes
    is_known = operators.is_custom(operator.callee)
    in_backward = Written() if is_known else written_in_backward(result.state, made, values, writes_undone, scale)
    raised = in_backward if isinstance(in_backward, Exception) else None
    in_backward = in_backward if isinstance(in_backward, Written) else Written()
    overwritten |= in_backward.arguments
    return Expected(
        structure=structure,
        tensors=[TensorMetadata.of(t) for t in tensors],
        differentiable=list(result.differentiable),
        changed=sorted(result.changed),
        dirty_outputs=result.dirty_outputs,
        gradients=[i for i, n in enumerate(operator.needs) if n] if result.state is not None else [],
        overwritten=overwritten - set(result.changed),
        spoiled=in_backward.gradients,
        backward_raised=raised,
        views=views,
        saved_bytes=saved_bytes,
        direct=direct,
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


def _sharing_memory(tensors: list[torch.Tensor]) -> list[int]:
    """The places of outputs that share memory with another output."""
    return [i for i, t in enumerate(tensors) if _sharing([t], tensors[:i] + tensors[i + 1 :])]


def _from_meta_function(
    invocation: Invocation, operator: OpaqueCall, slots: list[Proxy], provider: Callable[..., Any]
) -> Expected:
    operator.meta = invocation.rule.described("meta function")
    with compat.without_dynamo(), FakeTensorMode(allow_non_fake_inputs=True), compat.addresses_refused():
        args, kwargs = fill(operator.arguments, [example(p, None) for p in slots])
        kwargs.pop(OUTSIDE, None)
        leading = (invocation.call.seen,) if invocation.rule.pass_call else ()
        try:
            with autocast_regions(operator.autocasts):
                output = provider(*leading, *args, **kwargs)
        except Exception as error:
            if invocation.rule.ships:  # what it calls of the program raised it
                raise Raised(error) from None
            raise MetaError(
                f"{invocation.rule.described('meta function')} raised {type(error).__name__}: {error} for "
                f"{invocation.call}; it must return the outputs' metadata for these arguments"
            ) from error
        marked: set[int] = set()
        output, residuals = output_and_residuals(invocation.rule, invocation.call, output, "meta function")
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


def _is_unknown(proxy: Proxy) -> bool:
    """Whether it is a number that a tensor holds."""
    return isinstance(proxy, NumberProxy) and proxy.value is None


def example(proxy: Proxy, seed: int | None, *, definite: bool = False, integer: int = 0, number: int = 1) -> Any:
    """A value with a proxy's metadata: without data, or with values inside the usual domains.

    With ``definite`` square matrices are symmetric and positive definite; ``integer`` is what a tensor of integers is
    full of, ``number`` what a number is that a tensor holds.
    """
    if isinstance(proxy, NumberProxy):
        return proxy.python_type(number) if _is_unknown(proxy) else proxy.value
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


@contextlib.contextmanager
def _no_side_effects(invocation: Invocation, reachable: State) -> Iterator[WritesUndone]:
    """Leave Python state, tensors and random generators as they are; what raises leaves its mark, as in eager."""
    generators, writes = Generators.now(), WritesUndone()
    try:
        # in this thread alone are calls followed: PyTorch has one for each GPU, in which backwards run
        in_this_thread = torch.autograd.set_multithreading_enabled(False)
        with trying(), compat.without_dynamo(), torch.random.fork_rng(), in_this_thread, following_natively(reachable):
            yield writes
        if invocation.guarded is not None:
            prologue_guards.drop_changed(invocation.guarded, cache_guards.traced_program())
        reachable.restore()
    finally:
        writes.undo()
        generators.restore()
