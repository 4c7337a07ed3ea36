"""What is shown while a program compiles: on a terminal, after a while, until it is compiled."""

import contextlib
import io
import re
import threading
import time

import pytest
import thunder
import torch

import hookkit
from hookkit.engine.interpreter import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def slow(x):
    for _ in range(8):
        x = Double.apply(x)
        time.sleep(0.02)
    return x


@pytest.fixture
def terminal(monkeypatch):
    found = Terminal()
    monkeypatch.setattr(progress, "PATIENCE", 0.03)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("HOOKKIT_PROGRESS", raising=False)
    return found


@contextlib.contextmanager
def watching(terminal):
    """The time in which standard error is the terminal, until nothing more is shown."""
    with contextlib.redirect_stderr(terminal):
        yield
        finished()


def finished():
    for thread in threading.enumerate():
        if thread.name == "hookkit progress":
            thread.join(30)


def test_a_terminal_shows_what_is_done_and_is_clean_afterwards(terminal):
    with watching(terminal):
        thunder.jit(slow)(torch.ones(2, requires_grad=True))
    shown = terminal.getvalue()
    assert re.search(r"\rhookkit: compiling for \d+ s: tracing, [2-8] calls so far", shown)
    assert shown.endswith("\r\x1b[K")


def test_a_program_that_cannot_be_compiled_leaves_the_terminal_clean(terminal):
    def fails(x):
        slow(x)
        return x.grad_fn

    with watching(terminal), pytest.raises(hookkit.HookError):
        thunder.jit(fails)(torch.ones(2, requires_grad=True))
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_explain_shows_it_too(terminal):
    with watching(terminal):
        hookkit.explain(slow, torch.ones(2, requires_grad=True))
    assert re.search("tracing, [2-8] calls so far", terminal.getvalue())


def test_what_is_quick_shows_nothing(terminal, monkeypatch):
    compiled = threading.Event()
    monkeypatch.setattr(progress.time, "sleep", lambda seconds: compiled.wait(30))
    with watching(terminal):
        thunder.jit(lambda x: Double.apply(x))(torch.ones(2))
        compiled.set()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("kind", ["a log", "switched off"])
def test_nothing_is_shown_to_nobody(terminal, monkeypatch, kind):
    if kind == "a log":
        monkeypatch.setattr(terminal, "isatty", lambda: False, raising=False)
    else:
        monkeypatch.setenv("HOOKKIT_PROGRESS", "0")
    before = threading.active_count()
    with contextlib.redirect_stderr(terminal):
        progress.watch(lambda: 0)
    assert threading.active_count() == before
