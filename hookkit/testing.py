"""Checks for authors of rules and of autograd Functions: eager PyTorch against the program that thunder compiles."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import thunder
import torch

from hookkit.errors import HookError
from hookkit.rule import Rule, rule, use
from hookkit.targets import CallableTarget, FunctionTarget, NameTarget

__all__ = ["Check", "CheckResult", "assert_same", "check_rule"]


@attrs.frozen
class Check:
    """One named check.

    Attributes:
        name: what was checked.
        passed: whether it holds; None if it does not apply to these arguments.
        detail: what differs where, or why it does not apply.
    """

    name: str
    passed: bool | None
    detail: str = ""


@attrs.frozen
class CheckResult:
    """What :func:`check_rule` found; true if no check failed."""

    subject: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(c.passed is not False for c in self.checks)

    def __str__(self) -> str:
        words = {True: "ok", False: "FAILED", None: "-"}
        width = max(len(c.name) for c in self.checks)
        lines = [f"{c.name:<{width}}  {words[c.passed]:<6}  {c.detail}".rstrip() for c in self.checks]
        return "\n".join([self.subject, *lines])

    def __repr__(self) -> str:
        return str(self)


@attrs.frozen
class Observation:
    """What a program gives: its output, the gradients of its inputs, and its inputs afterwards."""

    output: Any
    gradients: list[torch.Tensor | None]
    inputs: list[Any]


Cotangent = Callable[[torch.Tensor], torch.Tensor]


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
        AssertionError: at the first difference; it says where.

    Example:
        >>> import hookkit.testing, torch
        >>> jitted = hookkit.testing.assert_same(torch.sin, torch.randn(3, requires_grad=True))
    """
    compiled = jit(function)
    for call in range(calls):
        given = _with_other_values(args, call)
        difference = _difference(_observe(reference or function, given), _observe(compiled, given))
        assert difference is None, f"call {call + 1}: {difference}"
    return compiled


def check_rule(subject: Any, *args: Any, **kwargs: Any) -> CheckResult:
    """Check a rule, or an autograd Function, on example arguments.

    Every check can fail by itself; the result, a table, says what differs where. Where a rule stands for a function of
    which PyTorch knows the gradient, the rule's gradient is compared with that.

    Args:
        subject: a :class:`hookkit.Rule` with a callable, Function or name as target, or a subclass of
            ``torch.autograd.Function``.
        *args: example arguments; floating-point tensors that require grad are differentiated. With float64 tensors the
            gradient is compared with finite differences, too.
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
    callee = _callee(subject)

    def program(*given: Any) -> Any:
        return callee(*given, **kwargs)

    scope = use(subject) if isinstance(subject, Rule) else contextlib.nullcontext()
    checks: list[Check] = []
    values = list(_fresh(args))
    if not any(t.requires_grad for t in _tensors(program(*values))) and any(t.requires_grad for t in _tensors(values)):
        checks.append(_gradcheck(program, args, scope))
        checks.append(Check("gradients", None, "eager gives none; finite differences alone tell, with float64 tensors"))
        args = tuple(_without_gradients(args))
        scope = use(subject) if isinstance(subject, Rule) else contextlib.nullcontext()
    with scope:
        checks.append(_compare("output and gradients", program, args))
        checks.append(_compare("other values", program, _with_other_values(args, 1)))
        if all(c.name != "finite differences" for c in checks):
            checks.append(_gradcheck(program, args))
        checks.append(_every_mask(program, args))
        checks.append(_each_output_alone(program, args))
        checks.append(_compare("expanded gradients", program, args, cotangent=_expanded))
        checks.append(_compare("non-contiguous gradients", program, args, cotangent=_non_contiguous))
        checks.append(_under("no_grad", program, args, torch.no_grad))
        checks.append(_under("autocast", program, args, lambda: torch.autocast("cpu", torch.bfloat16)))
        checks.append(_opaque(subject, program, args))
        checks.append(_meta(subject, program, args))
        checks.append(_errors(callee))
    name = subject.name if isinstance(subject, Rule) else subject.__name__
    return CheckResult(f"check of {name}", tuple(checks))


def _callee(subject: Any) -> Callable[..., Any]:
    if isinstance(subject, type) and issubclass(subject, torch.autograd.Function):
        return subject.apply
    if isinstance(subject, Rule):
        for target in subject.targets:
            found = target.resolve() if isinstance(target, NameTarget) else target
            if isinstance(found, FunctionTarget) and found.function is not torch.autograd.Function:
                return found.function.apply  # type: ignore[no-any-return]
            if isinstance(found, CallableTarget):
                return found.callable
    raise HookError(
        f"check_rule takes a rule for a callable, a Function or a name that is imported, or a subclass of "
        f"torch.autograd.Function; got {subject!r}"
    )


# ------------------------------------------------------------------------------------------------------- the checks


def _compare(name: str, program: Callable[..., Any], args: Sequence[Any], cotangent: Cotangent | None = None) -> Check:
    return _attempt(
        name,
        lambda: _difference(_observe(program, args, cotangent), _observe(thunder.jit(program), args, cotangent)),
    )


def _attempt(name: str, compare: Callable[[], str | None]) -> Check:
    """Run a comparison; an exception is a failed check."""
    try:
        difference = compare()
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {_first_line(error)}")
    return Check(name, difference is None, difference or "")


def _gradcheck(program: Callable[..., Any], args: Sequence[Any], scope: Any = None) -> Check:
    name = "finite differences"
    tracked = [a for a in _tensors(args) if a.requires_grad]
    if not tracked or any(a.dtype not in (torch.float64, torch.complex128) for a in tracked):
        return Check(name, None, "needs float64 tensors that require grad")
    jitted = thunder.jit(program)

    def differentiable(*given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in _tensors(jitted(*given)) if t.requires_grad)

    def compare() -> str | None:
        try:
            torch.autograd.gradcheck(differentiable, tuple(_fresh(args)), check_undefined_grad=False)
        except RuntimeError as error:  # torch's GradcheckError among them
            return _first_line(error)
        return None

    with scope or contextlib.nullcontext():
        return _attempt(name, compare)


def _without_gradients(args: Sequence[Any]) -> Iterator[Any]:
    for value in _fresh(args):
        for tensor in _tensors(value):
            tensor.requires_grad_(False)
        yield value


def _every_mask(program: Callable[..., Any], args: Sequence[Any]) -> Check:
    name = "every choice of inputs that need a gradient"
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if len(places) < 2:
        return Check(name, None, "needs two tensors that require grad")

    def compare() -> str | None:
        for mask in itertools.product((True, False), repeat=len(places)):
            given = list(_fresh(args))
            for place, needed in zip(places, mask, strict=True):
                given[place] = given[place].detach().requires_grad_(needed)
            difference = _difference(_observe(program, given), _observe(thunder.jit(program), given))
            if difference:
                return f"for {dict(zip(places, mask, strict=True))}: {difference}"
        return None

    return _attempt(name, compare)


def _each_output_alone(program: Callable[..., Any], args: Sequence[Any]) -> Check:
    name = "each output alone"
    count = sum(t.requires_grad for t in _tensors(program(*_fresh(args))))
    if count < 2:
        return Check(name, None, "needs two outputs that require grad")

    def compare() -> str | None:
        for used in range(count):
            eager = _observe(program, args, used=used)
            difference = _difference(eager, _observe(thunder.jit(program), args, used=used))
            if difference:
                return f"output {used} alone: {difference}"
        return None

    return _attempt(name, compare)


def _under(name: str, program: Callable[..., Any], args: Sequence[Any], context: Callable[[], Any]) -> Check:
    def inside(*given: Any) -> Any:
        with context():
            return program(*given)

    def compare() -> str | None:
        jitted = thunder.jit(program)

        def outside(*given: Any) -> Any:
            with context():
                return jitted(*given)

        return _difference(_observe(inside, args), _observe(outside, args))

    return _attempt(name, compare)


def _opaque(subject: Any, program: Callable[..., Any], args: Sequence[Any]) -> Check:
    name = "opaque"
    if not isinstance(subject, Rule):
        opaque = rule(subject, mode="opaque", register=False)
    elif subject.mode == "opaque" or subject.forward is None:
        return Check(name, None, "the rule is opaque")
    else:
        opaque = subject.as_opaque()

    def compare() -> str | None:
        without = [subject] if isinstance(subject, Rule) else []
        with use(opaque, without=without):
            return _difference(_observe(program, args), _observe(thunder.jit(program), args))

    return _attempt(name, compare)


def _meta(subject: Any, program: Callable[..., Any], args: Sequence[Any]) -> Check:
    name = "meta function"
    if not isinstance(subject, Rule) or subject.meta_provider is None:
        return Check(name, None, "there is none")
    opaque = subject.as_opaque()

    def compare() -> str | None:
        with use(opaque, without=[subject]):
            thunder.jit(program)(*_fresh(args))  # a MetaError says what differs
        return None

    return _attempt(name, compare)


def _errors(callee: Callable[..., Any]) -> Check:
    name = "a call that cannot be bound"

    def misuse() -> Any:
        return callee(no_such_argument=1)

    def compare() -> str | None:
        eager, jitted = _raised(misuse), _raised(thunder.jit(misuse))
        return None if eager is jitted else f"eager raises {_name(eager)}, compiled {_name(jitted)}"

    return _attempt(name, compare)


def _raised(function: Callable[[], Any]) -> type[BaseException] | None:
    try:
        function()
    except Exception as error:
        return type(error)
    return None


def _name(kind: type[BaseException] | None) -> str:
    return kind.__name__ if kind is not None else "nothing"


# --------------------------------------------------------------------------------------------- running and comparing


def _observe(
    function: Callable[..., Any], args: Sequence[Any], cotangent: Cotangent | None = None, used: int | None = None
) -> Observation:
    given = list(_fresh(args))
    output = function(*given)
    roots = [t for t in _tensors(output) if t.requires_grad]
    if used is not None:
        roots = roots[used : used + 1]
    if roots:
        torch.autograd.backward(roots, [(cotangent or _uneven)(r) for r in roots])
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    leaves = [t for t in _tensors(given) if t.is_leaf and t.requires_grad] + parameters
    gradients = [None if t.grad is None else t.grad.detach().clone() for t in leaves]
    for parameter in parameters:
        parameter.grad = None
    return Observation(output, gradients, [t.detach() for t in _tensors(given)])


def _difference(eager: Observation, compiled: Observation) -> str | None:
    """The first difference, in words."""
    structure = _structure(eager.output), _structure(compiled.output)
    if structure[0] != structure[1]:
        return f"output: eager gives {structure[0]}, compiled {structure[1]}"
    pairs = [
        *_labelled("output", list(_tensors(eager.output)), list(_tensors(compiled.output))),
        *_labelled("input after the call", eager.inputs, compiled.inputs),
        *_labelled("gradient of input", eager.gradients, compiled.gradients),
    ]
    for label, wanted, got in pairs:
        if (wanted is None) != (got is None):
            return f"{label}: eager gives {'None' if wanted is None else 'a tensor'}, compiled the other"
        if wanted is not None and got is not None:
            try:
                torch.testing.assert_close(got, wanted, equal_nan=True)
            except AssertionError as error:
                return f"{label}: {_first_line(error)}"
    return None


def _labelled(label: str, wanted: list[Any], got: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        yield f"{label} {index}", a, b


def _structure(tree: Any) -> Any:
    """A tree with a tensor's dtype, shape, and whether it requires grad, in its place."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape), "requires grad" if tree.requires_grad else "no grad")
    if isinstance(tree, dict):
        return {k: _structure(v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return (type(tree).__name__, [_structure(v) for v in tree])
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def _fresh(args: Sequence[Any]) -> Iterator[Any]:
    """Arguments of one's own: leaves with the same values."""
    for value in args:
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone(memory_format=torch.preserve_format)
            yield copy.requires_grad_(value.requires_grad)
        elif isinstance(value, tuple | list):
            yield type(value)(_fresh(value))
        elif isinstance(value, dict):
            yield dict(zip(value, _fresh(list(value.values())), strict=True))
        else:
            yield value


def _with_other_values(args: Sequence[Any], call: int) -> list[Any]:
    """Arguments with slightly other floating-point values, so that they stay in a function's domain."""
    given = list(_fresh(args))
    if call:
        with torch.no_grad():
            for tensor in _tensors(given):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.mul_(1 + 0.125 * call)
    return given


def _uneven(output: torch.Tensor) -> torch.Tensor:
    """An output gradient whose elements differ."""
    steps = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
    return steps.reshape(output.shape).to(output.dtype)


def _expanded(output: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)


def _non_contiguous(output: torch.Tensor) -> torch.Tensor:
    doubled = torch.repeat_interleave(_uneven(output).unsqueeze(-1), 2, dim=-1)
    return doubled[..., 0]


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else ""
