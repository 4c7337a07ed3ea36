"""Checks for authors of rules and of autograd Functions: eager PyTorch against the program that thunder compiles.

What is checked is in ``hookkit.checks``, how two programs are compared in ``hookkit.comparison``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import thunder
import torch

from hookkit.checks import CHECKS, Case, Check
from hookkit.comparison import (
    difference_between,
    first_line,
    fresh,
    named_tensors,
    observe,
    tensors_of,
    uneven,
    with_other_values,
)
from hookkit.diagnosis import Providers, factor_between, numeric_gradient
from hookkit.rule import Rule
from hookkit.scopes import use

__all__ = ["CHECKS", "Check", "CheckResult", "assert_same", "check_rule", "run_check"]


@attrs.frozen
class CheckResult:
    """What :func:`check_rule` found; true if no check failed.

    Attributes:
        subject: what was checked.
        checks: each check.
        diagnosis: what is wrong, in one sentence or more; empty if no check failed.
    """

    subject: str
    checks: tuple[Check, ...]
    diagnosis: str = ""

    def __bool__(self) -> bool:
        return all(c.passed is not False for c in self.checks)

    def __str__(self) -> str:
        words = {True: "ok", False: "FAILED", None: "-"}
        width = max(len(c.name) for c in self.checks)
        lines = [f"{c.name:<{width}}  {words[c.passed]:<6}  {c.detail}".rstrip() for c in self.checks]
        verdict = "ok" if self else f"FAILED: {self.diagnosis}"
        return "\n".join([f"{self.subject}: {verdict}", *lines])

    def __repr__(self) -> str:
        return str(self)


class Difference(AssertionError):
    """A compiled program differs from the eager one; not an assertion of thunder's or of the program's own."""


def assert_same(
    function: Callable[..., Any],
    *args: Any,
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = thunder.jit,
    reference: Callable[..., Any] | None = None,
    calls: int = 2,
) -> Callable[..., Any]:
    """Compare a program that thunder compiles with the eager one.

    Compared are values, dtypes, structure and ``requires_grad`` of the output, every gradient, including which are
    None, and what the program changed in its inputs. From the second call on floating-point inputs have other values,
    so that what is baked into a trace is found.

    Args:
        function: the program; a function or module.
        *args: its arguments; tensors that require grad get gradients.
        jit: what compiles it.
        reference: what is run eagerly, if it is not the program itself.
        calls: how often both are called.

    Returns:
        The compiled program.

    Raises:
        AssertionError: at the first difference; it says where (a `Difference`).

    Example:
        >>> import hookkit.testing, torch
        >>> jitted = hookkit.testing.assert_same(torch.sin, torch.randn(3, requires_grad=True))
    """
    compiled = jit(function)
    for call in range(calls):
        given = with_other_values(args, call)
        expected = observe(reference or function, given)
        difference = difference_between(expected, observe(compiled, given, module=function))
        if difference is not None:
            raise Difference(f"call {call + 1}: {difference}")
    return compiled


def check_rule(subject: Any, *args: Any, **kwargs: Any) -> CheckResult:
    """Check a rule, or an autograd Function, on example arguments.

    Every check can fail by itself; the result says first what is wrong, and then, in a table, what differs where.
    Where a rule stands for a function of which PyTorch knows the gradient, the rule's gradient is compared with that.
    It fails, too, if the rule does not take the call: because it declines these arguments, or another one comes first.

    Args:
        subject: a :class:`hookkit.Rule` with a callable, Function or name as target, what
            :func:`hookkit.custom_gradient` returned, or a subclass of ``torch.autograd.Function``.
        *args: example arguments; floating-point tensors that require grad are differentiated. With float64 tensors the
            gradient is compared with finite differences, too, and the second derivative with those of the gradient.
        **kwargs: example keyword arguments.

    Returns:
        The result; use it as ``assert check_rule(...)``.

    Raises:
        HookError: if the rule has no target that can be called.

    Example:
        >>> import hookkit.testing, torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> assert hookkit.testing.check_rule(Double, torch.randn(3, dtype=torch.float64, requires_grad=True))
    """
    case = Case.of(subject, args, kwargs)
    name = subject.name if isinstance(subject, Rule) else subject.__name__
    checks = tuple(map(case.run, CHECKS))
    failed = [c for c in checks if c.passed is False]
    return CheckResult(f"check of {name}", checks, _diagnosis(case, failed) if failed else "")


def run_check(name: str, subject: Any, *args: Any, **kwargs: Any) -> Check:
    """Make one check alone.

    Args:
        name: its name in a :class:`CheckResult`; they are the keys of ``CHECKS``.
        subject: as for :func:`check_rule`.
        *args: example arguments.
        **kwargs: example keyword arguments.

    Returns:
        What was found.

    Raises:
        KeyError: if there is no check of that name.
        HookError: if the rule has no target that can be called.

    Example:
        >>> import hookkit.testing, torch
        >>> rule = hookkit.rule(torch.sinc, mode="opaque", register=False)
        >>> assert hookkit.testing.run_check("autocast", rule, torch.ones(3, requires_grad=True)).passed
    """
    return Case.of(subject, args, kwargs).run(name)


def _diagnosis(case: Case, failed: list[Check]) -> str:
    """What is wrong, as its author would say it: the first cause that explains what failed."""
    first = failed[0]
    if first.name == "the rule takes the call" or case.rule is None:
        return f"{first.name}: {first.detail}"
    found: list[str] = []
    try:
        found.extend(_faults(case))
    except Exception as error:
        found = found or [f"run by themselves its providers raise {type(error).__name__}: {first_line(error)}"]
    return "; ".join([*found, f"{first.name}: {first.detail}"])


def _faults(case: Case) -> Iterator[str]:
    assert case.rule is not None
    if case.rule.forward is None or case.rule.backward_provider is None or not case.has_gradients():
        return
    given = list(fresh(case.given))
    count = len(given) - len(case.keywords)
    kwargs = dict(zip(case.keywords, given[count:], strict=True))
    faults = list(Providers(case.rule, case.callee, given[:count], kwargs).faults())
    yield from faults or _wrong_gradients(case)


def _wrong_gradients(case: Case) -> Iterator[str]:
    """For each argument by how much its gradient is wrong: the rule's beside that of finite differences."""
    given = list(fresh(case.given))
    with use(case.rule) if case.rule else contextlib.nullcontext():
        analytic = observe(thunder.jit(case.program), given, names=case.names).gradients

    def weighted(*values: Any) -> float:
        with torch.no_grad():
            outputs = [o for o in tensors_of(case.program(*values)) if o.is_floating_point()]
            return sum(float((o * uneven(o)).sum()) for o in outputs)

    for name, tensor in named_tensors(given, case.names):
        got = analytic.get(name)
        numeric = numeric_gradient(weighted, given, tensor) if tensor.requires_grad else None
        if got is None or numeric is None or torch.allclose(got, numeric, rtol=1e-3, atol=1e-5, equal_nan=True):
            continue
        factor = factor_between(got, numeric)
        times = f", {factor:.4g} times the right one" if factor is not None else ""
        place = int((got - numeric).abs().flatten().argmax())
        yield (
            f"the gradient of {name!r} is wrong{times}: at element {place} the rule gives "
            f"{got.flatten()[place]:.6g}, finite differences {numeric.flatten()[place]:.6g}"
        )
