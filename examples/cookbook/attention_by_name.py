"""A flash-attention-shaped function of a package that may not be installed, bound by its name.

What it shows: a lazy target, ``"flashlike.interface:attention"``, which imports nothing; a rule with several
differentiable inputs; residuals as flash attention keeps them, the output and one number a row, from which the backward
makes the weights again; `saved.needs`, so that what nobody asked for is not computed.

The package here is a stand-in made at the end of this file. The rule was declared long before; with a real package it
is the package's import that makes it match.

Run it with ``python examples/cookbook/attention_by_name.py``.
"""

from __future__ import annotations

import sys
import types

import hookkit  # before thunder, which current PyTorch cannot import otherwise

# isort: split
import thunder
import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Scaled products of queries and keys, with the future masked."""
    found = q @ k.mT * scale
    if causal:
        found = found.masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1), float("-inf"))
    return found


@hookkit.rule("flashlike.interface:attention")
def attention_rule(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False):
    """The rule keeps no matrix of weights."""
    found = scores(q, k, scale, causal)
    log_total = torch.logsumexp(found, -1, keepdim=True)
    out = torch.exp(found - log_total) @ v
    return out, hookkit.save(q=q, k=k, v=v, out=out, log_total=log_total, scale=scale, causal=causal)


@attention_rule.backward
def _(saved, grad: Tensor) -> dict[str, Tensor]:
    weights = torch.exp(scores(saved.q, saved.k, saved.scale, saved.causal) - saved.log_total)
    gradients = {}
    if saved.needs["v"]:
        gradients["v"] = weights.mT @ grad
    if saved.needs["q"] or saved.needs["k"]:
        row = (grad * saved.out).sum(-1, keepdim=True)
        inner = weights * (grad @ saved.v.mT - row) * saved.scale
        gradients["q"] = inner @ saved.k
        gradients["k"] = inner.mT @ saved.q
    return gradients


def install_stand_in() -> types.ModuleType:
    """The package, as if it were installed and imported now."""
    package, interface = types.ModuleType("flashlike"), types.ModuleType("flashlike.interface")

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> Tensor:
        return torch.softmax(scores(q, k, scale, causal), -1) @ v

    interface.attention = package.attention = attention
    sys.modules.update({"flashlike": package, "flashlike.interface": interface})
    return package


def main() -> None:
    """Compares the compiled attention with the eager one, for every mask of gradients."""
    torch.manual_seed(0)
    print("before the import:", hookkit.explain(torch.sin, torch.ones(1)).unresolved)
    flashlike = install_stand_in()

    def program(q, k, v):
        return flashlike.attention(q, k, v, 0.3, causal=True)  # a re-export: the same function under another name

    jitted = thunder.jit(program)
    for needs in [(True, True, True), (True, False, False), (False, False, True)]:
        inputs = [torch.randn(2, 3, 6, 4, dtype=torch.float64).requires_grad_(need) for need in needs]
        wanted = [i for i in inputs if i.requires_grad]
        compiled, eager = jitted(*inputs), program(*inputs)
        torch.testing.assert_close(compiled, eager)
        weights = torch.rand_like(eager)
        torch.testing.assert_close(
            torch.autograd.grad(compiled, wanted, weights), torch.autograd.grad(eager, wanted, weights)
        )
    print(hookkit.report(jitted))


if __name__ == "__main__":
    main()
