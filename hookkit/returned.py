"""What a forward provider returned, the output and the residuals beside it, and what a backward provider takes."""

from __future__ import annotations

from typing import Any

from hookkit.call import Call
from hookkit.errors import GradientError
from hookkit.residuals import Residuals
from hookkit.rule import Rule
from hookkit.targets import signature_of

__all__ = ["check_takes", "output_and_residuals"]

_FORM = "return output, hookkit.save(...); several outputs are a tuple of their own: return (a, b), hookkit.save(...)"


def output_and_residuals(
    rule: Rule[..., Any], call: Call, returned: Any, kind: str = "forward provider"
) -> tuple[Any, Residuals | None]:
    """The output, and the residuals or None.

    Args:
        rule: the rule.
        call: the call that it takes.
        returned: what its provider returned.
        kind: which provider; a meta function may leave the residuals out.

    Raises:
        GradientError: if ``hookkit.save(...)`` is not where it belongs, is missing, or serves no backward provider.
    """

    def who() -> str:
        return f"{rule.described(kind)} for {call}"

    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Residuals):
        output, residuals = returned
        if _holds_residuals(output):
            raise GradientError(f"{who()} returned hookkit.save(...) twice: {_FORM}")
        if kind == "forward provider" and rule.backward_provider is None and residuals._names:
            raise GradientError(
                f"{who()} keeps {', '.join(residuals._names)} by hookkit.save(...), and the rule has no backward "
                "provider that would read it: declare one, @rule.backward, or return the output alone, and "
                "thunder differentiates it"
            )
        return output, residuals
    if isinstance(returned, Residuals):
        raise GradientError(f"{who()} returned hookkit.save(...) without an output: {_FORM}")
    if _holds_residuals(returned):
        raise GradientError(f"{who()} returned hookkit.save(...) in the wrong place, as {_shape_of(returned)}: {_FORM}")
    if kind == "forward provider" and rule.backward_provider is not None and not rule.ships:
        if returned is None:
            raise GradientError(f"{who()} returned None: is its return statement missing? It has to {_FORM}")
        if type(returned) is tuple and len(returned) == 2 and isinstance(returned[1], tuple | list | dict):
            raise GradientError(
                f"{who()} returned a {type(returned[1]).__name__} beside its output, and no hookkit.save(...), and the "
                f"rule has a backward provider. What that reads is kept by name: {_FORM}. If it reads nothing, and the "
                f"{type(returned[1]).__name__} is part of the output: return (a, b), hookkit.save()"
            )
    return returned, None


def check_takes(rule: Rule[..., Any], call: Call, outputs: int) -> None:
    """Refuse a backward provider that does not take one gradient for each output.

    Raises:
        GradientError: with its signature.
    """
    provider = rule.backward_provider
    signature = signature_of(provider) if provider is not None else None
    if signature is None:
        return
    leading = ["call", "saved"] if rule.pass_call else ["saved"]
    names = ["grad"] if outputs == 1 else [f"grad{i}" for i in range(outputs)]
    try:
        signature.bind(*leading, *names)
    except TypeError:
        plural = "the gradient of its output" if outputs == 1 else f"the gradients of its {outputs} outputs"
        raise GradientError(
            f"{rule.described('backward provider')} for {call} takes {signature}, and the call gives it the "
            f"residuals and {plural}: declare it as ({', '.join([*leading, *names])})"
        ) from None


def _holds_residuals(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_residuals, value.values()))
    return isinstance(value, Residuals) or (isinstance(value, tuple | list) and any(map(_holds_residuals, value)))


def _shape_of(returned: Any) -> str:
    if not isinstance(returned, tuple | list):
        return f"a part of a {type(returned).__name__}"
    items = ["save(...)" if isinstance(r, Residuals) else "..." for r in returned]
    return f"({', '.join(items)})" if isinstance(returned, tuple) else f"[{', '.join(items)}]"
