"""What a program may not know while it is traced: the values of tensors.

``if x.sum() > 0``, ``int(x)``, ``range(x.item())``: Python goes by a value that only the run knows. thunder refuses
some of it without saying where, and takes a number that it does not know for None, or for false. Here each is refused
in words: where it is, which value, and what to do. A custom Function that does it runs opaque.
"""

from __future__ import annotations

from typing import Any

from thunder.core import jit_ext, prims
from thunder.core.interpreter import make_opaque
from thunder.core.proxies import NumberProxy, TensorProxy

from hookkit.engine.interpreter.reasons import user_source
from hookkit.engine.values.wrapping import TensorMetadata
from hookkit.errors import DataDependencyError
from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around

__all__ = ["DECISIONS", "MENDS", "refusal"]

# What a program branches on; FloatProxy and the others have these from NumberProxy.
DECISIONS = ("__bool__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__")
# What makes a Python value of a tensor, or of a number that a tensor holds.
CONVERSIONS = {
    "__array__": "a NumPy array",
    "__bool__": "a Python boolean",
    "__complex__": "a Python complex number",
    "__float__": "a Python float",
    "__index__": "a Python int",
    "__int__": "a Python int",
}
# What Python takes of a number, and the parameters of thunder's.
PARTS = {
    **dict.fromkeys(("__ceil__", "__floor__", "__round__", "__trunc__"), ("a rounded Python number", "self")),
    **dict.fromkeys(("__divmod__", "__rdivmod__"), ("a Python quotient and remainder", "self, other")),
}


# The interpreter would interpret them, as it does what is called by a tensor's methods.
@make_opaque  # type: ignore[untyped-decorator]
def refusal(proxy: Any, use: str) -> DataDependencyError:
    """The error for a program that uses a value which is not known yet.

    Args:
        proxy: the tensor or number.
        use: what the program makes of its value, as in "a Python boolean".
    """
    source = user_source()
    where = f" at {source}" if source else ""
    return DataDependencyError(
        f"the program uses the value of {_in_words(proxy)} as {use}{where} (data dependency), which is known only "
        "when the program runs. Compute with tensors, torch.where(condition, a, b), or by one of two functions, "
        "torch.cond(condition, f, g, (x,)); or pass what is decided as a Python number, for which the program is "
        "compiled; or let the function that decides run as one operator, hookkit.opaque(function); or compile the "
        "program by thunder.dynamo.thunderfx, which leaves the decision to Python"
    )


def _in_words(proxy: Any) -> str:
    """A tensor or number of the program as its author knows it: what made it."""
    kind = f"a tensor ({TensorMetadata.of_proxy(proxy)}" if isinstance(proxy, TensorProxy) else "a number (of a tensor"
    made = _maker(proxy.name)
    if made is None:
        return f"{kind}, which the program is given)"
    line = getattr(made.source_positions, "lineno", None)
    return f"{kind}, from {made.sym.name}{f' at {made.source_filename}:{line}' if line else ''})"


def _maker(name: str) -> Any:
    """The operation of the program that is traced which makes a value; None if it is given."""
    for scope in jit_ext.get_jit_ctx().computation_trace.scopes:
        for bsym in scope:
            if any(o.name == name for o in bsym.flat_proxy_outs):
                return None if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL else bsym
    return None


@make_opaque  # type: ignore[untyped-decorator]
def _is_tracing() -> bool:
    return jit_ext._jit_ctx.get(None) is not None


def _of_tensor(name: str) -> Any:
    """A conversion of a tensor to a Python value."""

    def replacement(stock: Any) -> Any:
        def convert(self: Any, *args: Any) -> Any:
            if not _is_tracing() and stock is not None:
                return stock(self, *args)
            raise refusal(self, CONVERSIONS[name])

        convert.__name__ = name
        return convert

    return replacement


def _of_number(name: str, use: str) -> Any:
    """What is asked of a number of which the value must be known.

    thunder takes one that is not known, as ``x.item() > 0``, for false.
    """

    def replacement(stock: Any) -> Any:
        def decide(self: Any, *others: Any) -> Any:
            for number in (self, *others):
                if isinstance(number, NumberProxy) and number.value is None:
                    raise refusal(number, use)
            return stock(self, *others) if stock is not None else getattr(self.value, name)(*others)

        decide.__name__ = name
        return decide

    return replacement


def _hash(stock: Any) -> Any:
    """``{2.0: ...}[x.item()]``; thunder takes a number that is not known for None."""
    known = _of_number("__hash__", "a key")(stock)

    def __hash__(self: Any) -> int:
        return int((known if _is_tracing() else stock)(self))

    return __hash__


def with_known_indices(stock: Any, tensor: Any, key: Any) -> Any:
    """An indexing with lists.

    Args:
        stock: ``thunder.clang._advanced_indexing``; it puts the value of a number, or None, into the program's list.
        tensor: the tensor that is indexed.
        key: what it is indexed with, dimension by dimension.
    """
    for number in (n for k in key if isinstance(k, tuple | list) for n in k):
        if isinstance(number, NumberProxy) and number.value is None:
            raise refusal(number, "an index")
    return stock(tensor, key)


def has_no_gradient(stock: Any, bsym: Any) -> bool:
    """Whether nothing can be differentiated through an operation; numbers never have a gradient.

    Args:
        stock: ``thunder.core.transforms.is_constant_for_vjp``, which takes a float for one that may have.
        bsym: the operation.
    """
    numbers = not any(isinstance(p, TensorProxy) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
    return (numbers and bool(bsym.flat_proxy_outs)) or stock(bsym)


def _formatted(_: Any) -> Any:
    """``f"{x.item():.3f}"``; without a format thunder shows the number as one of a trace."""
    decide = _of_number("__format__", "text")(None)

    @make_opaque  # type: ignore[untyped-decorator]  # from Python 3.13 on the interpreter interprets it
    def __format__(self: Any, form: str) -> Any:
        return decide(self, form) if form else str(self)

    return __format__


def _knows_no_value(trace: Any) -> bool:
    """Whether there is a number in a trace that only the run knows."""

    def has_one(bsyms: Any) -> bool:
        return any(
            any(isinstance(o, NumberProxy) and o.value is None for o in b.flat_outs) or has_one(b.subsymbols)
            for b in bsyms
        )

    return has_one(trace.bound_symbols)


_SELF = ("self",)
_LATE = "a value that only the run knows is refused without saying where the program asks for it"
MENDS = [
    Mend(
        "values of tensors that only the run knows",
        "A program that branches on the value of a tensor is refused without saying where.",
        program="""
print(thunder.jit(lambda x: sum(x for _ in range(x.long())))(torch.tensor(2.0)).tolist())
""",
        stock="TypeError",
        eager="4.0",
        refused="DataDependencyError",
        patches=(
            *(
                Patch(f"thunder.core.proxies:TensorProxy.{name}", _of_tensor(name), _LATE, takes=("self",))
                for name in ("__bool__", "__complex__", "__float__", "__int__")
            ),
            *(
                Patch(f"thunder.core.proxies:TensorProxy.{name}", _of_tensor(name), _LATE, adds=True)
                for name in ("__array__", "__index__")
            ),
        ),
    ),
    Mend(
        "numbers that only the run knows",
        "A number that a tensor holds has no value while a program is traced, and every comparison with it is false.",
        program="""
def f(x):
    return x * 2 if x.sum().item() > 0 else x

print(thunder.jit(f)(torch.ones(1)).tolist())
""",
        stock="[1.0]",
        eager="[2.0]",
        refused="DataDependencyError",
        patches=(
            *(
                Patch(
                    f"thunder.core.proxies:NumberProxy.{name}",
                    _of_number(name, "a Python boolean"),
                    "a number that a tensor holds is taken for false where the program branches on it",
                    takes=("self",) if name == "__bool__" else ("self, other",),
                    concerns=_knows_no_value,
                )
                for name in DECISIONS
            ),
            *(
                Patch(
                    f"thunder.core.proxies:{kind}.{name}", _of_number(name, CONVERSIONS[name]), _LATE, takes=("self",)
                )
                for kind, name in (
                    *(("NumberProxy", name) for name in ("__complex__", "__float__", "__int__")),
                    ("IntegerProxy", "__index__"),
                )
            ),
            Patch(
                "thunder.core.proxies:NumberProxy.make_static_constrained",
                _of_number("make_static_constrained", "a Python boolean"),
                _LATE,
                takes=("self",),
            ),
            Patch("thunder.core.proxies:NumberProxy.__format__", _formatted, _LATE, adds=True),
            *(
                Patch(f"thunder.core.proxies:NumberProxy.{name}", _of_number(name, use), _LATE, takes=(taken,))
                for name, (use, taken) in PARTS.items()
            ),
        ),
    ),
    Mend(
        "numbers that only the run knows, looked up",
        "A number that a tensor holds is taken for None where it is looked up in a dict or set.",
        program="""
print(thunder.jit(lambda x: x * {1.0: 2}.get(x.sum().item(), 3))(torch.ones(1)).tolist())
""",
        stock="[3.0]",
        eager="[2.0]",
        refused="DataDependencyError",
        patches=(
            Patch(
                "thunder.core.proxies:NumberProxy.__hash__",
                _hash,
                "a number that a tensor holds is taken for None where it is looked up",
                takes=("self",),
                concerns=_knows_no_value,
            ),
        ),
    ),
    Mend(
        "numbers that only the run knows, in a list of indices",
        "A number that a tensor holds is taken for None in a list of indices.",
        program="""
print(thunder.jit(lambda x: x[[x.sum().long().item(), 0]])(torch.tensor([0.0, 1.0])).tolist())
""",
        stock="",
        eager="[1.0, 0.0]",
        patches=(
            Patch(
                "thunder.clang:_advanced_indexing",
                around(with_known_indices),
                "a number that a tensor holds is taken for None in a list of indices",
                takes=("a, key",),
            ),
        ),
    ),
    Mend(
        "operations on numbers",
        "A program that computes the remainder of a number that a tensor holds, whose gradient nobody asks for, fails.",
        program="""
print(thunder.jit(lambda x: x * (x.sum().item() % 2))(torch.ones(1, requires_grad=True)).tolist())
""",
        stock="RuntimeError: Failed to find a gradient transform",
        eager="[1.0]",
        patches=(
            Patch(
                "thunder.transforms.autodiff:is_constant_for_vjp",
                around(has_no_gradient),
                "a program that computes the remainder of a number that a tensor holds is not compiled",
                takes=("symbol",),
            ),
        ),
    ),
]
