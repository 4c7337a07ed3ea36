"""hookkit/autoload.py and hookkit/__init__.py: every order of imports, each in a process of its own.

Most tests put small stand-ins for torch, thunder and ``hookkit.install`` beside the real two files, so that a process
takes a fraction of a second; those under "The real packages" use the real ones.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import hookkit

ROOT = Path(__file__).parent.parent

# Loads entry points as torch does, at the end of its import.
TORCH = """
import os
from importlib.metadata import entry_points

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for entry_point in entry_points(group="torch.backends"):
        entry_point.load()()
"""
PLUGIN = """
import thunder

thunder.jit
state = []

def enable(mends=None):
    state[:] = ["on"]

def disable():
    state.clear()

def is_enabled():
    return bool(state)
"""
ENTRY_POINT = {
    "hookkit-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hookkit\nVersion: 0\n",
    "hookkit-0.dist-info/entry_points.txt": "[torch.backends]\nhookkit = hookkit.autoload:install\n",
}
STATE = """
def plugin_state():
    import sys
    return sys.modules["hookkit.install"].state if "hookkit.install" in sys.modules else None
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))


def python(*arguments: str, path: list[Path], **environment: str) -> str:
    """Runs Python in a new process and returns what it printed; what else it writes to stderr fails the test."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("HOOKKIT", "TORCH_DEVICE"))}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, cwd=path[0], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # A build of torch for CUDA says so, of a machine that has the toolkit and no device.
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert not said, done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path):
    """Returns a function that runs a program with small stand-ins for torch, thunder and ``hookkit.install``."""
    write(tmp_path, {"torch/__init__.py": TORCH, "hookkit/install.py": PLUGIN, "state.py": STATE, **ENTRY_POINT})
    write(tmp_path, {"thunder/__init__.py": "import torch\nimport thunder.core\njit = 1", "thunder/core.py": ""})
    for name in ("__init__.py", "autoload.py"):
        shutil.copy(ROOT / "hookkit" / name, tmp_path / "hookkit" / name)

    def run(source: str, files: dict[str, str] | None = None, **environment: str) -> str:
        start = "import sys\nfrom state import plugin_state\n"
        write(tmp_path, {"program.py": start + dedent(source), **(files or {})})
        return python(str(tmp_path / "program.py"), path=[tmp_path], **environment)

    return run


# The order of imports


@pytest.mark.parametrize(
    "imports",
    [
        "import hookkit; import thunder",
        "import thunder; import hookkit",
        "import thunder",
        "import torch; import thunder",
        "import torch; import hookkit; import thunder",
        "import hookkit; import torch; import thunder",
        "import thunder.core",
        "from thunder import jit",
        "import hookkit.install",
        "import hookkit.autoload; import thunder",
    ],
)
def test_the_rules_are_enabled_whatever_is_imported_first(program, imports):
    program(f"{imports}\nassert plugin_state() == ['on']")


@pytest.mark.parametrize("imports", ["import hookkit; import thunder", "import thunder; import hookkit"])
def test_importing_hookkit_enables_the_rules_without_autoload(program, imports):
    source = f"{imports}\nassert plugin_state() == ['on']"
    program(source, HOOKKIT_AUTOLOAD="0")
    program(source, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize("switch", ["HOOKKIT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_the_environment_switches_autoload_off(program, switch):
    program(
        "import thunder\nassert plugin_state() is None and 'hookkit' not in sys.modules and len(sys.meta_path) < 5",
        **{switch: "0"},
    )


def test_importing_hookkit_after_a_torch_without_autoload_enables_the_rules(program):
    program("import torch; import hookkit; import thunder\nassert plugin_state() == ['on']", HOOKKIT_AUTOLOAD="0")


def test_hookkit_imported_by_a_module_that_thunder_imports_waits_for_thunder(program):
    program(
        "import thunder\nassert plugin_state() == ['on']",
        files={"thunder/core.py": "import hookkit\nfrom state import plugin_state\nassert plugin_state() is None"},
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_hookkit_imported_by_a_module_of_thunder_that_is_imported_later_waits_for_that_module(program):
    program(
        "import thunder\nassert plugin_state() is None\nimport thunder.late\nassert plugin_state() == ['on']",
        files={"thunder/late.py": "import hookkit\nfrom state import plugin_state\nassert plugin_state() is None"},
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_thunder_imported_by_a_module_of_hookkit_waits_for_that_module(program):
    program(
        "import hookkit\nhookkit.rule\nassert plugin_state() == ['on']",
        files={
            "hookkit/install.py": f"from hookkit.declare import rule\n{PLUGIN}",
            "hookkit/declare.py": "import hookkit.engine, state\nrule = 1\nassert not state.plugin_state()",
            "hookkit/engine.py": "import thunder",
        },
    )


def test_a_failed_import_of_thunder_reaches_the_program_and_can_be_tried_again(program):
    program(
        """
        import os, hookkit
        for attempt in range(2):
            try:
                import thunder
            except ZeroDivisionError as error:
                assert str(error) == "from thunder" and error.__context__ is None
                assert plugin_state() is None
        os.environ["READY"] = "1"
        import thunder
        assert plugin_state() == ['on']
        """,
        files={"thunder/core.py": "import os\nif 'READY' not in os.environ: raise ZeroDivisionError('from thunder')"},
    )


def test_a_missing_thunder_is_reported_as_python_does(program):
    program(
        """
        import hookkit
        sys.path.clear()
        try:
            import thunder.core
        except ModuleNotFoundError as error:
            assert error.name == "thunder", error
        """,
    )


def test_the_hook_is_put_in_place_once_and_leaves_no_mark_on_thunder(program):
    program(
        """
        import torch, hookkit, hookkit.autoload
        hookkit.autoload.install()
        assert sum(type(finder).__module__ == "hookkit.autoload" for finder in sys.meta_path) == 1
        import thunder
        from importlib.machinery import ModuleSpec, SourceFileLoader
        assert type(thunder.__spec__) is ModuleSpec
        assert type(thunder.__loader__) is type(thunder.__spec__.loader) is SourceFileLoader
        """
    )


def test_looking_for_thunder_does_not_enable_the_rules(program):
    program("import hookkit, importlib.util\nassert importlib.util.find_spec('thunder')\nassert plugin_state() is None")


# Faults


def test_rules_that_cannot_be_enabled_are_one_warning_and_an_error_of_enable(program):
    program(
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            import thunder, hookkit
        assert thunder.jit == 1 and not hookkit.is_enabled()
        (warning,) = caught
        assert warning.category is RuntimeWarning and "ZeroDivisionError('in install')" in str(warning.message)
        try:
            hookkit.enable()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError
        """,
        files={"hookkit/install.py": "raise ZeroDivisionError('in install')"},
    )


def test_a_fault_of_the_entry_point_is_a_warning(program):
    program(
        """
        import warnings
        class Tuple(tuple):
            insert = None
        sys.meta_path = Tuple(sys.meta_path)
        with warnings.catch_warnings(record=True) as caught:
            import torch
        (warning,) = caught
        assert warning.category is RuntimeWarning and "import hook for thunder is not in place" in str(warning.message)
        """
    )


# Switching off and on


def test_disabled_before_thunder_is_imported_the_rules_stay_out(program):
    program(
        """
        import hookkit
        hookkit.disable()
        assert not hookkit.is_enabled() and "thunder" not in sys.modules
        import thunder
        assert plugin_state() is None and not hookkit.is_enabled()
        hookkit.enable()
        assert plugin_state() == ["on"] and hookkit.is_enabled()
        """
    )


def test_enabled_again_before_thunder_is_imported_the_rules_are_in(program):
    program(
        """
        import hookkit
        hookkit.disable()
        hookkit.enable()
        assert hookkit.is_enabled() and "thunder" not in sys.modules
        import thunder
        assert plugin_state() == ["on"]
        """
    )


def test_disabled_after_thunder_is_imported_the_rules_are_out(program):
    program(
        """
        import hookkit, thunder
        hookkit.disable()
        assert plugin_state() == [] and not hookkit.is_enabled()
        """
    )


# Other ways to start a program


def test_autoload_works_with_python_m_in_subprocesses_and_in_spawned_processes(program, tmp_path):
    source = """
    import multiprocessing, subprocess, sys
    import torch, thunder
    from state import plugin_state

    def check():
        assert plugin_state() == ["on"]

    if __name__ == "__main__":
        check()
        process = multiprocessing.get_context("spawn").Process(target=check)
        process.start()
        process.join()
        assert process.exitcode == 0
        program = "import thunder, state; assert state.plugin_state() == ['on']"
        subprocess.run([sys.executable, "-c", program], check=True)
    """
    write(tmp_path, {"main.py": source})
    python("-m", "main", path=[tmp_path])


# The package


def test_the_package_imports_the_hook_and_no_more():
    source = "import sys, hookkit; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    assert not {"attr", "importlib_metadata", "thunder", "torch"} & set(python("-c", source, path=[ROOT]).split())
    source = "import sys, hookkit; print(*sorted(name for name in sys.modules if name.startswith('hookkit')))"
    assert python("-c", source, path=[ROOT]).split() == ["hookkit", "hookkit.autoload"]


def test_importing_the_package_is_quick():
    source = "import time; start = time.perf_counter(); import hookkit; print(time.perf_counter() - start)"
    assert any(float(python("-c", source, path=[ROOT])) < 0.5 for _ in range(3))


def test_every_public_name_is_there():
    assert set(hookkit.__all__) <= set(dir(hookkit))
    for name in hookkit.__all__:
        assert getattr(hookkit, name) is getattr(hookkit, name)


def test_the_public_names_are_those_that_type_checkers_see():
    source = (ROOT / "hookkit" / "__init__.py").read_text()
    block = source[source.index("if TYPE_CHECKING") : source.index("__version__")]
    imported = re.findall(r"\w+", " ".join(re.findall(r"import (\([^)]*\)|.*)", block)))
    assert sorted(imported) == sorted(hookkit.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hookkit' has no attribute 'rul'"):
        _ = hookkit.rul


@pytest.mark.parametrize(
    "imports",
    [
        "import hookkit",
        "import hookkit.rule, hookkit.rules.autograd_function",
        "from hookkit.rule import Rule",
        "from hookkit.rules import autograd_function; from hookkit import rule, rules",
        "import hookkit; hookkit.rule, hookkit.rules; import hookkit.rules, hookkit.rule",
    ],
)
def test_submodules_do_not_take_the_place_of_the_functions_named_like_them(program, imports):
    program(
        f"{imports}\nimport hookkit\nassert hookkit.rule() == 'rule' and hookkit.rules() == 'rules'",
        files={
            "hookkit/rule.py": "Rule = 0",
            "hookkit/declare.py": "def rule(): return 'rule'",
            "hookkit/registry.py": "def rules(): return 'rules'",
            "hookkit/rules/__init__.py": "",
            "hookkit/rules/autograd_function.py": "",
        },
    )


def test_the_package_can_be_pickled_as_modules_are_by_cloudpickle(program):
    program("import hookkit, pickle\nassert pickle.loads(pickle.dumps(hookkit)) is hookkit")


def test_the_version_is_that_of_the_distribution():
    assert f'version = "{hookkit.__version__}"' in (ROOT / "pyproject.toml").read_text()


# The real packages


def real(source: str, *path: Path, **environment: str) -> str:
    return python("-W", "ignore", "-c", dedent(source), path=[*path, ROOT], **environment)


@pytest.fixture
def entry_point(tmp_path):
    write(tmp_path, ENTRY_POINT)
    return tmp_path


@pytest.mark.parametrize("imports", ["import hookkit, torch", "import torch", "import torch, hookkit"])
def test_thunder_imports_with_the_rules_and_leaves_torch_as_it_was(entry_point, imports):
    real(
        f"""
        {imports}
        before = [dict(vars(owner)) for owner in (torch.Tensor, torch.autograd.Function)]
        import thunder, hookkit
        assert hookkit.is_enabled()
        assert [dict(vars(owner)) for owner in (torch.Tensor, torch.autograd.Function)] == before
        x = torch.ones(2)
        assert thunder.jit(torch.sin)(x).tolist() == torch.sin(x).tolist()
        """,
        entry_point,
    )


def test_thunder_imported_before_torch_and_hookkit_gets_stand_ins_that_do_not_become_methods_of_proxies(entry_point):
    real(
        """
        import thunder, torch
        assert not hasattr(torch.Tensor, "rename") or torch.__version__ < "2.13"
        import hookkit
        assert hookkit.is_enabled()
        from thunder.core.langctxs import Languages, resolve_language
        from thunder.torch.default_torch_ops import torch_auto_registered_ops
        for name in ("align_as", "align_to", "has_names", "refine_names", "rename"):
            expected = hasattr(torch.Tensor, name)
            assert resolve_language(Languages.TORCH).has_method(name) == expected
            assert (name in [method.__name__ for method in torch_auto_registered_ops[torch.Tensor]]) == expected
        """,
        entry_point,
    )


def test_thunder_imports_where_function_apply_is_a_c_classmethod():
    real(
        """
        import torch
        from torch.autograd import Function
        if hasattr(Function.apply, "__func__"):
            del Function.apply  # the inherited one is a C classmethod: so it is from torch 2.14
        before = dict(vars(Function))
        import hookkit, thunder
        assert hookkit.is_enabled()
        assert dict(vars(Function)) == before and not hasattr(Function.apply, "__func__")
        """,
    )


def test_a_failed_import_of_thunder_leaves_torch_as_it_was():
    real(
        """
        import hookkit, torch
        del torch.absolute  # thunder/torch/default_torch_ops.py names it
        before = dict(vars(torch.Tensor))
        try:
            import thunder
        except AttributeError as error:
            assert "absolute" in str(error)
        else:
            raise AssertionError
        assert dict(vars(torch.Tensor)) == before
        """,
    )


def test_a_program_that_does_not_import_thunder_imports_the_hook_and_no_more(entry_point):
    real(
        """
        import sys, torch
        assert {name for name in sys.modules if name.split(".")[0] == "hookkit"} == {"hookkit", "hookkit.autoload"}
        assert "thunder" not in sys.modules and "attr" not in sys.modules
        """,
        entry_point,
    )


def test_the_entry_point_is_quick(entry_point):
    source = """
    import time, torch
    from importlib.metadata import entry_points
    (found,) = entry_points(group="torch.backends", name="hookkit")
    start = time.perf_counter()
    found.load()()
    print(time.perf_counter() - start)
    """
    assert any(float(real(source, entry_point, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) < 0.05 for _ in range(3))


def test_spawned_workers_of_a_data_loader_have_the_hook(entry_point):
    write(
        entry_point,
        {
            "main.py": """
            import sys
            import torch

            class Hooks(torch.utils.data.Dataset):
                def __len__(self):
                    return 1
                def __getitem__(self, index):
                    return sum(type(finder).__module__ == "hookkit.autoload" for finder in sys.meta_path)

            if __name__ == "__main__":
                (hooks,) = torch.utils.data.DataLoader(Hooks(), num_workers=1, multiprocessing_context="spawn")
                assert hooks == 1
            """
        },
    )
    python("-m", "main", path=[entry_point, ROOT])


def test_the_installed_distribution_is_loaded_by_torch(tmp_path):
    found = tuple(importlib.metadata.entry_points(group="torch.backends", name="hookkit"))
    if not found:
        pytest.skip("hookkit is not installed")
    (entry,) = found
    assert entry.value == "hookkit.autoload:install"
    source = "import sys, torch; assert 'hookkit.autoload' in [type(finder).__module__ for finder in sys.meta_path]"
    python("-c", source, path=[tmp_path, Path(str(entry.dist.locate_file("")))])
