"""Whole training programs, composed of Functions that somebody wrote: drawn by chance, trained eagerly and compiled.

The Functions are those of the contract's programs, of the examples, and such as have an operation of PyTorch's operator
database (``op_db``) for their forward and another one for their backward. They stand between modules, in what a
program puts around them: a checkpoint, ``no_grad``, autocast, a loop. A program is trained for three steps, with
batches of other shapes and dtypes. The losses, the parameters, their gradients and the buffers are compared.

Nothing here is shared with ``grammar.py``, which makes up Functions of its own.
"""

from __future__ import annotations

import hookkit  # before thunder, which cannot be imported alone on current PyTorch

# isort: split

import contextlib
import functools
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import thunder
import thunder.dynamo
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "examples")]
from char_transformer import QuantisedLinear  # noqa: E402
from contract import CASES as CONTRACT  # noqa: E402
from digits import LeanNorm, Quantise, Spike  # noqa: E402
from spiking import Spike as Firing  # noqa: E402

WIDTH = 4
STEPS = 3
WAYS = ("traced", "thunderfx", "opaque", "region")

Piece = Callable[[], nn.Module]


class Applied(nn.Module):
    """What calls a function with rows of numbers, and with parameters as its other arguments."""

    def __init__(self, function: Callable[..., Any], others: int = 0) -> None:
        super().__init__()
        self.function = function
        self.others = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(others))

    def forward(self, x: Tensor) -> Tensor:
        output = self.function(x, *(x * other for other in self.others))
        if not isinstance(output, Tensor):
            output = functools.reduce(torch.add, [t for t in output if t.shape == x.shape])
        return output.to(x.dtype)


# What the examples' Functions are called with besides.


class Rounded(nn.Module):
    """A linear layer, its weight rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Quantise.apply(self.weight, 0.1, 1.0).to(x.dtype))


class QuantisedRows(nn.Module):
    """The layer of the character transformer, which takes batches of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return QuantisedLinear.apply(x.reshape(-1, 1, WIDTH), self.weight.to(x.dtype)).reshape(x.shape)


class Normed(nn.Module):
    """A norm that keeps little."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return LeanNorm.apply(x.reshape(-1, WIDTH), self.gain.to(x.dtype), 1e-5).reshape(x.shape)


EXAMPLES: dict[str, Piece] = {
    "digits.Quantise": Rounded,
    "digits.LeanNorm": Normed,
    "digits.Spike": lambda: Applied(lambda x: Spike.apply(x, 0.1, 2.0)),
    "spiking.Spike": lambda: Applied(Firing.apply),
    "char_transformer.QuantisedLinear": QuantisedRows,
}


# The contract's Functions: those that take numbers of any count and return such.


def _contract() -> dict[str, Piece]:
    found: dict[str, Piece] = {}
    for case in CONTRACT:
        if case.state not in ("traced", "opaque"):
            continue
        _, arguments = case.make()
        if not all(isinstance(a, Tensor) and a.dtype == torch.float32 and a.ndim == 1 for a in arguments):
            continue
        piece = functools.partial(_of_case, case)
        if _is_elementwise(piece):
            found[f"contract: {case.point}"] = piece
    return found


def _of_case(case: Any) -> nn.Module:
    program, arguments = case.make()
    return Applied(program, len(arguments) - 1)


def _is_elementwise(piece: Piece) -> bool:
    """Whether a piece can be trained in eager PyTorch, on rows of several shapes."""
    try:
        with torch.random.fork_rng():
            return all(_keeps_shape(piece, shape) for shape in ((2, WIDTH), (2, 3, WIDTH)))
    except Exception:  # whatever a Function that is made for something else raises
        return False


def _keeps_shape(piece: Piece, shape: tuple[int, ...]) -> bool:
    x = torch.rand(shape).requires_grad_()
    output = piece()(x * 1)
    output.sum().backward()
    return output.shape == x.shape and bool(output.isfinite().all())


# Functions of two operations of the database.


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of the database on a sample of its own, which a tensor scales; one number comes out."""

    operator: Any

    @functools.cached_property
    def sample(self) -> Any:
        """The first of a few samples that has a tensor."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            samples = itertools.islice(self.operator.sample_inputs("cpu", torch.float32, requires_grad=False), 3)
            return next(s for s in samples if isinstance(s.input, Tensor) and s.input.numel())

    def __call__(self, x: Tensor) -> Tensor:
        scaled = self.sample.input * (x.mean() + 0.5)
        output = self.operator.op(scaled, *self.sample.args, **self.sample.kwargs)
        return torch.tanh(next(t for t in _tensors(output) if t.is_floating_point()).mean())


def _operations() -> dict[str, Operation]:
    from torch.testing._internal.common_methods_invocations import op_db  # needs the package expecttest

    known = [o for o in op_db if o.supports_autograd and torch.float32 in o.supported_dtypes("cpu")]
    return {o.name: Operation(o) for o in known if not any(word in o.name for word in WITHOUT_VALUES)}


WITHOUT_VALUES = (
    "empty",
    "bernoulli",
    "rand",
    "dropout",
    "normal",
    "multinomial",
    "fractional",
    "cauchy",
    "exponential",
)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for item in tree if isinstance(tree, tuple | list) else ():
        yield from _tensors(item)


def _function_of(forward: Operation, backward: Operation) -> Any:
    """A Function with one operation in its forward, another in its backward, which is the derivative of nothing."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * (1.5 + forward(x.sigmoid().float()))

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (2.5 + backward(x.sigmoid().float()))

    return Pair


@functools.cache
def _is_usable(name: str) -> bool:
    """Whether Functions are made of an operation: it can be called so, and draws no random numbers."""
    operation = OPERATIONS()[name]
    if not _is_elementwise(lambda: _pair(operation, operation)):
        return False
    state = torch.get_rng_state()
    operation(torch.full((2,), 0.5))
    return bool((torch.get_rng_state() == state).all())


def _pair(forward: Operation, backward: Operation) -> nn.Module:
    return Applied(_function_of(forward, backward).apply)


OPERATIONS = functools.cache(_operations)


@functools.cache
def FUNCTIONS() -> dict[str, Piece]:
    """Functions that somebody wrote. Finding them draws random numbers, and the program that asks first has its own."""
    with torch.random.fork_rng():
        return {**EXAMPLES, **_contract()}


# Modules of PyTorch's.


class Attention(nn.Module):
    """Attention of the rows of a batch to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(-1, x.shape[-2], 3, WIDTH).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v).reshape(x.shape)


class Batched(nn.Module):
    """A batch norm, with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, WIDTH)).reshape(x.shape)


MODULES: dict[str, Piece] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "GELU": nn.GELU,
    "Tanh": nn.Tanh,
    "Sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)),
    "Attention": Attention,
    "BatchNorm1d": Batched,
}

# What stands around a piece.
AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "": lambda piece, x: piece(x),
    "residual": lambda piece, x: x + piece(x),
    "twice": lambda piece, x: piece(piece(x) * 0.5),
    "checkpoint": lambda piece, x: checkpoint(piece, x, use_reentrant=False),
    "checkpoint, reentrant": lambda piece, x: checkpoint(piece, x, use_reentrant=True),
    "no_grad": lambda piece, x: _without_grad(piece, x),
    "autocast": lambda piece, x: _under_autocast(piece, x),
    "bfloat16": lambda piece, x: piece(x.bfloat16().to(x.dtype)),
    "detached": lambda piece, x: x * piece(x.detach()).sigmoid(),
    "in place": lambda piece, x: (piece(x) * 1).mul_(0.5),
}


def _without_grad(piece: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = piece(x)
    return x * gate.sigmoid()


def _under_autocast(piece: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = piece(x)
    return output.to(x.dtype)


# Programs.


@dataclass(frozen=True)
class Recipe:
    """A program, its data and how it is trained.

    Attributes:
        seed: of its parameters and data.
        blocks: pieces, by name, and what stands around each.
        shapes: of the batches, without the width.
        dtypes: of the batches.
        optimizer: which.
        accumulate: how many backwards make a step.
        clip: whether gradients are clipped.
        evaluated: whether it runs without gradients between steps, too.
    """

    seed: int
    blocks: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    optimizer: str
    accumulate: int
    clip: bool
    evaluated: bool


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-2),
}


def drawn(seed: int) -> Recipe:
    """The program of a seed."""
    chance = random.Random(seed)
    blocks = [(_drawn_piece(chance), chance.choice(list(AROUND))) for _ in range(chance.randint(2, 5))]
    # a compiled checkpoint updates running statistics once, an eager one twice (docs/reference/contract.md)
    blocks = [(p, "" if p == "BatchNorm1d" and a.startswith("checkpoint") else a) for p, a in blocks]
    shapes = [(chance.randint(2, 4),) * chance.randint(1, 2) for _ in range(STEPS)]
    return Recipe(
        seed=seed,
        blocks=tuple(blocks),
        shapes=tuple(shapes if chance.random() < 0.5 else shapes[:1]),
        dtypes=chance.choice([(torch.float32,), (torch.float32,), (torch.float32, torch.float64)]),
        optimizer=chance.choice(list(OPTIMIZERS)),
        accumulate=chance.choice([1, 1, 2]),
        clip=chance.random() < 0.5,
        evaluated=chance.random() < 0.3,
    )


def _drawn_piece(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(list(MODULES))
    if kind < 0.7:
        return chance.choice(list(FUNCTIONS()))
    return f"{_drawn_operation(chance)} / {_drawn_operation(chance)}"


def _drawn_operation(chance: random.Random) -> str:
    names = list(OPERATIONS())
    return next(name for name in iter(lambda: chance.choice(names), None) if _is_usable(name))


def piece_of(name: str) -> nn.Module:
    """A piece by its name, new."""
    if name in MODULES:
        return MODULES[name]()
    if name in FUNCTIONS():
        return FUNCTIONS()[name]()
    forward, backward = name.split(" / ")
    return _pair(OPERATIONS()[forward], OPERATIONS()[backward])


class Composed(nn.Module):
    """The program of a recipe: a module that returns rows and a loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList(piece_of(name) for name, _ in recipe.blocks)
        self.around = [AROUND[around] for _, around in recipe.blocks]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x.to(self.first.weight.dtype))
        for piece, around in zip(self.pieces, self.around, strict=True):
            x = around(piece, torch.tanh(x))
        return x, (x - 0.25).square().mean()


def batches(recipe: Recipe) -> Iterator[Tensor]:
    """The data of a recipe."""
    generator = torch.Generator().manual_seed(recipe.seed)
    shapes, dtypes = itertools.cycle(recipe.shapes), itertools.cycle(recipe.dtypes)
    for _ in range(STEPS * recipe.accumulate):
        yield torch.randn((*next(shapes), WIDTH), generator=generator).to(next(dtypes))


def trained(recipe: Recipe, compiler: Callable[[nn.Module], Any]) -> dict[str, Tensor | None]:
    """What three steps of training leave, by name."""
    model = Composed(recipe)
    program = compiler(model)
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    seen: dict[str, Tensor | None] = {}
    for i, x in enumerate(batches(recipe)):
        x.requires_grad_(i == 0)
        rows, loss = program(x)
        loss.backward()
        seen.update({f"rows {i}": rows.detach().clone(), f"loss {i}": loss.detach(), f"gradient of batch {i}": x.grad})
        if (i + 1) % recipe.accumulate:
            continue
        for name, parameter in model.named_parameters():
            seen[f"gradient {i} of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.evaluated:
            with torch.no_grad():
                seen[f"evaluated {i}"] = program(x.detach())[1]
    return {**seen, **{f"{name} at the end": t.detach() for name, t in model.state_dict().items()}}


def difference(recipe: Recipe, way: str) -> str | None:
    """How a program that is compiled in one of the ``WAYS`` differs from eager PyTorch; None if it does not.

    Raises:
        HookError: if hookkit refuses it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(recipe, lambda model: model)
        compiler = thunder.dynamo.thunderfx if way == "thunderfx" else thunder.jit
        torch._dynamo.reset()
        with contextlib.ExitStack() as scope:
            if way in ("opaque", "region"):
                scope.enter_context(hookkit.use(mode=way))
            found = trained(recipe, compiler)
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        return "gradients are switched off afterwards"
    rough = any(around == "autocast" for _, around in recipe.blocks)
    for name, wanted in expected.items():
        got = found[name]
        if (got is None) != (wanted is None):
            return f"{name}: {'None' if wanted is None else 'a tensor'} in eager PyTorch only"
        if got is None or wanted is None:
            continue
        tolerance = 5e-2 if rough else 5e-3
        # gradients that are wrong on purpose make much of the last bit, in small numbers beside large ones first
        absolute = tolerance * max(1.0, float(wanted.abs().max())) if wanted.numel() else 0.0
        try:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=absolute, equal_nan=True)
        except AssertionError as error:
            return f"{name}: {' '.join(str(error).split())}"
    return None


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """The programs that are a little smaller than one."""
    for i, (piece, around) in enumerate(recipe.blocks):
        yield replace(recipe, blocks=recipe.blocks[:i] + recipe.blocks[i + 1 :])
        if around:
            yield replace(recipe, blocks=(*recipe.blocks[:i], (piece, ""), *recipe.blocks[i + 1 :]))
    if len(recipe.shapes) > 1:
        yield replace(recipe, shapes=recipe.shapes[:1])
    if len(recipe.dtypes) > 1:
        yield replace(recipe, dtypes=recipe.dtypes[:1])
    for name, plain in (("accumulate", 1), ("clip", False), ("evaluated", False), ("optimizer", "SGD")):
        if getattr(recipe, name) != plain:
            yield replace(recipe, **{name: plain})
