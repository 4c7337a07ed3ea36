"""The checks that ``hookkit.testing`` makes of a rule or an autograd Function, each of which can fail by itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import thunder
import torch

from hookkit.comparison import (
    Cotangent,
    difference_between,
    expanded,
    first_line,
    fresh,
    non_contiguous,
    observe,
    tensors_of,
    with_other_values,
)
from hookkit.custom_gradient import CustomFunction
from hookkit.declare import rule
from hookkit.diagnosis import argument_names, why_not_taken
from hookkit.errors import HookError
from hookkit.forms import other_forms
from hookkit.registry import rules
from hookkit.rule import Rule
from hookkit.scopes import use
from hookkit.targets import CallableTarget, FunctionTarget, NameTarget, describe_callable

__all__ = ["CHECKS", "Case", "Check"]


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


class DoesNotApply(Exception):
    """A check says nothing of these arguments; the message says why."""


@attrs.frozen
class Case:
    """What is checked.

    Attributes:
        subject: the rule or Function.
        callee: what it stands for.
        program: calls it; takes the arguments by position, those with keywords last.
        given: the arguments.
        names: a name for each of them.
        args: those that are compared with eager PyTorch; none requires grad if eager gives no gradients.
        keywords: the names of those that are given by keyword.
        compiled: the program that thunder compiles, one for all checks: it compiles again where that has to be.
    """

    subject: Any
    callee: Callable[..., Any]
    program: Callable[..., Any]
    given: Sequence[Any]
    names: Sequence[str]
    args: Sequence[Any]
    keywords: Sequence[str]
    compiled: Callable[..., Any] = attrs.field(init=False, repr=False)

    @compiled.default
    def _compiled(self) -> Callable[..., Any]:
        return thunder.jit(self.program)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, subject: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Case:
        """A case of a rule, or a Function, on example arguments."""
        subject = subject.rule if isinstance(subject, CustomFunction) else subject
        callee, positional = _callee(subject), len(args)

        def program(*given: Any) -> Any:
            return callee(*given[:positional], **dict(zip(kwargs, given[positional:], strict=True)))

        names = argument_names(_named_arguments(subject, callee), args, kwargs)
        args = [*args, *kwargs.values()]
        values = list(fresh(args))
        eager_gives_gradients = any(t.requires_grad for t in tensors_of(program(*values)))
        compared = args if eager_gives_gradients else list(_without_gradients(args))
        return cls(subject, callee, program, args, names, compared, tuple(kwargs))

    @property
    def rule(self) -> Rule[..., Any] | None:
        """The rule that is checked; None for a Function."""
        return self.subject if isinstance(self.subject, Rule) else None

    def run(self, name: str) -> Check:
        """Make one of the ``CHECKS``; an exception is a failed check."""
        try:
            # a rule that is registered has to take the call by its own standing
            with use(self.rule) if self.rule and self.rule not in rules() else contextlib.nullcontext():
                difference = CHECKS[name](self)
        except DoesNotApply as reason:
            return Check(name, None, str(reason))
        except Exception as error:
            return Check(name, False, f"{type(error).__name__}: {first_line(error)}")
        return Check(name, difference is None, difference or "")

    def has_gradients(self) -> bool:
        """Whether there is a backward for some floating-point argument."""
        if self.rule is None and self.subject.backward is torch.autograd.Function.backward:
            return False
        given = list(fresh(self.given))
        inputs = [t.requires_grad_() for t in tensors_of(given) if t.is_floating_point() or t.is_complex()]
        has_backward = self.rule is not None and self.rule.backward_provider is not None
        return bool(inputs) and (has_backward or any(t.requires_grad for t in tensors_of(self.program(*given))))

    def compare(self, args: Sequence[Any], cotangent: Cotangent | None = None, used: int | None = None) -> str | None:
        """The first difference between the program and what thunder compiles of it, in words."""
        return self.difference(self.program, self.compiled, args, cotangent, used)

    def difference(
        self,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        args: Sequence[Any],
        cotangent: Cotangent | None = None,
        used: int | None = None,
    ) -> str | None:
        """The first difference between two programs on these arguments, in words."""
        expected = observe(eager, args, cotangent, used, names=self.names)
        return difference_between(expected, observe(compiled, args, cotangent, used, names=self.names))


def _named_arguments(subject: Any, callee: Callable[..., Any]) -> Any:
    """What tells the names of the arguments: what is called, or else the forward provider."""
    if isinstance(subject, Rule):
        known = subject.targets[0].signature() is not None or subject.forward is None or subject.pass_call
        return callee if known else subject.forward
    return functools.partial(subject.forward, None)  # without ctx


def _taken(case: Case) -> str | None:
    """Whether the rule is given the call."""
    if case.rule is None:
        raise DoesNotApply("it is no rule")
    return why_not_taken(case.rule, case.program, list(fresh(case.args)))


def _forms(case: Case) -> str | None:
    """Whether the rule matches its target in every form in which programs write it."""
    targets = [t.callable for t in (case.rule.targets if case.rule else ()) if isinstance(t, CallableTarget)]
    others = {describe_callable(f) for t in targets for f in other_forms(t) if f not in targets}
    if others:
        raise DoesNotApply(f"not matched: {', '.join(sorted(others))}; hookkit.forms(...) is a target for all")
    if not any(map(other_forms, targets)):
        raise DoesNotApply("the target has no other form")
    return None


def _numbers(case: Case) -> str | None:
    """Whether a number that the call is given has an effect: one that is baked in has none."""
    places = list(_numbers_in(case.args))
    if not places:
        raise DoesNotApply("needs a number among the arguments")
    refused = []
    case.compiled(*fresh(case.args))
    for place in places:
        others = [list(_with_number(case.args, place, n)) for n in _other_numbers(_at(case.args, place))]
        accepted = [o for o in others if _raised(functools.partial(case.program, *fresh(o))) is None]
        label = _label(case.names, place)
        if not accepted:
            refused.append(label)
            continue
        difference = case.difference(case.program, case.compiled, accepted[0])
        if difference:
            return f"for {label}={_at(accepted[0], place)!r} instead of {_at(case.args, place)!r}: {difference}"
    if len(refused) == len(places):
        raise DoesNotApply(f"eager PyTorch takes no other number for {', '.join(refused)}")
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


def _inputs(case: Case) -> str | None:
    """Whether there are gradients to compare, where there could be."""
    if any(t.requires_grad for t in tensors_of(case.given)):
        return None
    if not case.has_gradients():
        raise DoesNotApply("it has no gradient")
    return "no argument requires grad, so that no gradient is compared: pass tensors with requires_grad=True"


def _gradcheck(case: Case) -> str | None:
    _precise(case)
    differentiable = _outputs_that_require_grad(case)
    try:
        torch.autograd.gradcheck(differentiable, tuple(fresh(case.given)), check_undefined_grad=False)
    except RuntimeError as error:  # torch's GradcheckError among them
        return first_line(error)
    return None


def _gradgradcheck(case: Case) -> str | None:
    """Whether the second derivative is that of the first: of the gradient, be that wrong on purpose or not."""
    _precise(case)
    differentiable = _outputs_that_require_grad(case)
    why_not = _no_second_derivative(differentiable, list(fresh(case.given)))
    if why_not is not None:
        raise DoesNotApply(f"there is none: {why_not}")
    try:
        torch.autograd.gradgradcheck(differentiable, tuple(fresh(case.given)))
    except RuntimeError as error:
        return first_line(error)
    return None


def _outputs_that_require_grad(case: Case) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The compiled program as finite differences take it."""
    return lambda *given: tuple(t for t in tensors_of(case.compiled(*given)) if t.requires_grad)


def _no_second_derivative(function: Callable[..., Any], given: Sequence[Any]) -> str | None:
    """What is said where a second derivative is asked for that is known not to be there."""
    inputs = [a for a in tensors_of(given) if a.requires_grad]
    outputs = function(*given)
    cotangents = [torch.ones_like(o, requires_grad=True) for o in outputs]
    found = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
    first = [g for g in found if g is not None and g.requires_grad]
    try:
        # to all leaves: the way to one of them alone does not lead through the error of once_differentiable
        torch.autograd.backward(first, [torch.ones_like(g) for g in first])
    except RuntimeError as error:
        if isinstance(error, HookError) or "once_differentiable" in str(error):
            return first_line(error)
        raise
    return None


def _precise(case: Case) -> None:
    """Refuses arguments that are not precise enough for finite differences."""
    tracked = [a for a in tensors_of(case.given) if a.requires_grad]
    if not tracked or any(a.dtype not in (torch.float64, torch.complex128) for a in tracked):
        raise DoesNotApply("needs float64 tensors that require grad")


def _without_gradients(args: Sequence[Any]) -> Iterator[Any]:
    for value in fresh(args):
        for tensor in tensors_of(value):
            tensor.requires_grad_(False)
        yield value


def _every_mask(case: Case) -> str | None:
    places = [i for i, a in enumerate(case.args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if len(places) < 2:
        raise DoesNotApply("needs two tensors that require grad")
    for mask in itertools.product((True, False), repeat=len(places)):
        given = list(fresh(case.args))
        for place, needed in zip(places, mask, strict=True):
            given[place] = given[place].detach().requires_grad_(needed)
        difference = case.compare(given)
        if difference:
            return f"for {dict(zip(places, mask, strict=True))}: {difference}"
    return None


def _each_output_alone(case: Case) -> str | None:
    count = sum(t.requires_grad for t in tensors_of(case.program(*fresh(case.args))))
    if count < 2:
        raise DoesNotApply("needs two outputs that require grad")
    for used in range(count):
        difference = case.compare(case.args, used=used)
        if difference:
            return f"output {used} alone: {difference}"
    return None


def _under(case: Case, context: Callable[[], Any]) -> str | None:
    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with context():
                return function(*given)

        return call

    return case.difference(inside(case.program), inside(case.compiled), case.args)


def _opaque(case: Case) -> str | None:
    if case.rule is None:
        opaque: Rule[..., Any] = rule(case.subject, mode="opaque", register=False)
    elif case.rule.mode == "opaque" or case.rule.forward is None:
        raise DoesNotApply("the rule is opaque")
    else:
        opaque = case.rule.as_opaque()
    with use(opaque, without=[case.rule] if case.rule else []):
        return case.compare(case.args)


def _meta(case: Case) -> str | None:
    if case.rule is None or case.rule.meta_provider is None:
        raise DoesNotApply("there is none")
    with use(case.rule.as_opaque(), without=[case.rule]):
        case.compiled(*fresh(case.args))  # a MetaError says what differs
    return None


def _errors(case: Case) -> str | None:
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


CHECKS: dict[str, Callable[[Case], str | None]] = {
    "the rule takes the call": _taken,
    "inputs that require grad": _inputs,
    "output and gradients": lambda case: case.compare(case.args),
    "other values": lambda case: case.compare(with_other_values(case.args, 1)),
    "other numbers": _numbers,
    "other forms of the target": _forms,
    "finite differences": _gradcheck,
    "second derivative": _gradgradcheck,
    "every choice of inputs that need a gradient": _every_mask,
    "each output alone": _each_output_alone,
    "expanded gradients": lambda case: case.compare(case.args, expanded),
    "non-contiguous gradients": lambda case: case.compare(case.args, non_contiguous),
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
