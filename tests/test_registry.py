"""The registry: precedence, conflicts, scopes, what is compiled anew, entry points, threads."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree

import pytest
import thunder
import torch
from agreement import assert_agrees

import hookkit
from hookkit.entry_points import entry_points

PLUGIN = Path(__file__).parent.parent / "examples" / "plugin_package"


class Base(torch.autograd.Function):
    """Has a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


class Derived(Base):
    pass


def operation(x):
    return x * 2


@pytest.fixture
def x():
    return torch.randn(3, requires_grad=True)


def times(factor, target=operation, **options):
    """A rule that makes of x so many x."""

    @hookkit.rule(target, **options)
    def multiple(x):
        return x * factor

    return multiple


def factor_in(jitted, x):
    """By what a compiled function multiplies."""
    return round((jitted(x) / x).mean().item())


def compiled():
    return thunder.jit(lambda x: operation(x))


class TestPrecedence:
    def test_the_higher_priority_wins(self, x):
        times(3, priority=1)
        times(5, priority=2)
        times(7)
        assert factor_in(compiled(), x) == 5

    def test_a_rule_for_one_function_beats_the_shipped_rule_for_all(self, x):
        times(3, Base)
        assert_agrees(lambda x: Base.apply(x), x, eager=lambda x: x * 3)

    def test_the_exact_class_beats_its_base(self, x):
        times(3, Base)
        times(5, Derived)
        assert factor_in(thunder.jit(lambda x: Derived.apply(x)), x) == 5
        assert factor_in(thunder.jit(lambda x: Base.apply(x)), x) == 3

    def test_a_callable_beats_a_predicate(self, x):
        times(5)
        times(3, hookkit.where(lambda call: call.callable is operation))
        assert factor_in(compiled(), x) == 5

    def test_priority_comes_before_specificity(self, x):
        times(5)
        times(3, hookkit.where(lambda call: call.callable is operation), priority=1)
        assert factor_in(compiled(), x) == 3

    def test_predicates_that_tie_are_asked_in_the_order_of_registration(self, x):
        times(3, hookkit.where(lambda call: call.callable is operation))
        times(5, hookkit.where(lambda call: call.callable is operation))
        assert factor_in(compiled(), x) == 3

    def test_a_scope_comes_before_priority(self, x):
        times(3, priority=100)
        scoped = times(5, register=False)
        with hookkit.use(scoped):
            assert factor_in(compiled(), x) == 5

    def test_the_inner_scope_comes_first(self, x):
        outer, inner = times(3, register=False, priority=9), times(5, register=False)
        with hookkit.use(outer), hookkit.use(inner):
            assert factor_in(compiled(), x) == 5

    def test_when_declines_and_the_next_candidate_is_asked(self, x):
        first, second = times(3, priority=2), times(5, priority=1)
        times(7)
        first.when(lambda x: hookkit.decline("not today"))
        second.when(lambda x: False)
        assert factor_in(compiled(), x) == 7

    def test_a_call_that_all_decline_is_thunders(self, x):
        times(3).when(lambda x: hookkit.decline("not today"))
        assert factor_in(compiled(), x) == 2

    def test_an_executor_that_replaces_apply_keeps_its_claim_over_the_shipped_rule(self, x):
        executor = thunder.extend.OperatorExecutor("hookkit_test_executor")
        executor.register_operator(
            "claimed", like=lambda x: thunder.core.proxies.TensorProxy(like=x), fn=lambda x: x * 11, replaces=Base.apply
        )
        jitted = thunder.jit(lambda x: Base.apply(x), executors=[executor])
        assert factor_in(jitted, x.detach()) == 11
        assert not hookkit.report(jitted).calls


class TestConflicts:
    def test_two_rules_for_one_target_and_priority_are_refused_with_both_places(self):
        first = times(3)
        with pytest.raises(hookkit.ConflictError) as caught:
            times(5)
        message = str(caught.value)
        assert f"two rules for {__name__}.operation at priority 0" in message
        assert message.count(f"multiple, declared at {__file__}:{first.declared_at.line}") == 2
        assert "another priority=, or unregister() one" in message
        assert len([r for r in hookkit.rules() if r.name == "multiple"]) == 1

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (Base, Base.apply),
            (Base, f"{__name__}:Base"),
            (operation, f"{__name__}:operation"),
            ([torch.sin, operation], [operation, torch.cos]),
            ("not.imported:name", "not.imported:name"),
            (torch.ops.aten.alias_copy, "torch.ops:aten.alias_copy"),
        ],
    )
    def test_two_names_of_one_target_are_one_target(self, one, other):
        hookkit.rule(one, mode="opaque")
        with pytest.raises(hookkit.ConflictError):
            hookkit.rule(other, mode="opaque")

    def test_a_name_that_is_resolved_later_conflicts_when_a_second_rule_is_registered(self, monkeypatch):
        hookkit.rule("hookkit_no_such_module:op", mode="opaque")
        module = type(sys)("hookkit_no_such_module")
        module.op = operation
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(hookkit.ConflictError):
            times(3)

    def test_a_conflict_that_appears_with_an_import_is_told_when_the_call_is_met(self, monkeypatch, x):
        times(3, "hookkit_no_such_module:op")
        times(5)
        module = type(sys)("hookkit_no_such_module")
        module.op = operation
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(hookkit.ConflictError):
            compiled()(x)

    @pytest.mark.parametrize(
        ("provider", "why"),
        [
            (lambda x, amount: x, "argument 1 is called 'amount', in the target 'factor'"),
            (lambda x, factor=3: x, "its default is 3 for 'factor'; the target's is 2"),
        ],
    )
    def test_a_provider_that_does_not_fit_is_told_when_its_name_resolves(self, monkeypatch, x, provider, why):
        def scaled(x, factor=2):
            return x * factor

        hookkit.rule("hookkit_no_such_module:op")(provider)
        module = type(sys)("hookkit_no_such_module")
        module.op = scaled
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(hookkit.RegistrationError, match=why):
            thunder.jit(lambda x: scaled(x))(x)

    def test_a_target_is_free_again_when_its_rule_is_unregistered(self):
        times(3).unregister()
        times(5)

    def test_unregistering_twice_is_refused(self):
        rule = times(3)
        rule.unregister()
        with pytest.raises(hookkit.RegistrationError, match=f"declared at {re.escape(__file__)}:.*is not registered"):
            rule.unregister()

    def test_a_scope_with_two_equal_rules_is_refused(self):
        first, second = times(3, register=False), times(5, register=False)
        with pytest.raises(hookkit.ConflictError), hookkit.use(first, second):
            pass


class TestScopes:
    def test_a_rule_is_in_force_inside_its_scope_only(self, x):
        scoped, jitted = times(3, register=False), compiled()
        assert factor_in(jitted, x) == 2
        with hookkit.use(scoped):
            assert scoped in hookkit.rules()
            assert factor_in(jitted, x) == 3
        assert scoped not in hookkit.rules()
        assert factor_in(jitted, x) == 2

    def test_a_rule_can_be_left_out_and_taken_in_again(self, x):
        rule, jitted = times(3), compiled()
        with hookkit.use(without=[rule]):
            assert factor_in(jitted, x) == 2
            with hookkit.use(rule):
                assert factor_in(jitted, x) == 3
            assert factor_in(jitted, x) == 2
        assert factor_in(jitted, x) == 3

    def test_a_shipped_rule_can_be_left_out(self, x):
        shipped = [r for r in hookkit.rules() if r.name == "autograd_function"]
        jitted = thunder.jit(lambda x: Base.apply(x))
        with hookkit.use(without=shipped):
            jitted(x)
            assert not hookkit.report(jitted).calls
        jitted(x)
        assert [c.rule for c in hookkit.report(jitted).calls] == ["autograd_function"]

    def test_a_scope_ends_with_an_exception(self):
        scoped = times(3, register=False)
        with pytest.raises(ZeroDivisionError), hookkit.use(scoped):
            raise ZeroDivisionError
        assert scoped not in hookkit.rules()

    def test_asyncio_tasks_do_not_see_each_others_scopes(self, x):
        async def measure(factor):
            with hookkit.use(times(factor, register=False)):
                await asyncio.sleep(0.01)
                found = factor_in(compiled(), x)
                await asyncio.sleep(0.01)
                return found, factor_in(compiled(), x)

        async def main():
            return await asyncio.gather(*(measure(factor) for factor in (3, 5, 7)))

        assert asyncio.run(main()) == [(3, 3), (5, 5), (7, 7)]

    def test_what_is_no_rule_is_refused(self):
        with (
            pytest.raises(hookkit.RegistrationError, match=r"takes rules, got <function operation"),
            hookkit.use(operation),
        ):
            pass
        with pytest.raises(hookkit.RegistrationError, match=r"takes rules, got 3"), hookkit.use(without=[3]):
            pass


class TestWhatIsCompiledAnew:
    def test_a_program_is_traced_once_for_each_set_of_rules(self, x):
        rule, jitted = times(3, register=False), compiled()
        for _ in range(3):
            assert factor_in(jitted, x) == 2
            with hookkit.use(rule):
                assert factor_in(jitted, x) == 3
        assert thunder.cache_misses(jitted) == 2

    def test_registering_and_unregistering_are_seen_by_the_next_call(self, x):
        jitted = compiled()
        assert factor_in(jitted, x) == 2
        rule = times(3)
        assert factor_in(jitted, x) == 3
        rule.unregister()
        assert factor_in(jitted, x) == 2
        assert thunder.cache_misses(jitted) == 2

    def test_a_program_compiled_without_hookkit_is_not_run_under_its_rules(self, x):
        times(3)
        jitted = compiled()
        hookkit.disable()
        assert factor_in(jitted, x) == 2
        hookkit.enable()
        assert factor_in(jitted, x) == 3
        hookkit.disable()
        assert factor_in(jitted, x) == 2
        assert thunder.cache_misses(jitted) == 2

    def test_disabling_takes_the_rules_out_of_thunders_record(self):
        enabled = thunder._get_cache_info
        hookkit.disable()
        assert thunder._get_cache_info is not enabled
        assert thunder._get_cache_info.__module__ == "thunder"


class TestEntryPoints:
    @pytest.fixture
    def install(self, tmp_path, monkeypatch):
        """Puts distributions with an entry point on the path of a program, and runs one."""

        def install(name, body):
            module = f"{name.replace('-', '_')}_rules"
            (tmp_path / f"{module}.py").write_text(body)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[hookkit.rules]\n{name}-point = {module}:register\n")

        monkeypatch.syspath_prepend(tmp_path)
        return install

    GOOD = "import hookkit\ndef register():\n    hookkit.rule('some.where:good', mode='opaque', name='good')\n"

    def run(self, program, **environment):
        """Runs a program in a new interpreter with this one's path."""
        paths = os.pathsep.join([*(p for p in sys.path if p), str(Path(hookkit.__file__).parent.parent)])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-W", "default::hookkit.errors.PluginWarning", "-c", program],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    NAMES = "import hookkit; print(*[r.name for r in hookkit.rules()])"

    def test_a_distributions_rules_are_there(self, install):
        install("good-rules", self.GOOD)
        assert self.run(self.NAMES)[0][-1] == "good"

    def test_they_are_registered_once_and_before_the_first_compilation(self, install):
        install("good-rules", "print('called')\n" + self.GOOD)
        program = (
            "import hookkit, thunder, torch\n"
            "print('imported')\n"
            "for _ in range(2):\n"
            "    thunder.jit(lambda x: x + 1)(torch.ones(2))\n"
            "print(sum(r.name == 'good' for r in hookkit.rules()))\n"
        )
        assert self.run(program)[0] == ["imported", "called", "1"]

    def test_a_fault_is_a_warning_that_names_the_distribution_and_leaves_the_others_alone(self, install):
        install("bad-rules", self.GOOD.replace("good", "bad") + "    raise ValueError('out of order')\n")
        install("good-rules", self.GOOD)
        install("worse-rules", "import no_such_module_at_all\n")
        names, messages = self.run(self.NAMES)
        assert "good" in names
        assert "bad" not in names
        assert "the rules of the distribution bad-rules are not registered" in messages
        assert "raised ValueError: out of order. HOOKKIT_DISABLE_PLUGINS=bad-rules-point leaves it out." in messages
        assert "the distribution worse-rules" in messages

    @pytest.mark.parametrize("named", ["good-rules", "good-rules-point", "Good_Rules", " other , good-rules "])
    def test_an_environment_variable_names_those_to_leave_out(self, install, monkeypatch, named):
        install("good-rules", self.GOOD)
        monkeypatch.setenv("HOOKKIT_DISABLE_PLUGINS", named)
        assert [out for point, out in entry_points() if point.name == "good-rules-point"] == [True]

    def test_what_is_left_out_is_not_registered(self, install):
        install("good-rules", self.GOOD)
        assert "good" not in self.run(self.NAMES, HOOKKIT_DISABLE_PLUGINS="good-rules")[0]

    def test_the_example_package_is_installed_and_its_rule_used(self, tmp_path):
        copytree(PLUGIN, tmp_path / "package")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run(
            [*command, "--target", tmp_path / "site", tmp_path / "package"],
            check=True,
            timeout=300,
            capture_output=True,
        )
        program = (
            f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
            "import hookkit, thunder, torch\n"
            "from softclip import softclip\n"
            "jitted = thunder.jit(lambda x: softclip(x, bound=2.0))\n"
            "x, y = (torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))\n"
            "jitted(x).sum().backward(); softclip(y, 2.0).sum().backward()\n"
            "assert torch.allclose(x.grad, y.grad)\n"
            "print(*[c.rule for c in hookkit.report(jitted).calls])\n"
        )
        assert self.run(program)[0] == ["softclip"]


class TestThreads:
    THREADS = 8

    def in_threads(self, work):
        """Lets eight threads begin at once, and returns what each returns."""
        barrier = threading.Barrier(self.THREADS)

        def begin(number):
            barrier.wait()
            return work(number)

        with ThreadPoolExecutor(self.THREADS) as pool:
            return [f.result() for f in [pool.submit(begin, n) for n in range(self.THREADS)]]

    def test_no_rule_is_lost_when_eight_threads_register_and_unregister(self):
        def work(number):
            kept = []
            for i in range(50):
                rule = hookkit.rule(f"no.module:f{number}_{i}", mode="opaque")
                if i % 2:
                    rule.unregister()
                else:
                    kept.append(rule)
                assert set(kept) <= set(hookkit.rules())
            return kept

        kept = [rule for rules in self.in_threads(work) for rule in rules]
        assert len(kept) == 8 * 25
        assert set(kept) <= set(hookkit.rules())

    def test_one_of_eight_equal_rules_is_registered(self):
        def work(number):
            try:
                return times(number)
            except hookkit.ConflictError:
                return None

        assert sum(rule is not None for rule in self.in_threads(work)) == 1

    def test_no_scope_is_mixed_when_eight_threads_compile(self, x):
        def work(number):
            found = []
            for round_ in range(2):
                factor = 3 + number + 10 * round_
                other = hookkit.rule(f"no.module:g{number}_{round_}", mode="opaque")
                with hookkit.use(times(factor, register=False)):
                    found.append(factor_in(compiled(), x) == factor)
                other.unregister()
                found.append(factor_in(compiled(), x) == 2)
            return found

        assert all(all(found) for found in self.in_threads(work))


def test_the_rules_in_force_are_listed_with_what_they_are():
    lines = [str(rule) for rule in hookkit.rules()]
    assert any(line.startswith("autograd_function: torch.autograd.function.Function (mode auto") for line in lines)
