"""Small programs that compare thunder with eager PyTorch on the installation and the device at hand.

``python -m hookkit check`` runs them and prints a table for a bug report. They cover each kind of call that a shipped
rule takes over, not every point of it: that is what the tests are for. Each gradient is a hundred times the right one,
so that a backward that is ignored shows.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import thunder
import torch
from thunder.dynamo import thunderfx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hookkit
from hookkit.testing import Difference, assert_same

__all__ = ["PROGRAMS", "Program", "Row", "check", "devices", "table"]


@attrs.frozen
class Program:
    """A program of two vectors, the first of which requires grad.

    Attributes:
        name: what it is about.
        function: the program, a function or module.
        eager: what PyTorch runs to compare with, if it is not the program itself.
        rule: the rule that is in force while it is compiled, beside those that ship.
        compilers: what compiles it; keys of ``COMPILERS``.
    """

    name: str
    function: Callable[..., Any]
    eager: Callable[..., Any] | None = None
    rule: hookkit.Rule[..., Any] | None = None
    compilers: tuple[str, ...] = ("jit", "thunderfx")


@attrs.frozen
class Row:
    """What became of a program.

    Attributes:
        program: its name.
        compiler: what compiled it: ``jit`` or ``thunderfx``.
        device: where its tensors were.
        outcome: ``ok``, ``differs`` or ``raises``.
        calls: what became of its calls, as in a report: ``traced``, ``opaque``; empty where no rule took any.
        seconds: how long it took to compile and run it twice, the eager runs included.
        detail: what differs, or the error.
    """

    program: str
    compiler: str
    device: str
    outcome: str
    calls: str
    seconds: float
    detail: str

    @property
    def ok(self) -> bool:
        """Whether it agrees with eager PyTorch."""
        return self.outcome == "ok"


COMPILERS: dict[str, Callable[..., Any]] = {"jit": thunder.jit, "thunderfx": thunderfx}


def devices() -> list[str]:
    """Where the programs are run: the CPU, and a CUDA device if there is one."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def check(programs: Sequence[Program] | None = None) -> Iterator[Row]:
    """Run the programs, all by default, on each device with each of their compilers."""
    for device in devices():
        for program in PROGRAMS if programs is None else programs:
            for compiler in program.compilers:
                yield _run(program, compiler, device)


def _run(program: Program, compiler: str, device: str) -> Row:
    """Compare one program with eager PyTorch; whatever it raises is its outcome."""
    function = program.function
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).to(device)
    x = torch.linspace(0.25, 1.75, 4, device=device, requires_grad=True)
    y = torch.linspace(0.5, 0.75, 4, device=device)
    start = time.perf_counter()
    calls = outcome = detail = ""
    try:
        with warnings.catch_warnings(), hookkit.use(*([program.rule] if program.rule else [])):
            warnings.simplefilter("ignore")
            compiled = assert_same(function, x, y, jit=COMPILERS[compiler], reference=program.eager)
            calls = ", ".join(sorted({str(call.outcome) for call in hookkit.report(compiled).calls}))
        outcome = "ok"
    except Difference as error:
        outcome, detail = "differs", _one_line(error)
    except Exception as error:
        outcome, detail = "raises", f"{type(error).__name__}: {_one_line(error)}"
    return Row(program.name, compiler, device, outcome, calls, round(time.perf_counter() - start, 2), detail)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown, for a bug report, and a line that counts."""
    titles = ("program", "compiler", "device", "outcome", "calls", "s")
    cells = [(r.program, r.compiler, r.device, r.outcome, r.calls, f"{r.seconds:.1f}") for r in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [_line(titles, widths), _line(["-" * w for w in widths], widths), *(_line(c, widths) for c in cells)]
    details = [f"{r.program}, {r.compiler}, {r.device}: {r.detail}" for r in rows if not r.ok]
    agree = sum(r.ok for r in rows)
    return "\n".join([*lines, "", *details, f"{agree} of {len(rows)} programs agree with eager PyTorch"])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(f'{c:<{w}}' for c, w in zip(cells, widths, strict=True))} |"


# ------------------------------------------------------------------------------------------------------ the programs
# At module level, because Dynamo does not know where a class of a function comes from, and leaves it to PyTorch.


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return cube_gradient(x, grad)


def cube_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return 100 * grad * 3 * x * x


def one_function(x: Tensor, y: Tensor) -> Tensor:
    return Cube.apply(x.sin()) * y


def loop(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = Cube.apply(x) * y / 100
    return x


def half_precision(x: Tensor, y: Tensor) -> Tensor:
    return Cube.apply(x.bfloat16()) * y


def autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return Cube.apply(x) @ y


class SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 100 * grad * y, 100 * grad * x if ctx.needs_input_grad[1] else None


def setup_context(x: Tensor, y: Tensor) -> Any:
    return SetupContext.apply(x, y) + SetupContext.apply(x, x.cos())


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, rounded = x * 2, x.round()
        ctx.mark_non_differentiable(rounded)
        return values, rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return 200 * grad


def non_differentiable(x: Tensor, y: Tensor) -> Any:
    values, rounded = Rounded.apply(x.exp())
    return values * rounded, rounded


class NumPySquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.array = x.detach().cpu().numpy()
        return torch.from_numpy(ctx.array * ctx.array).to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 200 * grad * torch.from_numpy(ctx.array).to(grad.device)


def numpy_in_forward(x: Tensor, y: Tensor) -> Tensor:
    return NumPySquare.apply(x.sin()) * y


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 200 * grad


def mark_dirty(x: Tensor, y: Tensor) -> Tensor:
    product = x * y
    DoubledInPlace.apply(product)
    return product.sin()


def in_place(x: Tensor, y: Tensor) -> Tensor:
    product, total = x * y, y.clone()
    product[1:].mul_(3)
    total.add_(1)
    return Cube.apply(product) * total


def operator_with_ctx(x: Tensor, y: Tensor) -> Any:
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * x * x, (x,)

    def backward(ctx: Any, grad: Tensor, x: Tensor) -> Any:
        return cube_gradient(x, grad)

    apply = torch.ops.higher_order.autograd_function_apply
    return apply(forward, backward, x.sin(), args_tensor_mask=[True], non_differentiable_idx=[]) * y


def operator_without_ctx(x: Tensor, y: Tensor) -> Any:
    def forward(x: Tensor) -> Any:
        return x * x * x, (x,)

    def backward(grad: Tensor, x: Tensor) -> Any:
        return cube_gradient(x, grad)

    apply = torch.ops.higher_order.autograd_function_apply
    return apply(forward, backward, x.sin(), non_differentiable_idx=[], saved_for_backward_idx=[0]) * y


@torch.library.custom_op("hookkit_doctor::cube", mutates_args=())
def cube_operator(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cube_operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_input(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


cube_operator.register_autograd(Cube.backward, setup_context=keep_input)


def custom_operator(x: Tensor, y: Tensor) -> Tensor:
    return cube_operator(x.sin()) * y


def checkpointed(x: Tensor, y: Tensor) -> Any:
    return checkpoint(one_function, x.exp(), y, use_reentrant=False)


def cube(x: Tensor) -> Tensor:
    return x * x * x


def function_with_a_rule(x: Tensor, y: Tensor) -> Tensor:
    return cube(x.sin()) * y


@hookkit.rule(cube, mode="trace", register=False)
def traced_cube(x: Tensor) -> Any:
    return x * x * x, hookkit.save(x=x)


@hookkit.rule(cube, mode="opaque", register=False)
def opaque_cube(x: Tensor) -> Any:
    return x * x * x, hookkit.save(x=x)


@traced_cube.backward
@opaque_cube.backward
def _(saved: Any, grad: Tensor) -> Any:
    return {"x": cube_gradient(saved.x, grad)}


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1.0, 2.0, 4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return SetupContext.apply(x * y, self.weight)


PROGRAMS = (
    Program("a Function", one_function),
    Program("a Function in a loop", loop),
    Program("a Function on bfloat16", half_precision),
    Program("a Function under autocast", autocast),
    Program("setup_context, needs_input_grad", setup_context),
    Program("mark_non_differentiable", non_differentiable),
    Program("NumPy in forward", numpy_in_forward),
    Program("mark_dirty", mark_dirty),
    Program("changes in place", in_place),
    Program("a module with a parameter", Scale()),
    Program("torch.utils.checkpoint", checkpointed),
    Program("torch.library.custom_op", custom_operator),
    Program("autograd_function_apply", operator_without_ctx, eager=one_function, compilers=("jit",)),
    Program("autograd_function_apply with ctx", operator_with_ctx, eager=one_function, compilers=("jit",)),
    Program("a rule, traced", function_with_a_rule, eager=one_function, rule=traced_cube, compilers=("jit",)),
    Program("a rule, opaque", function_with_a_rule, eager=one_function, rule=opaque_cube, compilers=("jit",)),
)
