"""Targets: what each kind matches in a program, and what is refused as a target."""

import math
import re
import sys
import types
import warnings

import pytest
import thunder
import torch
from agreement import assert_agrees

import hookkit
from hookkit.targets import CallableTarget, FunctionTarget, NameTarget, make_target


@torch.library.custom_op("hookkit_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x):
    return torch.empty_like(x)


class Double(torch.autograd.Function):
    """Has a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


class DoubleToo(Double):
    pass


class Layer:
    def __init__(self, factor):
        self.factor = factor

    def method(self, x):
        return x * self.factor

    @classmethod
    def class_method(cls, x):
        return x * 5

    @staticmethod
    def static_method(x):
        return x * 7

    def __call__(self, x):
        return x * 11


def function(x):
    return x * 13


LAYER = Layer(2.0)
MODULE = torch.nn.Linear(3, 3)


@pytest.fixture
def x():
    return torch.randn(3, requires_grad=True)


class Thousandfold(torch.autograd.Function):
    """What the rules in these tests put in the place of a call."""

    @staticmethod
    def forward(ctx, x):
        return x * 1000

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def hook(target, **options):
    """Registers a rule that takes any arguments and returns a thousand times the first tensor."""

    @hookkit.rule(target, pass_call=True, **options)
    def thousandfold(call, *args, **kwargs):
        x = next(a for a in args if isinstance(a, torch.Tensor))
        return x * 1000, hookkit.save(index=[isinstance(a, torch.Tensor) for a in args].index(True), count=len(args))

    @thousandfold.backward
    def _(call, saved, grad):
        return tuple(grad * 100 if i == saved.index else None for i in range(saved.count))

    return thousandfold


def thousandfold(x):
    return Thousandfold.apply(x)


@pytest.mark.parametrize(
    ("target", "program"),
    [
        pytest.param(function, lambda x: function(x), id="function"),
        pytest.param(torch.sin, lambda x: torch.sin(x), id="torch function"),
        pytest.param(torch.nn.functional.gelu, lambda x: torch.nn.functional.gelu(x), id="torch.nn function"),
        pytest.param(torch.Tensor.sin, lambda x: x.sin(), id="tensor method"),
        pytest.param(torch.Tensor.sin, lambda x: torch.Tensor.sin(x), id="tensor method, called on the class"),
        pytest.param(torch.Tensor.logcumsumexp, lambda x: x.logcumsumexp(0), id="tensor method that thunder lacks"),
        pytest.param(torch.Tensor.__add__, lambda x: x + 1, id="operator"),
        pytest.param(Layer.method, lambda x: LAYER.method(x), id="method"),
        pytest.param(LAYER.method, lambda x: LAYER.method(x), id="bound method"),
        pytest.param(Layer.class_method, lambda x: Layer.class_method(x), id="class method"),
        pytest.param(Layer.static_method, lambda x: LAYER.static_method(x), id="static method"),
        pytest.param(LAYER, lambda x: LAYER(x), id="callable object"),
        pytest.param(MODULE, lambda x: MODULE(x), id="module"),
        pytest.param(torch.ops.aten.sin.default, lambda x: torch.ops.aten.sin.default(x), id="overload"),
        pytest.param(torch.ops.aten.sin, lambda x: torch.ops.aten.sin(x), id="overload packet"),
        pytest.param(triple, lambda x: triple(x), id="custom operator"),
        pytest.param(triple, lambda x: torch.ops.hookkit_tests.triple(x), id="custom operator through torch.ops"),
        pytest.param(torch.ops.hookkit_tests.triple.default, lambda x: triple(x), id="overload, called as operator"),
        pytest.param(Double, lambda x: Double.apply(x), id="Function"),
        pytest.param(Double.apply, lambda x: Double.apply(x), id="apply"),
        pytest.param(Double, lambda x: DoubleToo.apply(x), id="subclass of the Function"),
        pytest.param(f"{__name__}:function", lambda x: function(x), id="name"),
        pytest.param(f"{__name__}:Layer.method", lambda x: LAYER.method(x), id="name of a method"),
        pytest.param(f"{__name__}:Double", lambda x: Double.apply(x), id="name of a Function"),
        pytest.param([torch.cos, torch.sin], lambda x: torch.sin(x), id="several"),
        pytest.param(hookkit.where(lambda call: call.callable is function), lambda x: function(x), id="predicate"),
        pytest.param(
            hookkit.where(lambda call: call.function is not None and call.name.startswith("Doub")),
            lambda x: Double.apply(x),
            id="predicate about a Function",
        ),
        pytest.param(hookkit.where(lambda call: call.name == "sin"), lambda x: x.sin(), id="predicate about a method"),
        pytest.param(hookkit.where(lambda call: call.name == "__add__"), lambda x: x + 1, id="predicate about +"),
    ],
)
def test_a_call_of_the_target_is_taken(target, program, x):
    hook(target)
    assert_agrees(program, x, eager=thousandfold)


def test_a_builtin_that_takes_no_tensor_is_a_target(x):
    @hookkit.rule(math.sqrt)
    def root(number):
        return number * 1000

    assert_agrees(lambda x: x * math.sqrt(4.0), x, eager=lambda x: x * 4000)


def test_a_function_of_pythons_is_taken_in_the_users_code_only(x):
    @hookkit.rule(math.sqrt)
    def root(number):
        return number * 1000

    of_torch = {"math": math}
    exec(compile("def half(x):\n    return x / math.sqrt(4.0)\n", torch.nn.functional.__file__, "exec"), of_torch)
    half = of_torch["half"]
    assert_agrees(lambda x: half(x) * math.sqrt(4.0), x, eager=lambda x: x / 2 * 4000)


def test_a_higher_order_operator_is_a_target(x):
    operator = torch.ops.higher_order.cond

    @hookkit.rule(operator)
    def both(pred, true_fn, false_fn, operands):
        return true_fn(*operands) + false_fn(*operands)

    assert_agrees(lambda x: operator(True, torch.sin, torch.cos, (x,)), x, eager=lambda x: torch.sin(x) + torch.cos(x))


def test_a_bound_method_is_not_the_method_of_another_object(x):
    hook(LAYER.method)
    other = Layer(3.0)
    assert_agrees(lambda x: other.method(x), x)


def test_a_bound_method_is_narrower_than_its_function(x):
    hook(Layer.method)

    @hookkit.rule(LAYER.method)
    def exact(self, x):
        return x * 17

    assert_agrees(lambda x: LAYER.method(x), x, eager=lambda x: x * 17)


def test_a_provider_of_a_bound_method_takes_the_object_first():
    with pytest.raises(hookkit.RegistrationError, match=r"target    .*Layer.method\(self, x\)"):
        hookkit.rule(LAYER.method)(lambda x: x)


def test_subclasses_of_a_function_can_be_left_out(x):
    hook(Double, subclasses=False)
    assert_agrees(lambda x: Double.apply(x), x, eager=thousandfold)
    assert_agrees(lambda x: DoubleToo.apply(x), x)


def test_a_tensor_method_that_a_rule_declines_is_thunders(x):
    rule = hook(torch.Tensor.sin)
    rule.when(lambda call, x: hookkit.decline("never"))
    assert_agrees(lambda x: x.sin(), x)


def test_a_predicate_leaves_the_rest_of_a_program_alone(x):
    asked = []

    def predicate(call):
        asked.append(call.name)
        return call.name == "no such function"

    hook(hookkit.where(predicate))

    def program(x, numbers):
        values = {"total": sum(numbers)}
        return function(x).sin() * values["total"] + len(numbers)

    assert_agrees(program, x, [1, 2, 3])
    assert {"function", "sin"} <= set(asked)
    assert not {"getattr", "len", "isinstance", "__getitem__"} & set(asked)


def test_a_predicate_that_is_false_does_not_touch_the_arguments():
    hook(hookkit.where(lambda call: False))
    unused = torch.randn(2)

    def ignore(tensor, x):
        return x * 2

    jitted = thunder.jit(lambda tensor, x: ignore(tensor, x))
    jitted(unused, torch.randn(3))
    assert len(thunder.last_traces(jitted)[-1].args) == 1


def test_a_predicate_that_raises_is_named_with_the_call_that_it_was_asked_about(x):
    def broken(call):
        return call.name == "function" and call.colour

    hook(hookkit.where(broken))
    with pytest.raises(hookkit.HookError) as caught:
        thunder.jit(lambda x: function(x))(x)
    message = str(caught.value)
    line = broken.__code__.co_firstlineno
    assert (
        f"the predicate {__name__}.{broken.__qualname__} (declared at {__file__}:{line}) raised AttributeError"
        in message
    )
    assert f"asked about function() at {__file__}:" in message
    assert "returns true, false or hookkit.decline(reason)" in message


class TestNames:
    @pytest.fixture
    def package(self, monkeypatch):
        """Makes modules that can be imported, and are not yet."""
        made = {}

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name not in made:
                    return None
                from importlib.machinery import ModuleSpec

                return ModuleSpec(name, self, is_package=True)

            def create_module(self, spec):
                return None

            def exec_module(self, module):
                exec(made[module.__name__], module.__dict__)

        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        yield made
        for name in made:
            sys.modules.pop(name, None)

    def test_a_name_imports_nothing_and_matches_once_anyone_has_imported_the_module(self, package, x):
        package["hookkit_late"] = "def operation(x):\n    return x * 2\n"
        hook("hookkit_late:operation")
        assert_agrees(lambda x: torch.sin(x), x)
        assert "hookkit_late" not in sys.modules

        import hookkit_late

        assert_agrees(lambda x: hookkit_late.operation(x), x, eager=thousandfold)

    def test_a_name_that_the_program_itself_imports_matches(self, package, x):
        package["hookkit_late"] = "def operation(x):\n    return x * 2\n"
        hook("hookkit_late:operation")

        def program(x):
            from hookkit_late import operation

            return operation(x)

        program(x)
        assert_agrees(program, x, eager=thousandfold)

    def test_re_exports_are_followed(self, package, x):
        package["hookkit_late"] = "from hookkit_late.inner import operation as public\n"
        package["hookkit_late.inner"] = "def operation(x):\n    return x * 2\n"
        hook("hookkit_late:public")
        import hookkit_late.inner
        from hookkit_late import public as mine

        assert_agrees(lambda x: mine(x), x, eager=thousandfold)
        assert_agrees(lambda x: hookkit_late.inner.operation(x), x, eager=thousandfold)

    def test_a_modules_getattr_which_may_import_is_not_called(self, package, x):
        package["hookkit_late"] = (
            "def __getattr__(name):\n    assert name != 'operation'\n    raise AttributeError(name)\n"
            "def __dir__():\n    return ['operation']\n"
        )
        rule = hook("hookkit_late:operation")
        import hookkit_late  # noqa: F401

        assert_agrees(lambda x: torch.sin(x), x)
        assert rule.targets[0].state == "not there yet"

    def test_a_name_that_is_missing_warns_once_with_near_misses(self, package, x):
        package["hookkit_late"] = "def operation(x):\n    return x * 2\n"
        rule = hook("hookkit_late:opperation")
        import hookkit_late  # noqa: F401

        message = "has no 'opperation'; nearest: operation. Correct the name"
        with pytest.warns(hookkit.TargetWarning, match=message) as caught:
            assert_agrees(lambda x: torch.sin(x), x)
        (warning,) = (w for w in caught if w.category is hookkit.TargetWarning)
        assert (warning.filename, warning.lineno) == (rule.declared_at.file, rule.declared_at.line)
        assert f"of the rule {rule.name}, declared at {rule.declared_at}, does not resolve" in str(warning.message)
        assert_agrees(lambda x: torch.cos(x), x)
        assert rule.targets[0].state == "hookkit_late is imported and has no 'opperation'; nearest: operation"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("torch.nn.functionall:relu", "torch.nn is imported and has no module 'functionall'; nearest: functional"),
            ("torch.nn.functionall.inner:relu", "torch.nn is imported and has no module 'functionall'"),
            ("torch.nn.functional.relu:relu", "torch.nn.functional is imported and is no package"),
            ("torch.nn.functional:reluu", "torch.nn.functional is imported and has no 'reluu'; nearest: relu"),
            ("torch.nn:functionall.relu", "torch.nn is imported and has no 'functionall'; nearest: functional"),
        ],
    )
    def test_a_misspelt_module_or_name_is_reported_where_the_rule_is_declared(self, name, message):
        with pytest.warns(hookkit.TargetWarning, match=message) as caught:

            @hookkit.rule(name)
            def misspelt(x):
                return x

        assert [(w.filename, w.lineno) for w in caught] == [(__file__, misspelt.declared_at.line)]
        assert message in misspelt.targets[0].state

    def test_a_module_that_is_not_imported_yet_is_waited_for_silently(self, package):
        package["hookkit_late"] = ""
        package["hookkit_late.inner"] = "def operation(x):\n    return x * 2\n"
        import hookkit_late  # noqa: F401

        with warnings.catch_warnings():
            warnings.simplefilter("error", hookkit.TargetWarning)
            hook("hookkit_late.inner:operation")
            hook("no_such_package.inner:operation")
            thunder.jit(torch.sin)(torch.ones(2))
        assert "hookkit_late.inner" not in sys.modules

    def test_an_operator_of_a_library_that_is_not_there_yet_is_waited_for(self, package, x):
        package["hookkit_late"] = (
            "import torch\n"
            "@torch.library.custom_op('hookkit_late::operation', mutates_args=())\n"
            "def operation(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        )
        rule = hook("torch.ops:hookkit_late.operation")
        assert_agrees(lambda x: torch.sin(x), x)
        assert rule.targets[0].state == "not there yet"

        import hookkit_late  # noqa: F401

        assert_agrees(lambda x: torch.ops.hookkit_late.operation(x), x, eager=thousandfold)

    @pytest.mark.parametrize("name", ["aten.sinn", "higher_order.contd"])
    def test_an_operator_that_a_library_of_torch_lacks_is_missing(self, name):
        with pytest.warns(hookkit.TargetWarning, match=rf"torch\.ops is imported and has no '{name.split('.')[1]}'"):
            hook(f"torch.ops:{name}")

    def test_a_module_that_is_being_imported_is_waited_for(self, package, x):
        package["hookkit_late"] = (
            "import hookkit, sys\n"
            "rule = next(r for r in hookkit.rules() if r.name == 'late')\n"
            "before = rule.targets[0].state\n"
            "def operation(x):\n    return x * 2\n"
        )
        hook("hookkit_late:operation", name="late")
        import hookkit_late

        assert hookkit_late.before == "not there yet"
        assert_agrees(lambda x: hookkit_late.operation(x), x, eager=thousandfold)

    def test_the_provider_is_compared_with_what_the_name_stands_for(self):
        with pytest.raises(hookkit.RegistrationError, match="no place for the positional argument 'x'"):
            hookkit.rule(f"{__name__}:function")(lambda: None)

    @pytest.mark.parametrize("name", ["module", "module:", ":name", "module.name", "a b:c", "module:name()"])
    def test_what_is_no_name_is_refused(self, name):
        with pytest.raises(hookkit.RegistrationError, match=r"not a name of the form 'package\.module:name'"):
            hookkit.rule(name)

    def test_a_name_with_a_dot_for_the_colon_gets_the_right_one_told(self):
        with pytest.raises(hookkit.RegistrationError, match=re.escape("did you mean 'package.module:name'?")):
            hookkit.rule("package.module.name")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Layer, "is a class, but not a subclass of torch.autograd.Function; give the function or method"),
        (torch.nn.Linear, "Linear is a class, but not a subclass of torch.autograd.Function"),
        (3, "the rule target 3 (int) is not callable; give a callable"),
        (None, "the rule target None (NoneType) is not callable"),
        (types.SimpleNamespace(a=1), "(SimpleNamespace) is not callable"),
        ([].append, "is a method of Python's list, which the interpreter of every program calls for its own ends"),
        (
            len,
            "builtins.len cannot be one: it is a function of Python's, which the interpreter of every",
        ),
        (dict.get, "builtins.dict.get cannot be one: it is a method of Python's dict"),
        (torch.ones(2).sin, "give Tensor.sin"),
    ],
)
def test_what_is_no_target_is_refused(target, message):
    with pytest.raises(hookkit.RegistrationError, match=re.escape(message)):
        hookkit.rule(target)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_instance_of_a_function_is_refused():
    with pytest.raises(hookkit.RegistrationError, match="is an instance of the Function Double; give the class"):
        hookkit.rule(Double())


def test_a_callable_that_has_no_hash_is_refused():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(hookkit.RegistrationError, match=r"not hashable.*use hookkit.where\(...\)"):
        hookkit.rule(Unhashable())


@pytest.mark.parametrize("predicate", [3, "sin", Layer])
def test_a_predicate_is_a_function(predicate):
    with pytest.raises(hookkit.RegistrationError, match="takes a function of one argument, the call"):
        hookkit.where(predicate)


def test_a_predicate_takes_the_call_alone():
    with pytest.raises(hookkit.RegistrationError, match="cannot be called with one argument, the call"):
        hookkit.where(lambda call, other: True)


def test_two_lambdas_of_one_line_are_refused():
    first, second = lambda x: x, lambda x: x + 1
    hookkit.rule(first)(lambda x: x)
    with pytest.raises(hookkit.RegistrationError, match=r"two lambdas at .*test_targets.py:\d+ .*Define each with def"):
        hookkit.rule(second)(lambda x: x)


def test_one_lambda_may_have_two_rules():
    operation = lambda x: x  # noqa: E731
    hookkit.rule(operation)(lambda x: x)
    hookkit.rule(operation, priority=1)(lambda x: x)


def test_a_target_says_what_it_is():
    assert str(CallableTarget(function)) == f"{__name__}.function"
    assert str(CallableTarget(LAYER)) == f"{__name__}.Layer object"
    assert str(CallableTarget(torch.ops.aten.sin.default)) == "torch.ops.aten.sin.default"
    assert str(CallableTarget(triple)) == "torch.ops.hookkit_tests.triple.default"
    assert str(FunctionTarget(Double)) == f"{__name__}.Double"
    assert str(NameTarget("a.b", "c")) == "a.b:c"


def test_the_schema_of_an_operator_is_its_signature():
    assert list(make_target(triple).signature().parameters) == ["x"]
    with pytest.raises(hookkit.RegistrationError, match="no place for the positional argument 'x'"):
        hookkit.rule(triple)(lambda: None)
