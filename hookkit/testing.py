"""Checks for authors of rules and of autograd Functions: eager PyTorch against the program that thunder compiles."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import thunder
import torch

from hookkit.declare import rule
from hookkit.diagnosis import Providers, argument_names, factor_between, numeric_gradient, why_not_taken
from hookkit.errors import HookError
from hookkit.forms import other_forms
from hookkit.registry import rules
from hookkit.rule import Rule
from hookkit.scopes import use
from hookkit.targets import CallableTarget, FunctionTarget, NameTarget, describe_callable

__all__ = ["CHECKS", "Check", "CheckResult", "assert_same", "check_rule", "run_check"]


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


@attrs.frozen
class Observation:
    """What a program gives: its output, the gradients of its inputs, and its inputs afterwards."""

    output: Any
    gradients: dict[str, torch.Tensor | None]
    inputs: dict[str, Any]


class Difference(AssertionError):
    """A compiled program differs from the eager one; not an assertion of thunder's or of the program's own."""


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
        AssertionError: at the first difference; it says where (a `Difference`).

    Example:
        >>> import hookkit.testing, torch
        >>> jitted = hookkit.testing.assert_same(torch.sin, torch.randn(3, requires_grad=True))
    """
    compiled = jit(function)
    for call in range(calls):
        given = _with_other_values(args, call)
        expected = _observe(reference or function, given)
        difference = _difference(expected, _observe(compiled, given, module=function))
        if difference is not None:
            raise Difference(f"call {call + 1}: {difference}")
    return compiled


def check_rule(subject: Any, *args: Any, **kwargs: Any) -> CheckResult:
    """Check a rule, or an autograd Function, on example arguments.

    Every check can fail by itself; the result says first what is wrong, and then, in a table, what differs where.
    Where a rule stands for a function of which PyTorch knows the gradient, the rule's gradient is compared with that.
    It fails, too, if the rule does not take the call: because it declines these arguments, or another one comes first.

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
    case = _Case.of(subject, args, kwargs)
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
    return _Case.of(subject, args, kwargs).run(name)


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


class _DoesNotApply(Exception):
    """A check says nothing of these arguments; the message says why."""


@attrs.frozen
class _Case:
    """What is checked.

    Attributes:
        subject: the rule or Function.
        callee: what it stands for.
        program: calls it; takes the arguments by position, those with keywords last.
        given: the arguments.
        names: a name for each of them.
        args: those that are compared with eager PyTorch; none requires grad if eager gives no gradients.
    """

    subject: Any
    callee: Callable[..., Any]
    program: Callable[..., Any]
    given: Sequence[Any]
    names: Sequence[str]
    args: Sequence[Any]
    keywords: Sequence[str]

    @classmethod
    def of(cls, subject: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Case:
        callee, positional = _callee(subject), len(args)

        def program(*given: Any) -> Any:
            return callee(*given[:positional], **dict(zip(kwargs, given[positional:], strict=True)))

        names = argument_names(_named_arguments(subject, callee), args, kwargs)
        args = [*args, *kwargs.values()]
        values = list(_fresh(args))
        eager_gives_gradients = any(t.requires_grad for t in _tensors(program(*values)))
        compared = args if eager_gives_gradients else list(_without_gradients(args))
        return cls(subject, callee, program, args, names, compared, tuple(kwargs))

    @property
    def rule(self) -> Rule[..., Any] | None:
        return self.subject if isinstance(self.subject, Rule) else None

    def run(self, name: str) -> Check:
        """Make one of the ``CHECKS``; an exception is a failed check."""
        try:
            # a rule that is registered has to take the call by its own standing
            with use(self.rule) if self.rule and self.rule not in rules() else contextlib.nullcontext():
                difference = CHECKS[name](self)
        except _DoesNotApply as reason:
            return Check(name, None, str(reason))
        except Exception as error:
            return Check(name, False, f"{type(error).__name__}: {_first_line(error)}")
        return Check(name, difference is None, difference or "")

    def has_gradients(self) -> bool:
        """Whether there is a backward for some floating-point argument."""
        if self.rule is None and self.subject.backward is torch.autograd.Function.backward:
            return False
        given = list(_fresh(self.given))
        inputs = [t.requires_grad_() for t in _tensors(given) if t.is_floating_point() or t.is_complex()]
        has_backward = self.rule is not None and self.rule.backward_provider is not None
        return bool(inputs) and (has_backward or any(t.requires_grad for t in _tensors(self.program(*given))))

    def compare(self, args: Sequence[Any], cotangent: Cotangent | None = None, used: int | None = None) -> str | None:
        return self.difference(self.program, thunder.jit(self.program), args, cotangent, used)

    def difference(
        self,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        args: Sequence[Any],
        cotangent: Cotangent | None = None,
        used: int | None = None,
    ) -> str | None:
        expected = _observe(eager, args, cotangent, used, names=self.names)
        return _difference(expected, _observe(compiled, args, cotangent, used, names=self.names))


def _named_arguments(subject: Any, callee: Callable[..., Any]) -> Any:
    """What tells the names of the arguments: what is called, or else the forward provider."""
    if isinstance(subject, Rule):
        known = subject.targets[0].signature() is not None or subject.forward is None or subject.pass_call
        return callee if known else subject.forward
    return functools.partial(subject.forward, None)  # without ctx


def _taken(case: _Case) -> str | None:
    """Whether the rule is given the call."""
    if case.rule is None:
        raise _DoesNotApply("it is no rule")
    return why_not_taken(case.rule, case.program, list(_fresh(case.args)))


def _forms(case: _Case) -> str | None:
    """Whether the rule matches its target in every form in which programs write it."""
    targets = [t.callable for t in (case.rule.targets if case.rule else ()) if isinstance(t, CallableTarget)]
    others = {describe_callable(f) for t in targets for f in other_forms(t) if f not in targets}
    if others:
        raise _DoesNotApply(f"not matched: {', '.join(sorted(others))}; hookkit.forms(...) is a target for all")
    if not any(map(other_forms, targets)):
        raise _DoesNotApply("the target has no other form")
    return None


def _numbers(case: _Case) -> str | None:
    """Whether a number that the call is given has an effect: one that is baked in has none."""
    places = list(_numbers_in(case.args))
    if not places:
        raise _DoesNotApply("needs a number among the arguments")
    refused = []
    jitted = thunder.jit(case.program)
    jitted(*_fresh(case.args))
    for place in places:
        others = [list(_with_number(case.args, place, n)) for n in _other_numbers(_at(case.args, place))]
        accepted = [o for o in others if _raised(functools.partial(case.program, *_fresh(o))) is None]
        label = _label(case.names, place)
        if not accepted:
            refused.append(label)
            continue
        difference = case.difference(case.program, jitted, accepted[0])
        if difference:
            return f"for {label}={_at(accepted[0], place)!r} instead of {_at(case.args, place)!r}: {difference}"
    if len(refused) == len(places):
        raise _DoesNotApply(f"eager PyTorch takes no other number for {', '.join(refused)}")
    return None


def _numbers_in(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, bool | int | float):
            yield (*place, key)
        elif isinstance(value, tuple | list | dict):
            yield from _numbers_in(value, (*place, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda held, key: held[key], place, tree)


def _with_number(tree: Any, place: tuple[Any, ...], number: Any) -> Any:
    key, *rest = place
    new = _with_number(tree[key], tuple(rest), number) if rest else number
    if isinstance(tree, dict):
        return {**tree, key: new}
    items = [new if i == key else v for i, v in enumerate(tree)]
    return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)


def _other_numbers(number: Any) -> list[Any]:
    if isinstance(number, bool):
        return [not number]
    if isinstance(number, int):
        return [number + 1, number - 1]
    return [1.125 * number if number else 0.125, 0.875 * number]


def _label(names: Sequence[str], place: tuple[Any, ...]) -> str:
    return str(names[place[0]]) + "".join(f"[{key!r}]" for key in place[1:])


def _inputs(case: _Case) -> str | None:
    """Whether there are gradients to compare, where there could be."""
    if any(t.requires_grad for t in _tensors(case.given)):
        return None
    if not case.has_gradients():
        raise _DoesNotApply("it has no gradient")
    return "no argument requires grad, so that no gradient is compared: pass tensors with requires_grad=True"


def _gradcheck(case: _Case) -> str | None:
    tracked = [a for a in _tensors(case.given) if a.requires_grad]
    if not tracked or any(a.dtype not in (torch.float64, torch.complex128) for a in tracked):
        raise _DoesNotApply("needs float64 tensors that require grad")
    jitted = thunder.jit(case.program)

    def differentiable(*given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in _tensors(jitted(*given)) if t.requires_grad)

    try:
        torch.autograd.gradcheck(differentiable, tuple(_fresh(case.given)), check_undefined_grad=False)
    except RuntimeError as error:  # torch's GradcheckError among them
        return _first_line(error)
    return None


def _without_gradients(args: Sequence[Any]) -> Iterator[Any]:
    for value in _fresh(args):
        for tensor in _tensors(value):
            tensor.requires_grad_(False)
        yield value


def _every_mask(case: _Case) -> str | None:
    places = [i for i, a in enumerate(case.args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if len(places) < 2:
        raise _DoesNotApply("needs two tensors that require grad")
    for mask in itertools.product((True, False), repeat=len(places)):
        given = list(_fresh(case.args))
        for place, needed in zip(places, mask, strict=True):
            given[place] = given[place].detach().requires_grad_(needed)
        difference = case.compare(given)
        if difference:
            return f"for {dict(zip(places, mask, strict=True))}: {difference}"
    return None


def _each_output_alone(case: _Case) -> str | None:
    count = sum(t.requires_grad for t in _tensors(case.program(*_fresh(case.args))))
    if count < 2:
        raise _DoesNotApply("needs two outputs that require grad")
    for used in range(count):
        difference = case.compare(case.args, used=used)
        if difference:
            return f"output {used} alone: {difference}"
    return None


def _under(case: _Case, context: Callable[[], Any]) -> str | None:
    jitted = thunder.jit(case.program)

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with context():
                return function(*given)

        return call

    return case.difference(inside(case.program), inside(jitted), case.args)


def _opaque(case: _Case) -> str | None:
    if case.rule is None:
        opaque = rule(case.subject, mode="opaque", register=False)
    elif case.rule.mode == "opaque" or case.rule.forward is None:
        raise _DoesNotApply("the rule is opaque")
    else:
        opaque = case.rule.as_opaque()
    with use(opaque, without=[case.rule] if case.rule else []):
        return case.compare(case.args)


def _meta(case: _Case) -> str | None:
    if case.rule is None or case.rule.meta_provider is None:
        raise _DoesNotApply("there is none")
    with use(case.rule.as_opaque(), without=[case.rule]):
        thunder.jit(case.program)(*_fresh(case.args))  # a MetaError says what differs
    return None


def _errors(case: _Case) -> str | None:
    def misuse() -> Any:
        return case.callee(no_such_argument=1)

    def caught() -> str:
        try:
            misuse()
        except Exception as error:
            return type(error).__name__
        return "nothing"

    eager, jitted = _raised(misuse), _raised(thunder.jit(misuse))
    if eager is not jitted:
        return f"eager raises {_name(eager)}, compiled {_name(jitted)}"
    seen = thunder.jit(caught)()
    return None if seen == _name(eager) else f"the program catches {_name(eager)} eagerly, compiled {seen}"


CHECKS: dict[str, Callable[[_Case], str | None]] = {
    "the rule takes the call": _taken,
    "inputs that require grad": _inputs,
    "output and gradients": lambda case: case.compare(case.args),
    "other values": lambda case: case.compare(_with_other_values(case.args, 1)),
    "other numbers": _numbers,
    "other forms of the target": _forms,
    "finite differences": _gradcheck,
    "every choice of inputs that need a gradient": _every_mask,
    "each output alone": _each_output_alone,
    "expanded gradients": lambda case: case.compare(case.args, _expanded),
    "non-contiguous gradients": lambda case: case.compare(case.args, _non_contiguous),
    "no_grad": lambda case: _under(case, torch.no_grad),
    "autocast": lambda case: _under(case, lambda: torch.autocast("cpu", torch.bfloat16)),
    "opaque": _opaque,
    "meta function": _meta,
    "a call that cannot be bound": _errors,
}


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
    function: Callable[..., Any],
    args: Sequence[Any],
    cotangent: Cotangent | None = None,
    used: int | None = None,
    module: Any = None,
    names: Sequence[str] | None = None,
) -> Observation:
    """Call a program and take gradients, also those of the parameters of the module that it is, or is made of."""
    given = list(_fresh(args))
    output = function(*given)
    roots = [t for t in _tensors(output) if t.requires_grad]
    if used is not None:
        roots = roots[used : used + 1]
    if roots:
        torch.autograd.backward(roots, [(cotangent or _uneven)(r) for r in roots])
    module = function if module is None else module
    inputs = dict(_named_tensors(given, [f"argument {i}" for i in range(len(given))] if names is None else names))
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


def _named_tensors(given: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in arguments, with the argument's name and the place in it: ``"xs[1]"``."""
    for name, value in zip(names, given, strict=True):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _named_tensors(list(value.values()), [f"{name}[{k!r}]" for k in value])
        elif isinstance(value, tuple | list):
            yield from _named_tensors(value, [f"{name}[{i}]" for i in range(len(value))])


def _difference(eager: Observation, compiled: Observation) -> str | None:
    """The first difference, in words."""
    structure = _structure(eager.output), _structure(compiled.output)
    if structure[0] != structure[1]:
        return f"output: eager gives {structure[0]}, compiled {structure[1]}"
    pairs = [
        *_labelled("output", list(_tensors(eager.output)), list(_tensors(compiled.output))),
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
                return f"{label}: {_first_line(error)}{_comparison(got, wanted)}"
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


def _diagnosis(case: _Case, failed: list[Check]) -> str:
    """What is wrong, as its author would say it: the first cause that explains what failed."""
    first = failed[0]
    if first.name == "the rule takes the call" or case.rule is None:
        return f"{first.name}: {first.detail}"
    found: list[str] = []
    try:
        found.extend(_faults(case))
    except Exception as error:
        found = found or [f"run by themselves its providers raise {type(error).__name__}: {_first_line(error)}"]
    return "; ".join([*found, f"{first.name}: {first.detail}"])


def _faults(case: _Case) -> Iterator[str]:
    assert case.rule is not None
    if case.rule.forward is None or case.rule.backward_provider is None or not case.has_gradients():
        return
    given = list(_fresh(case.given))
    count = len(given) - len(case.keywords)
    kwargs = dict(zip(case.keywords, given[count:], strict=True))
    faults = list(Providers(case.rule, case.callee, given[:count], kwargs).faults())
    yield from faults or _wrong_gradients(case)


def _wrong_gradients(case: _Case) -> Iterator[str]:
    """For each argument by how much its gradient is wrong: the rule's beside that of finite differences."""
    given = list(_fresh(case.given))
    with use(case.rule) if case.rule else contextlib.nullcontext():
        analytic = _observe(thunder.jit(case.program), given, names=case.names).gradients

    def weighted(*values: Any) -> float:
        with torch.no_grad():
            outputs = [o for o in _tensors(case.program(*values)) if o.is_floating_point()]
            return sum(float((o * _uneven(o)).sum()) for o in outputs)

    for name, tensor in _named_tensors(given, case.names):
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
