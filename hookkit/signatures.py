"""Signatures: whether a provider can take the arguments of its target, also where a newer target has more of them."""

from __future__ import annotations

import dis
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import attrs
from torch.overrides import get_testing_overrides

from hookkit.errors import HookError, RegistrationError

__all__ = [
    "POSITIONAL",
    "Difference",
    "count_misfit",
    "difference",
    "misfit",
    "refuse_kind",
    "returns_nothing",
    "torch_signature",
]

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen
class Difference:
    """How the signature of an installed target differs from the one for which a provider was written.

    Attributes:
        target: the target's signature.
        known: the same without the parameters of which the provider knows nothing.
        misfit: why the provider cannot stand for the target even so, or None.
    """

    target: inspect.Signature
    known: inspect.Signature
    misfit: str | None

    def arguments(
        self, rule: str, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[Any], Any] = lambda v: v
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the provider knows them.

        Args:
            rule: the rule and its target in words.
            args: the positional arguments.
            kwargs: the keyword arguments.
            plain: gives the value of an argument.

        Raises:
            HookError: if the call gives a parameter that the provider does not know, or the provider does not fit.
        """
        if self.misfit is not None:
            raise HookError(
                f"the {rule} cannot take the call: the installed target has another signature, {self.target}, than the "
                f"one that the rule was written for: {self.misfit}. Use versions that hookkit is known to work with, "
                "or leave the call outside the compiled program."
            )
        try:
            given = self.target.bind(*args, **kwargs).arguments
        except TypeError:  # calling it is the same error
            return args, kwargs
        for name, parameter in self.target.parameters.items():
            if name not in self.known.parameters and name in given:
                value = plain(given.pop(name))
                if value is not parameter.default and value != parameter.default:
                    raise HookError(
                        f"the {rule} cannot take the call: it gives the argument {name}={value!r}, which the installed "
                        f"target has and the rule does not know. Leave it at its default, {parameter.default!r}, or "
                        "leave the call outside the compiled program."
                    )
        bound = inspect.BoundArguments(self.known, given)
        return bound.args, bound.kwargs


def difference(target: inspect.Signature, provider: inspect.Signature) -> Difference | None:
    """How a target differs from the one for which a provider was written, or None.

    Args:
        target: the signature of what is installed.
        provider: the signature of what stands for it.
    """
    wanted = target.parameters.values()
    known = [p for p in wanted if p.default is p.empty or _is_known(p, target, provider)]
    reduced = target.replace(parameters=known)
    obstacle = misfit(reduced, provider)
    if obstacle is None and len(known) == len(target.parameters):
        return None
    return Difference(target, reduced, obstacle)


def _is_known(parameter: inspect.Parameter, target: inspect.Signature, provider: inspect.Signature) -> bool:
    """Whether a provider has a place for a parameter: its own, or among ``*args`` and ``**kwargs`` that it hands on."""
    given = {p.kind for p in provider.parameters.values()} - {p.kind for p in target.parameters.values()}
    takes_rest = parameter.kind in POSITIONAL and parameter.VAR_POSITIONAL in given
    return parameter.name in provider.parameters or takes_rest or parameter.VAR_KEYWORD in given


def misfit(target: inspect.Signature, provider: inspect.Signature) -> str | None:
    """Why a provider cannot take a target's arguments, or None."""
    wanted, given = list(target.parameters.values()), list(provider.parameters.values())
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in given)
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in given)
    by_name = {p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    places = [p for p in given if p.kind in POSITIONAL]
    filled = set()
    position = 0
    for parameter in wanted:
        name = parameter.name
        if parameter.kind in POSITIONAL:
            place = places[position] if position < len(places) else None
            position += 1
            if place is None and not takes_rest:
                return f"it has no place for the positional argument {name!r}"
            if place is not None:
                filled.add(place.name)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                if place is not None and place.name != name:
                    return f"argument {position - 1} is called {place.name!r}, in the target {name!r}"
                if name not in by_name and not takes_keywords:
                    return f"the argument {name!r} cannot be given by name"
        elif parameter.kind is parameter.VAR_POSITIONAL:
            if not takes_rest:
                return f"it has no place for *{name}"
            filled.update(p.name for p in places)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if name not in by_name and not takes_keywords:
                return f"it has no place for the keyword argument {name!r}"
            filled.add(name)
        elif not takes_keywords:
            return f"it has no place for **{name}"
    for extra in given:
        optional = extra.default is not extra.empty or extra.kind in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
        if not optional and extra.name not in filled:
            return f"the target never gives {extra.name!r}"
    defaults = {p.name: p.default for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for parameter in wanted:
        own = defaults.get(parameter.name, parameter.default)
        if parameter.default is not parameter.empty and not _may_stand_for(own, parameter.default):
            found = "it has no default" if own is parameter.empty else f"its default is {own!r}"
            return f"{found} for {parameter.name!r}; the target's is {parameter.default!r}"
    return None


def torch_signature(function: Any) -> inspect.Signature | None:
    """The parameters of a function of torch, or method of its tensors, that is written in C; None if not known.

    As torch states them for who overrides its functions: their number and order is right, the names may differ.
    """
    try:
        known = get_testing_overrides().get(function)
    except TypeError:  # it is not hashable
        return None
    return inspect.signature(known) if known is not None else None


def count_misfit(target: inspect.Signature, provider: inspect.Signature) -> str | None:
    """Why a provider takes too many or too few positional arguments for a target, whatever their names; or None."""
    wanted = [p for p in target.parameters.values() if p.kind in POSITIONAL]
    places = [p for p in provider.parameters.values() if p.kind in POSITIONAL]
    variadic = inspect.Parameter.VAR_POSITIONAL
    needed = sum(p.default is p.empty for p in wanted)
    takes_rest = any(p.kind is variadic for p in provider.parameters.values())
    gives_rest = any(p.kind is variadic for p in target.parameters.values())
    if len(places) < needed and not takes_rest:
        return f"it has no place for the positional argument {wanted[len(places)].name!r}"
    required = [p for p in places if p.default is p.empty]
    if len(required) > len(wanted) and not gives_rest:
        return f"the target never gives {required[len(wanted)].name!r}"
    return None


def refuse_kind(who: str, provider: Any) -> None:
    """Refuse what is called and returns none of what a provider returns.

    Args:
        who: the provider in words.
        provider: the provider.

    Raises:
        RegistrationError: if it is a generator, a coroutine or a class.
    """
    made = "a class" if isinstance(provider, type) else None
    if inspect.isgeneratorfunction(provider) or inspect.isasyncgenfunction(provider):
        made = "a generator"
    elif inspect.iscoroutinefunction(provider):
        made = "a coroutine"
    if made is not None:
        raise RegistrationError(f"{who} is {made}; expected a function that returns")


def returns_nothing(function: Any) -> bool:
    """Whether a ``def`` returns None on every path, as one does that lacks its ``return``."""
    function = getattr(function, "__func__", function)
    makes = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        return False
    if function.__code__.co_flags & makes:
        return False
    found = []
    for before, instruction in itertools.pairwise(dis.get_instructions(function)):
        if instruction.opname == "RETURN_CONST":
            found.append(instruction.argval is None)
        elif instruction.opname == "RETURN_VALUE":
            # where a path leads there by a jump, it has something else to return: a if b else None
            is_none = before.opname == "LOAD_CONST" and before.argval is None
            found.append(is_none and not instruction.is_jump_target)
    return bool(found) and all(found)


def _may_stand_for(own: Any, default: Any) -> bool:
    """Whether a provider's default may mean what the target's does; plain values are compared, others are trusted."""
    plain = bool | int | float | str | None
    if own is inspect.Parameter.empty or (isinstance(own, plain) and isinstance(default, plain)):
        return type(own) is type(default) and repr(own) == repr(default)
    return True
