"""What is wrong with a rule, as its author would say it: who takes its calls, and what its providers return.

``hookkit.testing`` compares a compiled program with the eager one, and asks here when they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from hookkit.call import Call
from hookkit.engine.dispatch.inspection import acquire, with_depth
from hookkit.residuals import Residuals
from hookkit.rule import Rule
from hookkit.targets import NameTarget, place_of, signature_of

__all__ = ["Providers", "argument_names", "factor_between", "numeric_gradient", "why_not_taken"]


def why_not_taken(rule: Rule[..., Any], program: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Why a program that calls a rule's target is not taken over by the rule; None if it is."""
    acquired = acquire(program, tuple(args), {})
    records = [record for record, _ in with_depth(acquired.calls)]
    if any(record.rule is rule for record in records):
        return None
    for record in records:
        for candidate in record.candidates:
            if candidate.rule is rule and candidate.declined is not None:
                return f"the rule declined {record.name}() for these arguments: {candidate.declined}"
        if record.rule is not None and any(c.rule is rule for c in record.candidates):
            first = record.rule
            return (
                f"the rule {first.name}, declared at {first.declared_at}, took {record.name}(): it comes first "
                f"(priority {first.priority}, this rule's is {rule.priority})"
            )
    for target in rule.targets:
        if isinstance(target, NameTarget) and target.state != "resolved":
            return f"its target {target} stands for nothing yet: {target.state}"
    missed = [str(form) for form in acquired.missed if form.rule is rule]
    if missed:
        return missed[0]
    stopped = f"; tracing stopped with {type(acquired.error).__name__}: {acquired.error}" if acquired.error else ""
    taken = ", ".join(f"{r.name}() by {r.rule.name}" for r in records if r.rule is not None)
    return f"no call was given to the rule{f' (taken were {taken})' if taken else ''}{stopped}"


def argument_names(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """A name for each argument, those by keyword last."""
    signature = signature_of(function)
    names = [f"argument {i}" for i in range(len(args))]
    if signature is not None:
        place = 0
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names[place:] = [f"{parameter.name}[{i}]" for i in range(len(args) - place)]
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and place < len(args):
                names[place] = parameter.name
                place += 1
    return [*names, *kwargs]


def factor_between(got: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """The one number, other than 1, that a tensor is a multiple of another by; None if there is none."""
    if got.shape != wanted.shape or got.is_complex() or wanted.is_complex():
        return None
    got, wanted = got.detach().double(), wanted.detach().double()
    used = wanted.abs() > 1e-8
    if not bool(used.any()):
        return None
    factor = float((got[used] / wanted[used]).median())
    is_one = abs(factor - 1) < 1e-3
    return None if is_one or not torch.allclose(got, factor * wanted, rtol=1e-3, atol=1e-6) else factor


def numeric_gradient(function: Callable[..., Any], values: list[Any], place: torch.Tensor, most: int = 64) -> Any:
    """The gradient of the sum of a function's weighted outputs by a tensor among its values, by finite differences.

    Args:
        function: takes the values, and returns a number.
        values: its arguments.
        place: the float64 tensor among them, or in a container among them, which is changed and restored.
        most: of how many elements; None if there are more.
    """
    if place.dtype != torch.float64 or place.numel() > most:
        return None
    found = torch.zeros_like(place)
    flat, out = place.detach().view(-1), found.view(-1)
    for i in range(flat.numel()):
        here, step = float(flat[i]), 1e-6
        flat[i] = here + step
        above = function(*values)
        flat[i] = here - step
        out[i] = (above - function(*values)) / (2 * step)
        flat[i] = here
    return found


@attrs.frozen
class Providers:
    """A rule's providers, run eagerly and by themselves.

    Attributes:
        rule: the rule; it has a forward and a backward provider.
        callee: what it stands for.
        args: the positional arguments of a call.
        kwargs: the keyword arguments.
    """

    rule: Rule[..., Any]
    callee: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def faults(self) -> Iterator[str]:
        """What is wrong with the backward provider, judged by what it returns."""
        forward, backward = self.rule.forward, self.rule.backward_provider
        assert forward is not None and backward is not None
        call = Call(self.callee, None, tuple(self.args), self.kwargs)
        leading = (call,) if self.rule.pass_call else ()
        with torch.no_grad():
            returned = forward(*leading, *self.args, **self.kwargs)
        output, saved = returned if _has_residuals(returned) else (returned, Residuals({}))
        names = argument_names(forward, (*leading, *self.args), self.kwargs)[len(leading) :]
        given = dict(zip(names, (*self.args, *self.kwargs.values()), strict=True))
        wanted = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        saved.__dict__["needs"] = {n: n in wanted for n in given}
        outputs = output if type(output) is tuple else (output,)

        def gradients(scale: float) -> Any:
            cotangents = [_scaled(o, scale) for o in outputs]
            with torch.no_grad():
                return backward(*leading, saved, *cotangents)

        once, twice = gradients(1.0), gradients(2.0)
        where = f"the backward provider ({place_of(backward)})"
        if once is None:
            yield f"{where} returns None: is its return statement missing?"
            return
        if not isinstance(once, dict):
            once, twice = dict(zip(names, _row(once), strict=False)), dict(zip(names, _row(twice), strict=False))
        for name, value in wanted.items():
            gradient = once.get(name)
            if gradient is None:
                yield f"{where} returns no entry for {name!r}, which requires grad"
            elif not isinstance(gradient, torch.Tensor):
                yield f"{where} returns {type(gradient).__name__} for {name!r}, and not a tensor"
            elif not torch.allclose(twice[name], 2 * gradient, rtol=1e-3, atol=1e-6, equal_nan=True):
                yield f"{where} returns for {name!r} what does not scale with the output gradient: multiply by it"
            elif gradient.shape != value.shape and gradient.dim() < value.dim():
                yield f"{where} returns shape {list(gradient.shape)} for {name!r}, whose shape is {list(value.shape)}"


def _has_residuals(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Residuals)


def _row(gradients: Any) -> tuple[Any, ...]:
    return tuple(gradients) if isinstance(gradients, tuple | list) else (gradients,)


def _scaled(output: Any, scale: float) -> Any:
    if isinstance(output, torch.Tensor):
        return torch.full_like(output, scale)
    if isinstance(output, tuple | list):
        return type(output)(_scaled(o, scale) for o in output)
    return None
