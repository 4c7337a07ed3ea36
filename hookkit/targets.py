"""The kinds of target that a rule can have, and how each matches a call.

A target never imports anything: a dotted name is looked up among the modules that the program has imported. Which
rules have which targets, and which of two wins, is the registry's business.
"""

from __future__ import annotations

import difflib
import inspect
import keyword
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch._library.custom_ops import CustomOpDef

from hookkit import compat
from hookkit.answers import check_answer
from hookkit.call import Call, Source
from hookkit.errors import HookError, RegistrationError, TargetWarning, warn_at
from hookkit.standard import missing_module, refused

__all__ = [
    "CallableTarget",
    "FunctionTarget",
    "NameTarget",
    "PredicateTarget",
    "Target",
    "declaration_of",
    "default_name",
    "is_asked_about",
    "make_target",
    "place_of",
    "signature_of",
    "where",
]


@attrs.frozen
class CallableTarget:
    """One callable: a function, builtin, method, torch function, operator overload or higher-order operator."""

    callable: Callable[..., Any]

    def __str__(self) -> str:
        return describe_callable(self.callable)

    @property
    def specificity(self) -> int:
        """How narrow the target is: a method of one object is narrower than its function."""
        return 4 if isinstance(self.callable, types.MethodType) else 3

    @property
    def name(self) -> str:
        """What a rule for this target is called by default."""
        return _short_name(self.callable)

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        # Not `self.callables[0]`: two bound methods share a function, and mean different calls.
        return self.callable if isinstance(self.callable, types.MethodType) else self.callables[0]

    @property
    def callables(self) -> tuple[Any, ...]:
        """What thunder's interpreter sees when a program calls this target.

        A bound method arrives as its function. An operator of ``torch.library`` has up to three callables: the
        overload, the packet (``torch.ops.lib.op``) and what ``torch.library.custom_op`` returned.
        """
        found = self.callable
        if isinstance(found, types.MethodType):
            return (found.__func__,)
        if isinstance(found, CustomOpDef):
            return (found._opoverload, found._opoverload.overloadpacket, found)
        if isinstance(found, torch._ops.OpOverloadPacket):
            return (*(getattr(found, name) for name in found.overloads()), found)
        if isinstance(found, torch._ops.OpOverload) and len(found.overloadpacket.overloads()) == 1:
            return (found, found.overloadpacket)
        return (found,)

    def matches(self, call: Call) -> object:
        """Whether a call of one of the callables is meant: for a bound method, a call on its object."""
        if isinstance(self.callable, types.MethodType):
            return bool(call.args) and call.args[0] is self.callable.__self__
        return True

    def signature(self) -> inspect.Signature | None:
        """The signature with which a rule sees the call, or None where Python does not know it.

        That of a bound method begins with the object, as the call's arguments do.
        """
        found = self.callables[0]
        if isinstance(found, torch._ops.OpOverload):
            return _schema_signature(found._schema) if len(found.overloadpacket.overloads()) == 1 else None
        signature = signature_of(found)
        kinds = [p.kind for p in signature.parameters.values()] if signature is not None else []
        # What wrappers have that do not say what they wrap.
        return None if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] else signature


@attrs.frozen
class FunctionTarget:
    """The ``apply`` of an autograd Function subclass and, unless said otherwise, of its subclasses."""

    function: type[Any]
    subclasses: bool = True
    specificity: ClassVar[int] = 2

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def name(self) -> str:
        """What a rule for this target is called by default."""
        return self.function.__name__

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return self.function

    def matches(self, call: Call) -> object:
        """Whether the Function that is applied is meant: the class, or a subclass where those are included."""
        return self.subclasses or call.function is self.function

    def signature(self) -> inspect.Signature | None:
        """The signature of ``apply``: that of ``forward`` without ctx; None for Function itself."""
        base = torch.autograd.Function
        forward = self.function.forward
        if forward is base.forward:
            return None
        found = signature_of(forward)
        if found is None or self.function.setup_context is not base.setup_context:
            return found
        parameters = list(found.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[0]
        return found.replace(parameters=parameters)


@attrs.frozen
class PredicateTarget:
    """Every call for which a predicate is true; made by :func:`where`."""

    predicate: Callable[[Call], object]
    specificity: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"where({describe_callable(self.predicate)})"

    @property
    def name(self) -> str:
        """What a rule for this target is called by default."""
        return _short_name(self.predicate)

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        return self.predicate

    def signature(self) -> inspect.Signature | None:
        """None: a predicate says nothing about arguments."""
        return None

    def matches(self, call: Call) -> object:
        """Ask the predicate about a call.

        Raises:
            HookError: if the predicate raises; predicate and call are named.
        """
        try:
            answer = self.predicate(call.seen)
            check_answer(answer)
            return answer
        except Exception as error:
            raise HookError(
                f"the predicate {describe_callable(self.predicate)} "
                f"({declaration_of(self.predicate, 'a builtin')}) raised {type(error).__name__}: {error} when it was "
                f"asked about {call}; a predicate is asked about every call of the program and returns true, false or "
                "hookkit.decline(reason)"
            ) from error


@attrs.define(eq=False)
class NameTarget:
    """A dotted name ``"pkg.mod:Qual.name"`` that is looked up once the module is imported by anyone."""

    module: str
    qualname: str
    subclasses: bool = True
    _resolved: CallableTarget | FunctionTarget | None = None
    _warned: bool = False
    specificity: ClassVar[int] = 3

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def name(self) -> str:
        """What a rule for this target is called by default."""
        return self.qualname.rpartition(".")[2]

    @property
    def key(self) -> object:
        """What two targets have in common when they mean the same calls."""
        found = self.resolve()
        return found.key if found is not None else str(self)

    @property
    def state(self) -> str:
        """How far the name is known: for people who wonder why a rule does not fire."""
        if self.resolve() is not None:
            return "resolved"
        if self.module not in sys.modules:
            return missing_module(self.module) or f"{self.module} is not imported"
        missing = self._missing()
        return missing if missing is not None else "not there yet"

    def signature(self) -> inspect.Signature | None:
        """The signature of what the name stands for, or None until that is imported."""
        found = self.resolve()
        return found.signature() if found is not None else None

    def resolve(self) -> CallableTarget | FunctionTarget | None:
        """What the name stands for, or None while that is not there.

        Only what is there already is looked at: a module's ``__getattr__``, which may import, is not called.
        """
        if self._resolved is None:
            found = self._follow()[0]
            if found is not None:
                target = make_target(found, subclasses=self.subclasses)
                assert isinstance(target, CallableTarget | FunctionTarget)
                self._resolved = target
        return self._resolved

    def warn_if_missing(self, rule: str, declared_at: Source) -> None:
        """Warn, once, with the nearest names, if the module is there, or its package, and the name is not.

        Args:
            rule: the name of the rule whose target this is.
            declared_at: where the rule is declared, at which the warning points.
        """
        missing = None if self._warned or self.resolve() is not None else self._missing()
        if missing is not None:
            self._warned = True
            warn_at(
                declared_at,
                f"the target {str(self)!r} of the rule {rule}, declared at {declared_at}, does not resolve: {missing}. "
                "Correct the name, or unregister the rule.",
                TargetWarning,
            )

    def is_being_imported(self) -> bool:
        """Whether the module is there and its import has not ended."""
        spec = getattr(sys.modules.get(self.module), "__spec__", None)
        return bool(getattr(spec, "_initializing", False))

    def _follow(self) -> tuple[Any, Any, str]:
        """What the name stands for, or None; and the last part that was looked up, and in what."""
        module = sys.modules.get(self.module)
        if module is None or self.is_being_imported():
            return None, None, ""
        found: Any = module
        holder: Any = None
        part = ""
        for part in self.qualname.split("."):
            holder = found
            # torch.ops makes its namespaces when they are asked for; other modules might import something
            looks = holder is not module or isinstance(module, torch._ops._Ops)
            found = getattr(holder, part, None) if looks else vars(module).get(part)
            if found is None:
                break
        return found, holder, part

    def _missing(self) -> str | None:
        """Why the name is not there although its module, or its package, is; None if it may still come."""
        if self.module not in sys.modules:
            return missing_module(self.module)
        found, holder, part = self._follow()
        if holder is None or found is not None or part in dir(holder) or self._names_unknown_library():
            return None
        near = difflib.get_close_matches(part, dir(holder), n=3)
        return f"{self.module} is imported and has no {part!r}" + (f"; nearest: {', '.join(near)}" if near else "")

    def _names_unknown_library(self) -> bool:
        """Whether the name is that of an operator whose library nobody has registered operators of so far."""
        if self.module != "torch.ops":
            return False
        library = self.qualname.partition(".")[0]
        known = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
        return library not in known and library != "higher_order"


Target = CallableTarget | FunctionTarget | NameTarget | PredicateTarget


def where(predicate: Callable[[Call], object]) -> PredicateTarget:
    """A target that matches every call for which a predicate is true.

    Args:
        predicate: takes a :class:`hookkit.Call`; returns true, false, or ``hookkit.decline(reason)``. It is asked
            about every function that the program calls, Python's own and the plumbing of the interpreter left out, so
            it should look at ``call.callable`` or ``call.name`` first.

    Returns:
        A target for :func:`hookkit.rule`.

    Raises:
        RegistrationError: if the predicate is not callable with one argument.

    Example:
        >>> import hookkit
        >>> target = hookkit.where(lambda call: call.name.startswith("fused_"))
    """
    if not callable(predicate) or isinstance(predicate, type):
        raise RegistrationError(f"hookkit.where(...) takes a function of one argument, the call; got {predicate!r}")
    signature = signature_of(predicate)
    if signature is not None:
        try:
            signature.bind(None)
        except TypeError:
            raise RegistrationError(
                f"the predicate {describe_callable(predicate)}{signature} "
                f"({declaration_of(predicate, 'a builtin')}) cannot be called with one argument, the call"
            ) from None
    return PredicateTarget(predicate)


def make_target(target: Any, *, subclasses: bool = True) -> Target:
    """The target that a user's object means.

    Args:
        target: a callable, a Function subclass, its ``apply``, a dotted name, or a target.
        subclasses: whether a Function stands for its subclasses, too.

    Raises:
        RegistrationError: if it means none.
    """
    base = torch.autograd.Function
    if isinstance(target, staticmethod):  # as it stands in the body of its class
        target = target.__func__
    if compat.is_optimized(target):  # in a compiled program the function itself is called
        target = target._torchdynamo_orig_callable
    if isinstance(target, CallableTarget | FunctionTarget | NameTarget | PredicateTarget):
        return target
    if isinstance(target, str):
        return _named(target, subclasses)
    if isinstance(target, type):
        if issubclass(target, base):
            return FunctionTarget(target, subclasses)
        raise RegistrationError(
            f"the rule target {target.__qualname__} is a class, but not a subclass of torch.autograd.Function; "
            "give the function or method that the program calls"
        )
    if isinstance(target, base):
        raise RegistrationError(
            f"the rule target {target!r} is an instance of the Function {type(target).__name__}; give the class"
        )
    if not callable(target):
        raise RegistrationError(
            f"the rule target {target!r} ({type(target).__name__}) is not callable; give a callable, a subclass of "
            "torch.autograd.Function, hookkit.where(predicate), or a name 'package.module:name'"
        )
    owner = compat.function_owner(target)
    if owner is not None:
        return FunctionTarget(owner, subclasses)
    if (obstacle := refused(target)) is not None:
        raise RegistrationError(f"the rule target {describe_callable(target)} cannot be one: it is {obstacle}")
    owner = getattr(target, "__self__", None)
    if isinstance(target, types.BuiltinMethodType) and not isinstance(owner, type | types.ModuleType | types.NoneType):
        if (obstacle := refused(getattr(type(owner), target.__name__, None))) is not None:
            raise RegistrationError(f"the rule target {target!r} cannot be one: it is {obstacle}")
        raise RegistrationError(
            f"the rule target {target!r} is a method of one {type(owner).__name__}; the interpreter sees the method of "
            f"the type: give {type(owner).__name__}.{target.__name__}"
        )
    try:
        hash(target)
    except TypeError:
        raise RegistrationError(
            f"the rule target {target!r} is not hashable, so calls cannot be looked up by it; use hookkit.where(...)"
        ) from None
    return CallableTarget(target)


def _named(name: str, subclasses: bool) -> NameTarget:
    module, colon, qualname = name.partition(":")
    parts = [*module.split("."), *qualname.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        hint = f"; did you mean {'{}:{}'.format(*name.rpartition('.')[::2])!r}?" if not colon and "." in name else ""
        raise RegistrationError(
            f"the rule target {name!r} is not a name of the form 'package.module:name'; write the module, a colon, and "
            f"the name in the module{hint}"
        )
    return NameTarget(module, qualname, subclasses)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a callable, or None where Python does not know it (many builtins)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def place_of(function: Any) -> Source | None:
    """Where a Python function is written, or None for anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return Source(code.co_filename, code.co_firstlineno) if code is not None else None


def is_lambda(function: Any) -> bool:
    """Whether a callable is a lambda expression."""
    return isinstance(function, types.FunctionType) and function.__name__ == "<lambda>"


def describe_callable(function: Any) -> str:
    """A callable's module and name, for messages."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{function}"
    if isinstance(function, CustomOpDef):
        return f"torch.ops.{function._opoverload}"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(name, str):
        return f"{type(function).__module__}.{type(function).__qualname__} object"
    module = getattr(function, "__module__", None) or getattr(
        getattr(function, "__objclass__", None), "__module__", None
    )
    full = f"{module}.{name}" if module else name
    return full.replace("torch._VariableFunctionsClass.", "torch.").replace("torch._C.TensorBase.", "torch.Tensor.")


def _short_name(function: Any) -> str:
    if is_lambda(function):
        return "lambda"
    name = getattr(function, "__name__", None)
    return name.partition(".")[0] if isinstance(name, str) and name else type(function).__name__


def declaration_of(function: Any, unknown: str = "") -> str:
    """Where a function is declared, in words; of what has no code of Python's ``unknown``, or its repr."""
    place = place_of(function)
    return f"declared at {place}" if place else unknown or repr(function)


def _schema_signature(schema: Any) -> inspect.Signature:
    """The Python signature of an operator of torch, from its schema."""
    kinds = inspect.Parameter
    parameters = [
        kinds(
            f"{argument.name}_" if keyword.iskeyword(argument.name) else argument.name,
            kinds.KEYWORD_ONLY if argument.kwarg_only else kinds.POSITIONAL_ONLY,
            default=argument.default_value if argument.has_default_value() else kinds.empty,
        )
        for argument in schema.arguments
    ]
    try:
        return inspect.Signature(parameters)
    except ValueError:  # a default before an argument without one, which Python does not have
        return inspect.Signature([p.replace(default=kinds.empty) for p in parameters])


def default_name(provider: Callable[..., Any] | None, targets: tuple[Target, ...]) -> str:
    """The forward provider's name, or the target's where that says nothing."""
    name = getattr(provider, "__name__", "_")
    return targets[0].name if targets and (name == "_" or is_lambda(provider)) else str(name)


# The plumbing of interpreting a program, about which no predicate is asked: Python's own operations on its own objects
# and what thunder, its interpreter and torch.nn.Module do between two calls that the program makes.
_PLUMBING = frozenset({"builtins", "thunder", "hookkit", "functools", "operator", "_operator", "types", "typing"})


def is_asked_about(callable_: Any) -> bool:
    """Whether predicates are asked about calls of a callable."""
    if isinstance(callable_, types.MethodWrapperType):  # torch.Tensor.mT.__get__, and other attributes
        callable_ = callable_.__self__
    if isinstance(callable_, types.WrapperDescriptorType | types.MethodDescriptorType | types.GetSetDescriptorType):
        callable_ = callable_.__objclass__
    module = getattr(callable_, "__module__", None)
    if compat.function_owner(callable_) is not None:
        return True
    if not isinstance(module, str):
        # torch._VF.unique_dim, and other functions of torch without a public name
        return getattr(callable_, "__qualname__", "").startswith("_VariableFunctionsClass.")
    return module.partition(".")[0] not in _PLUMBING and module != "torch.nn.modules.module"
