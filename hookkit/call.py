"""Call: one interpreted call that rules are asked about."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import attrs

from hookkit.operators import Operator, operator_of

__all__ = ["Call", "Source"]

Details = Callable[["Call"], tuple[tuple[Any, ...], dict[str, Any], tuple[bool, ...], "Source | None"]]
Show = Callable[[Any], Any]


@attrs.frozen
class Source:
    """A place in a user's program.

    Attributes:
        file: the path of the file, or what stands for one: a cell of a notebook.
        line: the line, counted from 1.

    Example:
        >>> import hookkit
        >>> str(hookkit.Source("train.py", 12))
        'train.py:12'
    """

    file: str
    line: int

    def __str__(self) -> str:
        cell = self.cell
        return f"{cell}, line {self.line}" if cell is not None else f"{self.file}:{self.line}"

    @property
    def cell(self) -> str | None:
        """The cell of a notebook, as its author sees it: ``"cell In[3]"``; None elsewhere."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(self.file)
        return " ".join(["cell", *named[1:]]) if named else None


@attrs.define(eq=False)
class Call:
    """One call in a program that is being compiled.

    A rule registered with ``pass_call=True`` gets it as the first argument of its providers, and every predicate
    target (:func:`hookkit.where`) gets it as its only argument.

    Attributes:
        callable: what the program called.
        function: the ``torch.autograd.Function`` subclass whose ``apply`` was called, or None.
        args: the positional arguments. In a condition, a predicate and a meta function a tensor has the metadata of
            torch's (shape, dtype, device, requires_grad) and no values; in a forward or backward provider it is what
            the provider's own arguments are.
        kwargs: the keyword arguments.
        needs: for each positional argument, whether it is a tensor that needs a gradient.
        source: where in the user's program the call stands, or None if that is not known.
        unsupported: why thunder cannot do the call itself, where an operation of torch is called that it lacks, or
            lacks in this form; None for every other call.

    Example:
        >>> import hookkit
        >>> def dotted(a, b):
        ...     return (a * b).sum()
        >>> @hookkit.rule(dotted, pass_call=True, register=False)
        ... def lean_dotted(call, a, b):
        ...     return (a * b).sum(), hookkit.save(a=a, b=b)
        >>> @lean_dotted.backward
        ... def _(call, saved, grad):
        ...     needs_a, needs_b = call.needs
        ...     return grad * saved.b if needs_a else None, grad * saved.a if needs_b else None
    """

    callable: Callable[..., Any]
    function: type[Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: tuple[bool, ...] = ()
    source: Source | None = None
    unsupported: str | None = None
    _show: Show | None = attrs.field(default=None, repr=False)
    _details: Details | None = attrs.field(init=False, default=None, repr=False)
    _name: str | None = attrs.field(init=False, default=None, repr=False)
    _operators: list[Operator | None] = attrs.field(init=False, factory=list, repr=False)

    @classmethod
    def pending(
        cls,
        callable_: Callable[..., Any],
        function: type[Any] | None,
        details: Details,
        unsupported: str | None,
        show: Show | None = None,
    ) -> Call:
        """A call of which args, kwargs, needs and source are found when one of them is first asked for.

        Arguments that a traced program passes become inputs of the trace when they are looked at; a call that no rule
        takes must not look at them.
        """
        call = cls.__new__(cls)
        call.callable, call.function, call._details, call._name = callable_, function, details, None
        call.unsupported, call._operators = unsupported, []
        call._show = show
        return call

    @property
    def seen(self) -> Call:
        """The call as conditions, predicates and meta functions get it: tensors with torch's metadata and no values."""
        if self._show is None:
            return self
        # not kept: the two would hold each other, and what the program was given, in a cycle
        seen = Call.pending(self.callable, self.function, self._seen_details, self.unsupported)
        seen._operators = self._operators
        return seen

    def _seen_details(self, _: Call) -> tuple[tuple[Any, ...], dict[str, Any], tuple[bool, ...], Source | None]:
        return self.shown(self.args), self.shown(self.kwargs), self.needs, self.source

    def shown(self, arguments: Any) -> Any:
        """Arguments of the call as conditions get them."""
        return arguments if self._show is None else self._show(arguments)

    def __getattr__(self, name: str) -> Any:
        # Reached only for a field that `pending` left unset.
        if name not in ("args", "kwargs", "needs", "source"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        assert self._details is not None
        details, self._details = self._details, None  # it holds the interpreter's values
        self.args, self.kwargs, self.needs, self.source = details(self)
        return getattr(self, name)

    @property
    def name(self) -> str:
        """The name of what is called, as people write it."""
        if self._name is None:
            named: Any = self.function if self.function is not None else self.callable
            if isinstance(named, MethodWrapperType):  # torch.Tensor.mT.__get__, and other attributes
                named = named.__self__
            if getattr(named, "calls_its_argument", False) and self.args:  # what hookkit.opaque makes
                named = self.args[0]
            self._name = str(getattr(named, "__name__", None) or type(named).__name__)
        return self._name

    @property
    def operator(self) -> Operator | None:
        """What was registered for the operator of ``torch.library`` that is called; None for any other call."""
        if not self._operators:
            self._operators.append(operator_of(self.callable))
        return self._operators[0]

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.name}(){where}"
