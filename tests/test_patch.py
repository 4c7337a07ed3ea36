"""hookkit.patch: what does not fit the installed torch or thunder is left out, and named; no program is wrong."""

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import warnings
from pathlib import Path

import attrs
import pytest
import thunder
import thunder.dynamo
import torch
from agreement import assert_same, run

import hookkit
from hookkit import install, patch

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from contract import CASES

PATCHES = install._patches()
NEEDED = [p for p in PATCHES if p.needed]
OTHERS = [p for p in PATCHES if not p.needed and not p.optional]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]


def vector():
    return torch.linspace(0.5, 2, 4, requires_grad=True)


def program(x):
    return Scaled.apply(x) * 2


@contextlib.contextmanager
def enabled_with(patches):
    """The time in which these patches, and no others, make up hookkit."""
    hookkit.disable()
    install._warned.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(install, "_patches", lambda: patches)
        try:
            with pytest.warns(hookkit.PluginWarning) as caught:
                hookkit.enable()
            yield [str(w.message) for w in caught]
        finally:
            hookkit.disable()
    hookkit.enable()


def without(gone):
    """Hookkit where the target of a patch has another name."""
    return enabled_with([attrs.evolve(p, target=renamed(p)) if p is gone else p for p in PATCHES])


def renamed(gone):
    """Another name for what a patch replaces, or for what holds what it adds."""
    module, _, name = gone.target.partition("|")[0].partition(":")
    if gone.adds:
        return f"{module}:moved.{name}"
    return f"{module}:{name[:-1]}_of_before]" if name.endswith("]") else f"{module}:{name}_of_before"


class Hit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("hits", torch.zeros(()))

    def forward(self, x):
        self.hits = self.hits + 1
        return Scaled.apply(x) * self.hits


def concat(x):
    parts = [x, x * 2]
    y = torch.cat(parts)
    parts[1] = x * 3
    return Scaled.apply(y)


def branches(x):
    return Scaled.apply(x) * (2 if x.sum().item() > 0 else 3)


def mixes(x):
    return x.sum() * Scaled.apply(x)


STORE = [2.0]


def compares(x):
    return Scaled.apply(x) * (2 if STORE == [2.0] else 3)


# What needs each patch, so that it is wrong, or an error, where nothing stands for it.
CONCERNED = {
    "thunder.core.symbol:Symbol.bind": concat,
    "thunder.core.proxies:NumberProxy.__gt__": branches,
    "thunder.clang:maybe_broadcast": mixes,
    "thunder.core.interpreter:_default_opcode_handler_map[COMPARE_OP]": compares,
    "thunder.core.module:ThunderModule.set_buffer": Hit(),
}


def outcome(function, arguments):
    try:
        return run(function, arguments), None
    except Exception as error:
        return None, error


def assert_right_or_refused(function, arguments):
    """Compares with eager PyTorch; an error is right where eager raises one, or hookkit refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, eager_error = outcome(function, arguments)
        found, error = outcome(thunder.jit(function), arguments)
    if error is None:
        assert eager_error is None
        assert_same(found, expected)
    else:
        assert isinstance(error, hookkit.HookError) or type(error) is type(eager_error), error


@pytest.mark.parametrize("gone", NEEDED, ids=str)
def test_without_what_is_needed_a_program_is_refused_in_words_and_torch_is_untouched(gone):
    with without(gone) as messages:
        (message,) = messages
        assert f"{renamed(gone)} is not there" in message and gone.lost in message
        with pytest.raises(hookkit.HookError, match="hookkit cannot work with torch") as refused:
            thunder.jit(program)(vector())
        assert gone.lost in str(refused.value)
        x = vector()
        program(x).sum().backward()
        assert torch.equal(x.grad, 200 * x.detach())
    x = vector()
    thunder.jit(program)(x).sum().backward()
    torch.testing.assert_close(x.grad, 200 * x.detach())


SOME = [case for case in CASES[::12] if not any(callable(a) for a in case.make()[1])]


@pytest.mark.parametrize("gone", OTHERS, ids=str)
def test_without_another_patch_programs_are_right_or_refused(gone):
    with without(gone) as messages:
        (message,) = messages
        assert gone.lost in message
        assert [left.patch.lost for left in patch.left_out] == [gone.lost]
        for case in SOME:
            assert_right_or_refused(*case.make())
        if gone.target in CONCERNED:
            with pytest.raises(hookkit.HookError, match="cannot be compiled right with torch"):
                thunder.jit(CONCERNED[gone.target])(vector())


def test_of_a_patch_whose_target_takes_other_arguments_the_signatures_are_named():
    stock = thunder.clang.maybe_broadcast

    def newer(*args, policy=None, **options):
        return stock(*args, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        hookkit.disable()
        monkeypatch.setattr(thunder.clang, "maybe_broadcast", newer)
        with enabled_with(PATCHES) as (message,):
            assert "thunder.clang:maybe_broadcast takes (*args, policy, **options)" in message
            assert "expected (*args, treat_cpu_scalar_tensors_as_numbers, expand_fn)" in message
            assert thunder.clang.maybe_broadcast is newer
            assert_right_or_refused(program, (vector(),))
            assert_right_or_refused(mixes, (vector(),))
        hookkit.disable()
    hookkit.enable()


@pytest.mark.parametrize("changed", [p for p in PATCHES if p.takes and not p.optional], ids=str)
def test_each_patch_notices_another_signature(changed):
    hookkit.disable()
    holder, key = changed.locate()
    stock = patch._held(holder, key)

    @functools.wraps(stock)
    def newer(*everything, added_later=None, **options):
        return stock(*everything, **options)

    newer.__signature__ = inspect.signature(lambda *everything, added_later=None, **options: None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        (monkeypatch.setitem if isinstance(holder, dict) else monkeypatch.setattr)(holder, key, newer)
        with pytest.raises(patch.Misfit, match=r"takes \(\*everything, added_later, \*\*options\); expected"):
            changed.is_wanted()
    assert changed.is_wanted()


def test_a_module_of_the_engine_that_cannot_be_imported_is_named(monkeypatch):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "hookkit.mends.dynamo":
                raise ImportError("torch has moved")
            return None

    hookkit.disable()
    monkeypatch.delitem(sys.modules, "hookkit.mends.dynamo")
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    install._warned.clear()
    with pytest.warns(hookkit.PluginWarning, match=r"mends\.dynamo cannot be imported .*torch has moved"):
        hookkit.enable()
    assert_right_or_refused(program, (vector(),))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="thunderfx is not known to be right for this program"):
        thunder.dynamo.thunderfx(program)(vector())
    torch._dynamo.reset()
    x = vector()
    thunder.dynamo.thunderfx(lambda x: (x * 2).sum())(x).backward()
    assert x.grad.tolist() == [2, 2, 2, 2]
    hookkit.disable()
    monkeypatch.undo()
    importlib.import_module("hookkit.mends.dynamo")
    hookkit.enable()


def test_the_warning_is_given_once_in_a_process():
    gone = attrs.evolve(OTHERS[-1], target="thunder:nowhere")
    with enabled_with([gone]), warnings.catch_warnings():
        warnings.simplefilter("error")
        hookkit.disable()
        hookkit.enable()
        assert patch.left_out


def test_two_patches_of_one_attribute_compose():
    log = []

    def noting(name):
        def replacement(stock, *args, **options):
            log.append(name)
            return stock(*args, **options)

        return patch.Patch("thunder.clang:maybe_broadcast", patch.around(replacement), "")

    stock = thunder.clang.maybe_broadcast
    installed = [noting("inner").install(), noting("outer").install()]
    thunder.jit(lambda x: x + torch.ones(1))(vector())
    for one in reversed(installed):
        one.remove()
    assert log[:2] == ["outer", "inner"]
    assert thunder.clang.maybe_broadcast is stock


def test_threads_see_what_is_left_out():
    with without(OTHERS[-1]):
        errors = []

        def work():
            try:
                assert_right_or_refused(program, (vector(),))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors


def test_what_a_class_inherits_is_wrapped_and_inherited_again():
    class Base:
        def value(self):
            return 1

    class Derived(Base):
        pass

    module = type(sys)("module_of_the_test")
    module.Derived = Derived
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "module_of_the_test", module)
        doubled = patch.Patch(
            "module_of_the_test:Derived.value", patch.around_method(lambda self, stock: 2 * stock(self)), ""
        )
        assert doubled.is_wanted()
        installed = doubled.install()
    assert (Derived().value(), Base().value()) == (2, 1)
    installed.remove()
    assert "value" not in vars(Derived)
    assert Derived().value() == 1
