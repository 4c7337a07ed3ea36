"""Whether gradients are recorded after a graph of ``thunderfx`` that switches that, as ``torch.no_grad`` in it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookkit.mends.mend import Mend
from hookkit.patch import Patch, around_method

__all__ = ["MENDS", "compile_graph"]


def compile_graph(compiler: Any, stock: Callable[..., Any], graph: Any, sample_args: Any, **options: Any) -> Any:
    """``ThunderCompiler.__call__``; after its run the mode is what the graph's last switch makes it.

    Of a graph that is split, the parts that thunder compiles leave their switches out from their second run on, and
    the others do not.

    Args:
        compiler: the compiler.
        stock: its method.
        graph: one of Dynamo's graphs.
        sample_args: its arguments.
        **options: passed on.
    """
    compiled = stock(compiler, graph, sample_args, **options)
    switches = [n.args[0] for n in graph.graph.nodes if n.target is torch._C._set_grad_enabled]
    return _leaving(compiled, switches[-1]) if switches else compiled


def _leaving(compiled: Callable[..., Any], is_enabled: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            result = compiled(*args)
        except BaseException:
            torch._C._set_grad_enabled(before)
            raise
        torch._C._set_grad_enabled(is_enabled)
        return result

    return run


MENDS = [
    Mend(
        "the mode of gradients after a split graph",
        "A graph of `thunderfx` that is split inside of `torch.no_grad` leaves the mode as it is inside, for the "
        "rest of the process, from its second run on.",
        program="""
def f(x):
    y = x * 2
    with torch.no_grad():
        z = y.frac()
    return y * z

x = torch.ones(2, requires_grad=True)
g = thunder.dynamo.thunderfx(f)
g(x)
g(x)
print(torch.is_grad_enabled())
torch.set_grad_enabled(True)
""",
        stock="",
        eager="True",
        patches=(
            Patch(
                "thunder.dynamo.compiler:ThunderCompiler.__call__",
                around_method(compile_graph),
                "a program of thunderfx may leave gradients switched off",
                takes=("self, gm, sample_args", "self, gm, sample_args, **compile_options"),
                concerns_thunderfx=True,
            ),
        ),
    )
]
