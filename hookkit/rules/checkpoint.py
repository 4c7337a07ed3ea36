"""torch.utils.checkpoint: what is computed inside is not kept for the backward, which computes it again.

The arguments are those of ``torch.utils.checkpoint.checkpoint``; ``checkpoint_sequential`` calls it. What is computed
again are the operations of the trace: it cannot differ from the first time, and stops where nothing more is needed, so
``determinism_check``, ``debug`` and ``early_stop`` change nothing. Random numbers are the same in any case.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

import hookkit
from hookkit.rules._names import of_torch

__all__ = ["checkpoint_rule", "checkpointed", "tag_activation_checkpoint"]


@hookkit.rule(checkpoint, mode="inline", priority=-100)
def checkpoint_rule(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Recomputes in the backward; computes without a gradient if it is reentrant and no argument requires grad."""
    if function is None:  # a decorator, from torch 2.14

        def decorate(decorated: Any) -> Any:
            def checkpointed(*args: Any, **kwargs: Any) -> Any:
                return checkpoint(
                    decorated,
                    *args,
                    use_reentrant=use_reentrant,
                    context_fn=context_fn,
                    determinism_check=determinism_check,
                    debug=debug,
                    early_stop=early_stop,
                    preserve_rng_state=preserve_rng_state,
                    **kwargs,
                )

            return checkpointed

        return decorate
    if use_reentrant is None:
        warnings.warn(
            "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly; in a program compiled by "
            "thunder it is taken to be True",
            stacklevel=1,
        )
        use_reentrant = True
    if context_fn is not noop_context_fn:
        if use_reentrant:
            raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
        raise hookkit.HookError(
            "torch.utils.checkpoint with context_fn is not supported in a program compiled by thunder: what it does is "
            "not known while the program is traced. Leave it out, or call hookkit.recompute on the parts of the "
            "program that shall be recomputed."
        )
    if not use_reentrant:
        if determinism_check not in ("default", "none"):
            raise ValueError(f"determinism_check should be one of ['default', 'none'], got {determinism_check}")
        return hookkit.recompute(function, *args, **kwargs)
    if debug:
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return _as_of_a_function(hookkit.recompute(function, *args))
    if torch.is_grad_enabled():
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=1)
    with torch.no_grad():
        return function(*args)


@hookkit.rule(of_torch("utils.checkpoint._checkpoint_impl"), mode="inline", priority=-100)
def checkpointed(function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
    """Calls a function that ``checkpoint`` has decorated (torch 2.14 and later)."""
    return checkpoint(function, *args, **options, **kwargs)


def _as_of_a_function(output: Any) -> Any:
    """What a reentrant checkpoint returns, which is a Function: tensors inside of containers are not tracked."""
    if type(output) is tuple:
        return tuple([item if isinstance(item, torch.Tensor) else _detached(item) for item in output])
    return output if isinstance(output, torch.Tensor) else _detached(output)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return type(value)({key: _detached(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _detached(getattr(value, name)) for name in fields})
    return value


# What Dynamo puts in the place of checkpoint, and what thunderfx puts in the place of that inside another one.
TAGS = ["torch.ops:higher_order.tag_activation_checkpoint", "thunder.torch:checkpoint"]


@hookkit.rule(TAGS, mode="inline", priority=-100)
def tag_activation_checkpoint(gmod: Any, *args: Any, **kwargs: Any) -> Any:
    """Recomputes what Dynamo has found to be checkpointed, in either form; it has looked at the options."""
    return hookkit.recompute(gmod, *args)
