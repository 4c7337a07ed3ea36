"""Transforms of functions that a program calls: ``torch.vmap``, ``torch.func``, ``torch.autograd.functional``.

Each call of a transformed function is one operator, which PyTorch runs. Tensors that the function captures are among
its arguments, and gradients of every order go through.
"""

from __future__ import annotations

from typing import Any

import torch

import hookkit
from hookkit.rules._names import of_torch
from hookkit.transforming import generator_states, generators_in, made_by_transform, recorded

__all__ = [
    "autograd_derivative",
    "autograd_grad",
    "direct",
    "linearize",
    "pulled_back",
    "pushed_forward",
    "transform",
    "transformed",
    "vjp",
]

# What makes of a function another one.
MAKERS = of_torch(
    "vmap",
    *(f"func.{name}" for name in ("grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "functionalize")),
)

# What calls a function, and returns tensors.
DIRECT = of_torch(
    "func.functional_call",
    "func.jvp",
    *(f"autograd.functional.{name}" for name in ("hessian", "hvp", "jacobian", "jvp", "vhp", "vjp")),
)


def transformed_function(maker: Any, function: Any, options: Any, args: Any, kwargs: Any) -> Any:
    """Transforms a function, and calls it.

    Args:
        maker: the transform.
        function: what is transformed.
        options: the other arguments of the transform, positional and by keyword.
        args: what the transformed function is called with.
        kwargs: the same, by keyword.
    """
    positional, named = options
    return maker(function, *positional, **named)(*args, **kwargs)


def value(function: Any, primals: Any, has_aux: bool) -> Any:
    """What ``torch.func.vjp`` returns beside the function, and the random numbers that it began with."""
    states = generator_states()
    returned: Any = torch.func.vjp(function, *primals, has_aux=has_aux)
    return states, (returned[0], returned[2]) if has_aux else returned[0]


def pull_back(states: Any, function: Any, primals: Any, has_aux: bool, cotangents: Any) -> Any:
    """What the function that ``torch.func.vjp`` returns makes of cotangents."""
    with generators_in(states):
        return torch.func.vjp(function, *primals, has_aux=has_aux)[1](cotangents)


def push_forward(function: Any, primals: Any, tangents: Any) -> Any:
    """What the function that ``torch.func.linearize`` returns makes of tangents."""
    return torch.func.linearize(function, *primals)[1](*tangents)


def value_of_linearized(function: Any, primals: Any) -> Any:
    """What ``torch.func.linearize`` returns beside the function."""
    return torch.func.linearize(function, *primals)[0]


def derivative(function: Any, inputs: Any, operands: Any, cotangents: Any, options: Any) -> Any:
    """Runs a part of a program, and differentiates it.

    Args:
        function: what leads from the inputs to the outputs.
        inputs: a tensor, a sequence of tensors or a dict.
        operands: what the function reads besides.
        cotangents: what ``torch.autograd.grad`` takes as ``grad_outputs``.
        options: its other options.
    """
    by_name = inputs if isinstance(inputs, dict) else None
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs if by_name is None else by_name.values())
    with torch.enable_grad():
        outputs, given = function(given, operands)
    found = torch.autograd.grad(outputs, given, cotangents, **options)
    return found if by_name is None else dict(zip(by_name, found, strict=True))


OPERATORS: Any = {"mode": "opaque", "captures": True, "priority": -100}
transformed = hookkit.rule([transformed_function, made_by_transform], name="transformed", **OPERATORS)
direct = hookkit.rule(DIRECT, **OPERATORS)
values = hookkit.rule([value, value_of_linearized], **OPERATORS)
pulled_back = hookkit.rule(pull_back, name="vjp", **OPERATORS)
pushed_forward = hookkit.rule(push_forward, name="jvp", **OPERATORS)


@hookkit.rule(MAKERS, mode="inline", pass_call=True, priority=-100)
def transform(call: hookkit.Call, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of which each call is one operator."""
    maker: Any = call.callable

    def function(*given: Any, **named: Any) -> Any:
        return transformed_function(maker, func, (args, kwargs), given, named)

    return function


@hookkit.rule(of_torch("func.vjp"), mode="inline", priority=-100)
def vjp(func: Any, *primals: Any, has_aux: bool = False) -> Any:
    """What a function returns, and a function that computes it again where cotangents are pulled back."""
    states, returned = value(func, primals, has_aux)

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: Any = None) -> Any:
        return pull_back(states, func, primals, has_aux, cotangents)

    return (returned[0], vjp_fn, returned[1]) if has_aux else (returned, vjp_fn)


@hookkit.rule(of_torch("func.linearize"), mode="inline", pass_call=True, priority=-100)
def linearize(call: hookkit.Call, func: Any, *primals: Any) -> Any:
    """What a function returns, and its linear approximation."""
    if torch.is_grad_enabled() and any(isinstance(p, torch.Tensor) and p.requires_grad for p in primals):
        raise hookkit.HookError(
            f"{call} of tensors that require grad is not supported inside a program compiled by thunder: PyTorch takes "
            "what the linear approximation is made of for constants. Use torch.func.jvp, or call it under "
            "torch.no_grad()."
        )

    def jvp_fn(*tangents: Any) -> Any:
        return push_forward(func, primals, tangents)

    return value_of_linearized(func, primals), jvp_fn


autograd_derivative = hookkit.rule(derivative, name="autograd_grad", mode="opaque", priority=-100)


@hookkit.rule(of_torch("autograd.grad"), mode="inline", priority=-100)
def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Differentiates what the program has computed."""
    function, operands = recorded(outputs, inputs)
    options = {
        "create_graph": create_graph,
        "allow_unused": allow_unused,
        "is_grads_batched": is_grads_batched,
        "materialize_grads": materialize_grads,
    }
    return derivative(function, inputs, operands, grad_outputs, options)
