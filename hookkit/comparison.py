"""Running a program on arguments of its own, and comparing what a compiled one gives with what the eager one gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from hookkit.diagnosis import factor_between

__all__ = [
    "Cotangent",
    "Observation",
    "difference_between",
    "expanded",
    "first_line",
    "fresh",
    "named_tensors",
    "non_contiguous",
    "observe",
    "structure_of",
    "tensors_of",
    "uneven",
    "with_other_values",
]

Cotangent = Callable[[torch.Tensor], torch.Tensor]


@attrs.frozen
class Observation:
    """What a program gives: its output, the gradients of its inputs, and its inputs afterwards."""

    output: Any
    gradients: dict[str, torch.Tensor | None]
    inputs: dict[str, Any]


def observe(
    function: Callable[..., Any],
    args: Sequence[Any],
    cotangent: Cotangent | None = None,
    used: int | None = None,
    module: Any = None,
    names: Sequence[str] | None = None,
) -> Observation:
    """Call a program and take gradients, also those of the parameters of the module that it is, or is made of."""
    given = list(fresh(args))
    output = function(*given)
    roots = [t for t in tensors_of(output) if t.requires_grad]
    if used is not None:
        roots = roots[used : used + 1]
    if roots:
        torch.autograd.backward(roots, [(cotangent or uneven)(r) for r in roots])
    module = function if module is None else module
    inputs = dict(named_tensors(given, [f"argument {i}" for i in range(len(given))] if names is None else names))
    parameters = {f"{n}.{k}": p for n, m in _modules(module, given, names) for k, p in m.named_parameters()}
    leaves = {n: t for n, t in inputs.items() if t.is_leaf and t.requires_grad} | parameters
    gradients = {n: None if t.grad is None else t.grad.detach().clone() for n, t in leaves.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return Observation(output, gradients, {n: t.detach() for n, t in inputs.items()})


def _modules(module: Any, given: Sequence[Any], names: Sequence[str] | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose parameters get gradients: the program itself, and those among its arguments."""
    labelled = zip(names or [f"argument {i}" for i in range(len(given))], given, strict=True)
    for name, value in (("module", module), *labelled):
        if isinstance(value, torch.nn.Module):
            yield name, value


def named_tensors(given: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in arguments, with the argument's name and the place in it: ``"xs[1]"``."""
    for name, value in zip(names, given, strict=True):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from named_tensors(list(value.values()), [f"{name}[{k!r}]" for k in value])
        elif isinstance(value, tuple | list):
            yield from named_tensors(value, [f"{name}[{i}]" for i in range(len(value))])


def difference_between(eager: Observation, compiled: Observation) -> str | None:
    """The first difference, in words."""
    structure = structure_of(eager.output), structure_of(compiled.output)
    if structure[0] != structure[1]:
        return f"output: eager gives {structure[0]}, compiled {structure[1]}"
    pairs = [
        *_labelled("output", list(tensors_of(eager.output)), list(tensors_of(compiled.output))),
        *((f"{name} after the call", value, compiled.inputs[name]) for name, value in eager.inputs.items()),
        *((f"gradient of {name}", value, compiled.gradients[name]) for name, value in eager.gradients.items()),
    ]
    for label, wanted, got in pairs:
        if (wanted is None) != (got is None):
            kinds = ["None" if value is None else "a tensor" for value in (wanted, got)]
            return f"{label}: {kinds[0]} in eager PyTorch, {kinds[1]} compiled"
        if wanted is not None and got is not None:
            try:
                torch.testing.assert_close(got, wanted, equal_nan=True)
            except AssertionError as error:
                return f"{label}: {first_line(error)}{_comparison(got, wanted)}"
    return None


def _comparison(got: torch.Tensor, wanted: torch.Tensor) -> str:
    factor = factor_between(got, wanted) if got.shape == wanted.shape else None
    if factor is not None:
        return f"; it is {factor:.4g} times what eager PyTorch gives"
    if got.shape != wanted.shape or bool((got == wanted).all()):
        return ""
    differing = (got != wanted).flatten().nonzero()
    place = int(differing[0])
    values = [f"{t.flatten()[place]:.6g}" for t in (wanted, got)]
    return f"; eager PyTorch gives {values[0]} where the compiled program gives {values[1]}"


def _labelled(label: str, wanted: list[Any], got: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        yield f"{label} {index}", a, b


def structure_of(tree: Any) -> Any:
    """A tree with a tensor's dtype, shape, and whether it requires grad, in its place."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape), "requires grad" if tree.requires_grad else "no grad")
    if isinstance(tree, dict):
        return {k: structure_of(v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return (type(tree).__name__, [structure_of(v) for v in tree])
    return tree


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in containers, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)


def fresh(args: Sequence[Any]) -> Iterator[Any]:
    """Arguments of one's own: leaves with the same values."""
    for value in args:
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone(memory_format=torch.preserve_format)
            yield copy.requires_grad_(value.requires_grad)
        elif isinstance(value, tuple | list):
            yield type(value)(fresh(value))
        elif isinstance(value, dict):
            yield dict(zip(value, fresh(list(value.values())), strict=True))
        else:
            yield value


def with_other_values(args: Sequence[Any], call: int) -> list[Any]:
    """Arguments with slightly other floating-point values, so that they stay in a function's domain."""
    given = list(fresh(args))
    if call:
        with torch.no_grad():
            for tensor in tensors_of(given):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.mul_(1 + 0.125 * call)
    return given


def uneven(output: torch.Tensor) -> torch.Tensor:
    """An output gradient whose elements differ."""
    steps = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
    return steps.reshape(output.shape).to(output.dtype)


def expanded(output: torch.Tensor) -> torch.Tensor:
    """An output gradient of ones that is one element in memory."""
    return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)


def non_contiguous(output: torch.Tensor) -> torch.Tensor:
    """An output gradient with gaps in memory."""
    doubled = torch.repeat_interleave(uneven(output).unsqueeze(-1), 2, dim=-1)
    return doubled[..., 0]


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else ""
