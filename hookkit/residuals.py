"""Residuals: what a forward provider keeps for its backward provider, and what it says about its outputs.

Nothing here knows thunder: residuals are plain attributes on a plain object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import attrs
from torch.utils.checkpoint import checkpoint

from hookkit.errors import HookError

__all__ = ["Marks", "Residuals", "mark", "recompute", "save"]


@attrs.define
class Marks:
    """What a forward provider says about its outputs, beyond their values.

    Attributes:
        non_differentiable: outputs that never require grad, whatever their dtype.
        dirty: arguments that the forward changed in place; they are returned as outputs, too.
        materialize_grads: whether the backward gets zeros (True) or None (False) for an output that nothing used.
    """

    non_differentiable: tuple[Any, ...] = ()
    dirty: tuple[Any, ...] = ()
    materialize_grads: bool = True


class Residuals:
    """A namespace of residuals, made by :func:`save`.

    Every keyword given to :func:`save` is an attribute. In a backward provider two more are there:

    Attributes:
        needs: which arguments need a gradient: a mapping from parameter name to bool, or to a tuple of bools for
            ``*args``.

    Example:
        >>> import hookkit, torch
        >>> @hookkit.custom_gradient
        ... def product(x, y):
        ...     return x * y, hookkit.save(x=x, y=y)
        >>> @product.backward
        ... def _(saved, grad):
        ...     gradients = {"x": grad * saved.y}
        ...     if saved.needs["y"]:
        ...         gradients["y"] = grad * saved.x
        ...     return gradients
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> product(x, torch.tensor(5.0)).backward()
        >>> x.grad
        tensor(5.)
    """

    _marks: Marks

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.__dict__["_marks"] = Marks()

    @property
    def _names(self) -> list[str]:
        """The names under which something is kept."""
        return [name for name in self.__dict__ if name != "needs" and not name.startswith("_")]

    def __iter__(self) -> NoReturn:
        raise HookError(
            "residuals are read by name, and not unpacked: hookkit.save(x=x) is saved.x in the backward provider"
            f"; kept is {', '.join(self._names) or 'nothing'}"
        )

    def __getattr__(self, name: str) -> Any:
        kept = ", ".join(self._names)
        raise AttributeError(f"no residual is called {name!r}; hookkit.save(...) was given {kept or 'none'}")

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_"))
        return f"save({inner})"


def save(**residuals: Any) -> Residuals:
    """Keep values of any kind for the backward provider.

    A forward provider returns ``output, hookkit.save(...)``.

    Args:
        **residuals: tensors, numbers or any other Python objects, each under the name by which the backward
            provider reads it.

    Returns:
        The residuals, as one object.

    Raises:
        HookError: if a name is ``needs`` or begins with an underscore; these are hookkit's own.

    Example:
        >>> import hookkit
        >>> hookkit.save(scale=2.0, axis=1)
        save(scale=2.0, axis=1)
    """
    for name in residuals:
        if name == "needs" or name.startswith("_"):
            raise HookError(f"hookkit.save({name}=...): the name {name!r} is reserved; choose another one")
    return Residuals(residuals)


def mark(
    residuals: Residuals,
    *,
    non_differentiable: Iterable[Any] = (),
    dirty: Iterable[Any] = (),
    materialize_grads: bool = True,
) -> Residuals:
    """Say more about the outputs of a forward provider than their values do.

    The three marks are those of ``torch.autograd.Function``'s ctx (``mark_non_differentiable``, ``mark_dirty``,
    ``set_materialize_grads``) and mean the same.

    Args:
        residuals: what :func:`save` returned.
        non_differentiable: outputs that do not require grad.
        dirty: arguments that were changed in place.
        materialize_grads: False if the backward provider wants None, instead of zeros, as the gradient of an
            output that nothing used.

    Returns:
        The same residuals.

    Example:
        >>> import hookkit, torch
        >>> values, indices = torch.sort(torch.rand(3))
        >>> hookkit.mark(hookkit.save(indices=indices), non_differentiable=[indices]) is not None
        True
    """
    residuals.__dict__["_marks"] = Marks(tuple(non_differentiable), tuple(dirty), bool(materialize_grads))
    return residuals


def recompute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and keep nothing of what it computes for the backward, which computes it again.

    In a compiled program, where grad mode is on, this is less memory for more time. The arguments and the results are
    kept if the backward needs them, and random numbers of operations that thunder knows; an operator that PyTorch runs
    draws the same numbers again. Outside of a compiled program it is ``torch.utils.checkpoint.checkpoint``.

    Args:
        function: the function, or a module.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        What the function returns.

    Example:
        >>> import hookkit, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> hookkit.recompute(torch.exp, x).sum().backward()
        >>> x.grad
        tensor([2.7183, 2.7183, 2.7183])
    """
    return checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)
