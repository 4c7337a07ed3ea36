"""hookkit.install: what is installed into thunder, and that all of it is taken out again."""

import sys
from types import ModuleType

import thunder
import torch
from agreement import assert_agrees

import hookkit
from hookkit import install

MISSING = object()


def holders():
    """What hookkit replaces something in, once each."""
    found = [p.locate()[0] for p in install._patches() if p.is_wanted()]
    return {id(holder): holder for holder in found}.values()


def contents(holder):
    """Everything that a module, class or dict holds, by name."""
    return dict(holder) if isinstance(holder, dict) else dict(vars(holder))


def modules_of_thunder():
    """All attributes of all modules of thunder that are imported."""
    return {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "thunder" and isinstance(module, ModuleType)
    }


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]


def test_disable_leaves_everything_that_was_touched_as_it_was():
    hookkit.disable()
    touched = list(holders())
    before, modules = [contents(h) for h in touched], modules_of_thunder()
    hookkit.enable()
    assert any(contents(h) != b for h, b in zip(touched, before, strict=True))
    hookkit.disable()
    for holder, was in zip(touched, before, strict=True):
        now = contents(holder)
        assert {k for k in was.keys() | now.keys() if now.get(k, MISSING) is not was.get(k, MISSING)} == set()
    after = modules_of_thunder()
    for name, was in modules.items():
        changed = {k for k in was.keys() | after[name].keys() if after[name].get(k, MISSING) is not was.get(k, MISSING)}
        assert changed == set(), name


def test_enabling_twice_is_enabling_once():
    hookkit.enable()
    hookkit.enable()
    installed = list(install._installed)
    assert len({(id(p.holder), p.key) for p in installed}) == len(installed)
    hookkit.disable()
    assert not hookkit.is_enabled()


def test_executors_of_the_users_keep_working_with_traced_and_opaque_calls():
    class Opaque(Cube):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(x.detach().numpy() ** 3)

    hookkit.rule(Opaque, mode="opaque").meta(lambda x: torch.empty_like(x))
    x = torch.randn(4, requires_grad=True)
    for function in (Cube, Opaque):
        jitted = thunder.jit(lambda x, f=function: f.apply(x) + 1, executors=["torch"])
        jitted(x).sum().backward()
        torch.testing.assert_close(x.grad, 100 * x.detach())
        x.grad = None


def test_thunder_compile_takes_hookkit_as_a_plugin():
    assert thunder.plugins.get_plugin("hookkit") is install.Plugin
    hookkit.disable()
    install.Plugin().setup_executors()
    assert hookkit.is_enabled()
    assert_agrees(lambda x: Cube.apply(x) * 2, torch.randn(3, requires_grad=True))
