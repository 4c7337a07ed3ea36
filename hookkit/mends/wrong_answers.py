"""What hookkit corrects in thunder besides calls: values that it gets wrong, and refuses where it would be silent.

Each stands in the place of one function of thunder's, as `PATCHES` has it, and says what is wrong with
that one; when thunder has mended it, it can go.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Number
from typing import Any

import torch
from thunder.core.devices import cpu, to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    PseudoInst,
    _interpret_call,
    _tuple_new_provenance_tracking_lookaside,
    interpreter_needs_wrap,
    wrap,
    wrap_const,
)
from thunder.core.proxies import NumberProxy, TensorProxy

from hookkit.engine.dispatch.extensions import Extension
from hookkit.engine.interpreter.attempt import raise_in_program
from hookkit.engine.interpreter.reasons import user_source
from hookkit.engine.trace.composite import record_constant
from hookkit.errors import HookError
from hookkit.mends import tensor_identity
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around, around_method

__all__ = [
    "MENDS",
    "bind",
    "broadcast",
    "compare",
    "generator",
    "inference_mode",
    "keys_count",
    "new_tuple",
    "printed",
    "proxify",
    "torch_device",
    "torch_dtype",
    "unsupported_nodes",
]


def torch_dtype(tensor: Any) -> torch.dtype:
    """As torch names it: thunder's own dtypes are not equal to torch's."""
    return to_torch_dtype(tensor.dtype)  # type: ignore[no-any-return]


def proxify(context: Any, stock: Callable[..., Any], value: Any) -> Any:
    """Have tensors in a wrapped value replaced by proxies.

    thunder (``JitCtx.proxify`` in thunder/core/jit_ext.py) makes a named tuple as if it took one sequence, and cannot
    unpack a tensor that is a constant of the program.
    """
    held = value.value
    proxies = _proxify(context, stock, value)
    if isinstance(held, torch.Tensor) and isinstance(proxies, TensorProxy):
        tensor_identity.note(context.computation_trace, held, value)
    return proxies


def _proxify(context: Any, stock: Callable[..., Any], value: Any) -> Any:
    held = value.value
    if value.original_value is not value.nothing:
        return stock(context, value)
    if isinstance(held, torch.Tensor) and _is_constant(value.provenance) and not held.requires_grad:
        value.register_proxy(record_constant(held))
        return value.value
    if not (isinstance(held, tuple) and hasattr(held, "_make")):
        return stock(context, value)
    value.track_items()
    proxies = held._make(item.value for item in value.item_wrappers)
    value.register_proxy(proxies)
    for name, attribute in value.attribute_wrappers.items():
        if name not in type(held)._fields:  # type: ignore[attr-defined]
            attribute.register_proxy(getattr(proxies, name))
    return proxies


def new_tuple(stock: Callable[..., Any], cls: Any, *items: Any) -> Any:
    """``tuple.__new__`` of a class that is derived from a named tuple, or from a tuple and has other arguments.

    thunder (``_tuple_new_provenance_tracking_lookaside`` in thunder/core/interpreter.py) refuses the first, and calls
    the class of the second, which makes another tuple of the items.
    """
    kind = cls.value
    if kind is tuple or (kind.__bases__ == (tuple,) and kind.__new__ is tuple.__new__):
        return stock(cls, *items)
    plain = stock(wrap_const(tuple), *items)
    if plain is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return plain
    made = wrap(tuple.__new__(kind, plain.value), provenance=plain.provenance)
    made.item_wrappers = plain.item_wrappers
    return made


def torch_device(tensor: Any) -> torch.device:
    """As torch names it: thunder's own devices are not torch's, where a function of torch or a dict is asked."""
    return to_torch_device(tensor.device)  # type: ignore[no-any-return]


def generator(*_: Any, **__: Any) -> Any:
    """Refuse ``torch.Generator(...)`` in a program."""
    return raise_in_program(
        HookError(
            f"torch.Generator() at {user_source()} is not supported inside a program compiled by thunder: it would be "
            "made once, when the program is compiled, and the next run would go on where the last one stopped. Make it "
            "outside the compiled program, or inside a torch.autograd.Function, which then runs as one operator."
        )
    )


def _is_constant(provenance: Any) -> bool:
    """Whether a value is, or is a part of, a constant of the program that no prologue can unpack."""
    if provenance.inst is PseudoInst.CONSTANT:
        return not isinstance(provenance.value, int | str)
    return provenance.inst in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR) and _is_constant(provenance.inputs[0])


_NAMED = re.compile(r"(torch\.return_types\.\w+)\(\n((?:[^()]|\([^()]*\))*)\)")


def printed(stock: Callable[..., str], value: Any, **options: Any) -> str:
    """A value as it stands in a trace; thunder prints ``torch.return_types.sort`` in a form that cannot be executed."""
    return _NAMED.sub(_constructed, stock(value, **options))


def _constructed(match: re.Match[str]) -> str:
    fields = [field.partition("=")[2] for field in match[2].split(",\n")]
    return f"{match[1]}(({', '.join(fields)},))"


def bind(symbol: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record an operation with the lists as they are now; the program may change them afterwards.

    thunder records the lists themselves (``Symbol.bind`` in thunder/core/symbol.py), and reads them later.
    """

    def copied(value: Any) -> Any:
        return list(value) if type(value) is list else value

    return stock(symbol, *map(copied, args), **{k: copied(v) for k, v in kwargs.items()})


def keys_count(keys: Any) -> int:
    """``len(d.keys())`` of a dict in a program, which thunder's own keys do not know."""
    return len(keys.mapping)


def compare(tensor: Any, stock: Callable[..., Any], other: Any) -> Any:
    """``x == None``, as PyTorch has it: what is no tensor and no number is not equal."""
    return (
        stock(tensor, other) if isinstance(other, TensorProxy | NumberProxy | Number | torch.Tensor) else NotImplemented
    )


def broadcast(stock: Callable[..., Any], *tensors: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> Any:
    """Tensors in their common shape; on the CPU those without dimensions, too.

    thunder leaves them as they are, for the sake of operations with tensors on another device, and then gives them the
    gradient of the result, not its sum: that of ``x.sum() * y`` for ``x`` is wrong.
    """
    elsewhere = any(isinstance(t, TensorProxy) and t.device != cpu for t in tensors)
    return stock(*tensors, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers and elsewhere)


def unsupported_nodes(stock: Callable[..., set[torch.fx.Node]], graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """What of one of Dynamo's graphs is not for thunder: all of it, if it registers a hook on a tensor that it makes.

    ``thunderfx`` would split the graph there. The hook is lost between the parts, and does not see the gradient of what
    comes before it; PyTorch is right where it has the whole graph.
    """
    if any(str(node.target) == "register_hook" for node in graph.graph.nodes):
        return {n for n in graph.graph.nodes if n.op.startswith("call_")}
    return stock(graph)


def inference_mode(mode: Any = True) -> Any:
    """``torch.inference_mode`` in a program: thunder would switch it on for the tracing, and forget about it.

    Interpreted. What a compiled program computes are no inference tensors; they require no grad.
    """
    return torch.no_grad() if mode else contextlib.nullcontext()


def _symbols(bsyms: Any) -> Iterator[Any]:
    """Bound symbols, and what they are made of."""
    for bsym in bsyms:
        yield bsym
        yield from _symbols(bsym.subsymbols)


def _records_lists(trace: Any) -> bool:
    return any(type(a) is list for b in trace.bound_symbols for a in (*b.args, *b.kwargs.values()))


def _mixes_ranks(trace: Any) -> bool:
    """Whether a tensor without dimensions meets one with some in one operation."""
    ranks = ({a.ndim for a in b.flat_args if isinstance(a, TensorProxy)} for b in _symbols(trace.bound_symbols))
    return any(0 in found and len(found) > 1 for found in ranks)


MENDS = [
    Mend(
        "lists that change",
        "An operation is recorded with the list that it was given itself, so that the program changes it afterwards.",
        program="""
def f(x):
    parts = [x, x * 2]
    joined = torch.cat(parts)
    parts.reverse()
    return joined * 2

print(thunder.jit(f)(torch.ones(1)).tolist())
""",
        stock="[4.0, 2.0]",
        eager="[2.0, 4.0]",
        patches=(
            Patch(
                "thunder.core.symbol:Symbol.bind",
                around_method(bind),
                "a list that the program changes after an operation took it is read as it is later",
                takes=("self, *args, output, subsymbols, _call_ctx, **kwargs",),
                concerns=_records_lists,
            ),
        ),
    ),
    Mend(
        "the number of keys",
        "What `d.keys()` of a dict in a program returns has no length.",
        program="""
print(thunder.jit(lambda d: d["x"] * len(d.keys()))({"x": torch.ones(1)}).tolist())
""",
        stock="TypeError: object of type 'MappingKeysView' has no len()",
        eager="[1.0]",
        patches=(
            Patch(
                "thunder.core.interpreter:MappingKeysView.__len__",
                lambda _: keys_count,
                "len(d.keys()) of a dict in a program is an error",
                adds=True,
            ),
        ),
    ),
    Mend(
        "a tensor compared with None",
        "`x == None` and `x != None` are operations on tensors, and fail.",
        program="""
print(thunder.jit(lambda x: x * (2 if x == None else 3))(torch.ones(1)).tolist())
""",
        stock="ValueError: None had an unexpected type <class 'NoneType'>",
        eager="[3.0]",
        patches=tuple(
            Patch(
                f"thunder.core.proxies:TensorProxy.{name}",
                around_method(compare),
                "a tensor cannot be compared with what is none, as in x == None",
                takes=("self, other",),
            )
            for name in ("__eq__", "__ne__")
        ),
    ),
    Mend(
        "named results in a trace",
        "A result such as that of `torch.sort` is a plain tuple in a program, without the names that PyTorch gives it.",
        program="""
print(thunder.jit(torch.sort)(torch.tensor([2.0, 1.0])).values.tolist())
""",
        stock="AttributeError: 'tuple' object has no attribute 'values'",
        eager="[1.0, 2.0]",
        patches=(
            Patch(
                "thunder.core.codeutils:prettyprint",
                around(printed),
                "a trace that holds a named tuple of torch's cannot be executed",
                takes=("x, with_type, literals_allowed, literals_as_underscores, _quote_markers",),
            ),
        ),
    ),
    Mend(
        "tensors without dimensions",
        "On the CPU a tensor without dimensions is not broadcast, and gets the gradient of the result, not its sum.",
        program="""
x = torch.tensor([1.0, 2.0], requires_grad=True)
thunder.jit(lambda x: x.sum() * x)(x).sum().backward()
print(x.grad.tolist())
""",
        stock="[4.0, 5.0]",
        eager="[6.0, 6.0]",
        patches=(
            Patch(
                "thunder.clang:maybe_broadcast",
                around(broadcast),
                "the gradient of a tensor without dimensions that meets one with some is wrong",
                takes=("*args, treat_cpu_scalar_tensors_as_numbers, expand_fn",),
                concerns=_mixes_ranks,
            ),
        ),
    ),
    Mend(
        "tensors that are constants of a program",
        "A tensor that a program comes to as a constant, as by an argument's default, cannot be unpacked; nor can a "
        "named tuple of tensors be made.",
        program="""
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale=torch.tensor(2.0)):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * 20

x = torch.ones(1, requires_grad=True)
thunder.jit(lambda x: Scaled.apply(x))(x).sum().backward()
print(x.grad.tolist())
""",
        stock="KeyError: ",
        eager="[20.0]",
        patches=(
            Patch(
                "thunder.core.jit_ext:JitCtx.proxify",
                around_method(proxify),
                "named tuples of tensors, and tensors that are constants of a program, are errors",
                takes=("self, value",),
            ),
        ),
    ),
    Mend(
        "a dtype and a device as torch names them",
        "`x.dtype` and `x.device` of a tensor in a program are thunder's, which are not equal to torch's.",
        program="""
print(thunder.jit(lambda x: x * (2 if x.dtype in (torch.float32,) else 3))(torch.ones(1)).tolist())
""",
        stock="[3.0]",
        eager="[2.0]",
        extension=Extension(
            answers={
                TensorProxy.dtype.fget: interpreter_needs_wrap(torch_dtype),
                TensorProxy.device.fget: interpreter_needs_wrap(torch_device),
            }
        ),
    ),
    Mend(
        "classes derived from tuples",
        "`tuple.__new__` of a class that is derived from a named tuple is refused.",
        program="""
import collections

class Pair(collections.namedtuple("Pair", ["a", "b"])):
    pass

print(thunder.jit(lambda x: Pair(x, x * 2).b * 3)(torch.ones(1)).tolist())
""",
        stock="NotImplementedError",
        eager="[6.0]",
        extension=Extension(
            answers={tuple.__new__: partial(new_tuple, _tuple_new_provenance_tracking_lookaside)},
        ),
    ),
    Mend(
        "generators of random numbers",
        "A `torch.Generator` that a program makes is made when it is compiled, and goes on from run to run.",
        program="""
def f(x):
    made = torch.Generator(device="cpu")
    made.manual_seed(1)
    return x * torch.rand(1, generator=made)

jitted = thunder.jit(f)
print(torch.equal(jitted(torch.ones(1)), jitted(torch.ones(1))))
""",
        stock="",
        eager="True",
        refused="HookError: torch.Generator()",
        extension=Extension(answers={torch.Generator: generator}),
    ),
    Mend(
        "inference mode",
        "`torch.inference_mode` in a program is switched on for the tracing, and what is in it is differentiated.",
        program="""
@thunder.jit
def f(x):
    with torch.inference_mode():
        y = x * 2
    return x + y

x = torch.ones(1, requires_grad=True)
f(x).sum().backward()
print(x.grad.tolist())
""",
        stock="[3.0]",
        eager="[1.0]",
        extension=Extension(answers={torch.inference_mode: partial(_interpret_call, inference_mode)}),
    ),
    Mend(
        "hooks where thunderfx splits a graph",
        "`thunderfx` splits one of Dynamo's graphs at a hook on a tensor, and the hook is lost between the parts.",
        program="""
def f(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    return y * 3

x = torch.ones(1, requires_grad=True)
thunder.dynamo.thunderfx(f)(x).sum().backward()
print(x.grad.tolist())
""",
        stock="",
        eager="[60.0]",
        patches=(
            Patch(
                "thunder.dynamo.splitter:get_nodes_in_unsupported_ctx_regions",
                around(unsupported_nodes),
                "a hook on a tensor that the program makes is lost",
                takes=("gm",),
                concerns_thunderfx=True,
            ),
        ),
    ),
]
