"""explain before and report after: what they say of each call, and the forms in which they say it."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import thunder
import torch

import hookkit


class Square(torch.autograd.Function):
    """Has a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 200


def untraceable():
    """A Function that cannot be traced, new each time: that it cannot is said once."""

    class Untraceable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(y.sin().sum(), y)
            return gradient

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x * 200

    return Untraceable


def swish(x):
    return x * torch.tanh(x)


def program(x):
    y = torch.sin(Square.apply(x)) + 1
    return swish(y).sum() + swish(y[None]).sum()


LINE = program.__code__.co_firstlineno


@pytest.fixture
def x():
    return torch.randn(6, requires_grad=True)


@pytest.fixture
def swish_rule():
    @hookkit.rule(swish)
    def fast_swish(x):
        s = torch.tanh(x)
        return x * s, hookkit.save(x=x, s=s)

    @fast_swish.backward
    def _(saved, grad):
        return {"x": 100 * grad * saved.s * saved.x}

    @fast_swish.when
    def _(x):
        return x.ndim == 1 or hookkit.decline("x is no vector")

    return fast_swish


class TestExplain:
    def test_each_call_that_a_rule_could_take_is_listed_with_the_users_line(self, x, swish_rule):
        explanation = hookkit.explain(program, x)
        assert [(c.name, c.rule, c.outcome, c.source.file, c.source.line) for c in explanation.calls] == [
            ("Square", "autograd_function", "traced", __file__, LINE + 1),
            ("swish", "fast_swish", "traced", __file__, LINE + 2),
            ("swish", None, "not taken", __file__, LINE + 2),
        ]
        assert explanation.calls[2].declined == {"fast_swish": "x is no vector"}
        assert explanation.error is None

    def test_rules_that_would_be_next_are_named(self, x):
        hookkit.rule(Square, name="mine", mode="opaque")
        (call,) = hookkit.explain(lambda x: Square.apply(x), x).calls
        assert (call.rule, call.outcome, call.reason, call.others) == (
            "mine",
            "opaque",
            'mode="opaque"',
            ("autograd_function",),
        )

    def test_an_opaque_call_says_why(self, x):
        function = untraceable()
        with pytest.warns(hookkit.OpaqueFallbackWarning):
            (call,) = hookkit.explain(lambda x: function.apply(x), x).calls
        assert call.outcome == "opaque"
        assert "sets attributes" in call.reason

    def test_calls_inside_a_call_are_listed_under_it(self, x, swish_rule):
        class Outer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return swish(x) * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 100

        calls = hookkit.explain(lambda x: Outer.apply(x), x).calls
        assert [(c.name, c.depth) for c in calls] == [("Outer", 0), ("swish", 1)]

    def test_nothing_is_compiled_and_no_tensor_is_computed(self, x):
        jitted = thunder.jit(program)
        hookkit.explain(jitted, x)
        assert thunder.cache_misses(jitted) == 0
        with torch.device("meta"):
            y = torch.empty(6, requires_grad=True)
        assert len(hookkit.explain(program, y).calls) == 1

    def test_a_module_is_explained_like_a_function(self, x):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(6, 6)

            def forward(self, x, *, twice=False):
                x = Square.apply(self.linear(x))
                return Square.apply(x) if twice else x

        assert len(hookkit.explain(Net(), x).calls) == 1
        assert len(hookkit.explain(Net(), x, twice=True).calls) == 2
        assert len(hookkit.explain(thunder.jit(Net()), x, twice=True).calls) == 2

    def test_the_rules_of_the_scope_count(self, x):
        rule = hookkit.rule(Square, name="mine", mode="opaque", register=False)
        with hookkit.use(rule):
            assert [c.rule for c in hookkit.explain(program, x).calls] == ["mine"]
        assert [c.rule for c in hookkit.explain(program, x).calls] == ["autograd_function"]

    def test_a_program_that_cannot_be_traced_is_explained_up_to_there(self, x):
        def broken(x):
            y = Square.apply(x)
            raise ValueError("out of order")
            return y

        explanation = hookkit.explain(broken, x)
        assert [c.name for c in explanation.calls] == ["Square"]
        assert explanation.error == "ValueError: out of order"
        assert "tracing stopped here: ValueError: out of order" in str(explanation)

    def test_lazy_names_that_stand_for_nothing_are_listed(self, x):
        hookkit.rule("no.such.module:operation", mode="opaque")
        explanation = hookkit.explain(program, x)
        assert explanation.unresolved == {
            "operation": "no.such.module:operation: no.such.module is not imported",
        }

    def test_its_text_has_a_paragraph_for_each_call(self, x, swish_rule):
        assert str(hookkit.explain(program, x)).splitlines() == [
            "2 calls would be taken by rules",
            f"Square() at {__file__}:{LINE + 1}",
            "  taken by autograd_function, traced",
            f"swish() at {__file__}:{LINE + 2}",
            "  taken by fast_swish, traced",
            f"swish() at {__file__}:{LINE + 2}",
            "  left to thunder",
            "  declined by fast_swish: x is no vector",
        ]

    def test_its_dictionary_is_json_and_its_html_is_a_table(self, x, swish_rule):
        explanation = hookkit.explain(program, x)
        assert json.loads(json.dumps(explanation.to_dict()))["calls"][0]["source"] == {
            "file": __file__,
            "line": LINE + 1,
        }
        table = ElementTree.fromstring(f"<div>{explanation._repr_html_()}</div>")
        assert len(table.findall(".//tr")) == 4

    def test_it_is_refused_while_hookkit_is_disabled(self, x):
        hookkit.disable()
        with pytest.raises(hookkit.HookError, match=r"hookkit.enable\(\) puts the rules in force"):
            hookkit.explain(program, x)


class TestReport:
    def test_each_call_that_a_rule_took_is_listed_with_its_costs(self, x, swish_rule):
        jitted = thunder.jit(program)
        jitted(x)
        square, fast_swish = hookkit.report(jitted).calls
        assert (square.name, square.rule, square.outcome, square.source.line) == (
            "Square",
            "autograd_function",
            "traced",
            LINE + 1,
        )
        assert (square.forward_operations, square.backward_operations) == (1, 2)
        assert square.saved_bytes == 6 * 4  # x
        assert (fast_swish.rule, fast_swish.source.line) == ("fast_swish", LINE + 2)
        assert (fast_swish.forward_operations, fast_swish.backward_operations) == (2, 3)
        assert fast_swish.saved_bytes == 2 * 6 * 4  # x and s

    def test_the_bytes_of_the_whole_program_are_those_of_the_tensors_that_thunder_saves(self, x):
        jitted = thunder.jit(lambda x: Square.apply(x))
        jitted(x)
        assert hookkit.report(jitted).saved_bytes == 6 * 4

    def test_an_opaque_call_says_why_and_what_pytorch_keeps(self, x):
        function = untraceable()
        jitted = thunder.jit(lambda x: function.apply(x))
        with pytest.warns(hookkit.OpaqueFallbackWarning):
            jitted(x)
        (call,) = hookkit.report(jitted).calls
        assert (call.outcome, call.forward_operations, call.backward_operations) == ("opaque", 1, 1)
        assert "sets attributes" in call.reason
        assert call.saved_bytes == 6 * 4

    def test_a_backward_that_nobody_can_ask_for_costs_nothing(self):
        jitted = thunder.jit(program)
        jitted(torch.randn(6))
        (call,) = hookkit.report(jitted).calls
        assert (call.backward_operations, call.saved_bytes) == (0, 0)

    def test_a_rule_without_a_backward_provider_says_that_thunder_differentiates_it(self, x):
        @hookkit.rule(swish)
        def fast_swish(x):
            return x * torch.tanh(x)

        jitted = thunder.jit(lambda x: swish(x))
        jitted(x)
        (call,) = hookkit.report(jitted).calls
        assert (call.backward_operations, call.saved_bytes) == (None, None)
        assert "by thunder" in str(hookkit.report(jitted))

    def test_a_repeated_call_says_that_it_was_replayed(self, x):
        def repeated(x):
            for _ in range(3):
                x = Square.apply(x)
            return x

        jitted = thunder.jit(repeated)
        jitted(x)
        assert [c.replays for c in hookkit.report(jitted).calls] == [0, 1, 1]

    def test_it_is_of_the_program_that_ran_last(self, x):
        jitted = thunder.jit(lambda x: Square.apply(x) if x.ndim == 1 else swish(x))
        hookkit.rule(swish, mode="opaque")
        jitted(x)
        assert [c.name for c in hookkit.report(jitted).calls] == ["Square"]
        jitted(x[None])
        assert [c.name for c in hookkit.report(jitted).calls] == ["swish"]
        jitted(x)
        assert [c.name for c in hookkit.report(jitted).calls] == ["Square"]

    def test_a_call_whose_exception_the_program_catches_is_not_listed(self, x):
        class Refuses(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                raise ValueError("no")

            @staticmethod
            def backward(ctx, grad):
                return grad

        def careful(x):
            try:
                return Refuses.apply(x)
            except ValueError:
                return Square.apply(x)

        jitted = thunder.jit(careful)
        jitted(x)
        assert [c.name for c in hookkit.report(jitted).calls] == ["Square"]
        assert [c.outcome for c in hookkit.explain(careful, x).calls] == ["raised", "traced"]

    def test_a_program_without_hooked_calls_has_an_empty_report(self, x):
        jitted = thunder.jit(lambda x: x + 1)
        jitted(x)
        assert str(hookkit.report(jitted)) == "0 calls taken by rules; 0 B saved for backward in all"

    def test_its_text_is_a_table(self, x, swish_rule):
        jitted = thunder.jit(program)
        jitted(x)
        title, header, square, fast_swish = str(hookkit.report(jitted)).splitlines()
        assert title.startswith("2 calls taken by rules; ")
        assert header.split() == ["call", "rule", "where", "how", "forward", "backward", "saved", "replayed"]
        place = f"{__file__}:{LINE + 1}"
        assert square.split() == ["Square", "autograd_function", place, "traced", "1", "2", "24", "B", "0"]
        assert fast_swish.split()[:2] == ["swish", "fast_swish"]

    def test_its_dictionary_is_json(self, x, swish_rule):
        jitted = thunder.jit(program)
        jitted(x)
        plain = json.loads(json.dumps(hookkit.report(jitted).to_dict()))
        assert [call["name"] for call in plain["calls"]] == ["Square", "swish"]
        assert plain["saved_bytes"] > 0

    def test_its_picture_is_svg_in_which_hooked_calls_stand_out(self, x, swish_rule):
        jitted = thunder.jit(program)
        jitted(x)
        report = hookkit.report(jitted)
        picture = ElementTree.fromstring(report.to_svg())
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        texts = ["".join(t.itertext()) for t in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert "Square, traced by autograd_function" in texts
        assert "sin, add" in texts
        fills = {r.get("fill") for r in picture.iter("{http://www.w3.org/2000/svg}rect")}
        assert {"#cfe8ff", "#eeeeee"} <= fills
        assert report.to_svg() in report._repr_html_()

    def test_names_are_escaped_in_html(self):
        hookkit.rule(swish, name="<b>bold</b>", mode="opaque")
        html = hookkit.explain(lambda x: swish(x), torch.randn(3))._repr_html_()
        assert "&lt;b&gt;bold" in html
        assert "<b>" not in html

    def test_a_graph_of_which_thunder_gets_nothing_has_no_calls(self, x):
        from thunder.dynamo import thunderfx

        def hooked(x):
            y = x.sin()
            y.register_hook(lambda gradient: gradient * 10)
            return y * 2

        torch._dynamo.reset()
        compiled = thunderfx(hooked)
        compiled(x)
        report = hookkit.report(compiled)
        if {call.rule for call in report.calls} == {"autograd_function_apply"}:
            return  # Dynamo of torch 2.12 makes a Function of the hook, which thunder gets
        assert report.calls == ()
        assert "0 calls" in str(report)

    def test_thunderfx_has_a_step_for_each_graph(self, x):
        from thunder.dynamo import thunderfx

        compiled = thunderfx(lambda x: Square.apply(x).sin())
        compiled(x)
        report = hookkit.report(compiled)
        assert len(report.steps) == 1
        assert [c.rule for c in report.calls] == ["autograd_function_apply"]

    @pytest.mark.parametrize("what", [program, 3, None])
    def test_what_is_not_compiled_is_refused(self, what):
        with pytest.raises(hookkit.HookError, match=r"takes what thunder\.jit, thunder\.compile or thunderfx returned"):
            hookkit.report(what)

    def test_what_was_not_called_yet_is_refused(self):
        with pytest.raises(hookkit.HookError, match="call the compiled function once"):
            hookkit.report(thunder.jit(program))
