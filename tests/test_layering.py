"""scripts/layering.py, fed with small trees that break one of its rules each."""

from textwrap import dedent

import layering
import pytest


@pytest.fixture
def violations(tmp_path):
    """Returns a function that writes ``hookkit/`` from a dictionary of path to source and checks it."""

    def check(files: dict[str, str]) -> list[str]:
        for path, source in files.items():
            file = tmp_path / "hookkit" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(source))
        return layering.check(tmp_path)

    return check


def in_rules(source: str) -> dict[str, str]:
    return {"rules/shipped.py": source}


def test_imports_that_point_downwards_are_accepted(violations):
    assert not violations(
        {
            "rules/__init__.py": "",
            "rules/shipped.py": "import hookkit\nfrom ..rule import rule",
            "__init__.py": "from hookkit import errors",
            "rule.py": "import torch\nimport hookkit.errors",
            "engine/values/__init__.py": "from . import wrapping",
            "engine/values/wrapping.py": "from .binding import scope\nfrom ...errors import HookError",
            "engine/values/binding.py": "from hookkit.engine.values import wrapping",
            "errors.py": "",
        }
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import hookkit.install",
        "from hookkit import install",
        "from hookkit.install import enable",
        "from . import install",
        "from .install import enable",
        "def late():\n    from hookkit.install import enable",
        "try:\n    from hookkit.install import enable\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_that_points_upwards_is_a_violation(violations, statement):
    (found,) = violations({"__init__.py": "", "install.py": "", "registry.py": "import os\n" + statement})
    assert found.startswith("hookkit/registry.py:")
    assert found.endswith("imports hookkit/install.py, which is not below hookkit/registry.py")


def test_the_line_is_that_of_the_import(violations):
    (found,) = violations({"install.py": "", "registry.py": "import os\n\nimport hookkit.install\n"})
    assert found.startswith("hookkit/registry.py:3: ")


def test_a_name_of_the_package_itself_points_to_its_init(violations):
    (found,) = violations({"__init__.py": "save = 1", "rule.py": "from hookkit import save"})
    assert "imports hookkit/__init__.py" in found


def test_an_import_for_annotations_only_may_point_upwards(violations):
    source = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from hookkit.rule import Rule
        else:
            import hookkit.install
    """
    (found,) = violations({"rule.py": "", "install.py": "", "registry.py": source})
    assert "imports hookkit/install.py" in found


def test_modules_of_one_group_do_not_import_each_other(violations, monkeypatch):
    monkeypatch.setattr(layering, "ORDER", [["left.py", "right.py"]])
    (found,) = violations({"left.py": "import hookkit.right", "right.py": ""})
    assert "imports hookkit/right.py" in found


def test_an_entry_inside_a_folder_takes_precedence_over_the_folder(violations, monkeypatch):
    monkeypatch.setattr(layering, "ORDER", [["engine/"], ["engine/values.py"]])
    (found,) = violations({"engine/values.py": "from . import opaque", "engine/opaque.py": "from . import values"})
    assert found.startswith("hookkit/engine/values.py:1: imports hookkit/engine/opaque.py")


def test_mends_are_imported_by_each_other_and_by_what_installs_them(violations):
    files = {"mends/mend.py": "", "mends/threads.py": "from hookkit.mends import mend", "__init__.py": ""}
    assert violations(files | {"install.py": "from hookkit.mends import threads"}) == []
    (found,) = violations({"reporting.py": "from hookkit.mends import threads"})
    assert found.endswith("imports hookkit/mends/threads.py, which only install.py may")


@pytest.mark.parametrize("path", ["helpers.py", "extra/__init__.py"])
def test_a_module_that_is_not_listed_is_a_violation(violations, path):
    assert violations({path: ""}) == [f"hookkit/{path}:1: module is not in the ORDER of scripts/layering.py"]


def test_autoload_imports_the_standard_library_and_in_functions_plugin_and_compat(violations):
    source = """
        import os
        from importlib import metadata

        def install():
            import sys
            from hookkit import compat
            from hookkit.install import enable
    """
    assert not violations({"autoload.py": source, "install.py": "", "compat.py": ""})


@pytest.mark.parametrize(
    "source",
    [
        "import attrs",
        "import hookkit.install",
        "from hookkit.errors import HookError",
        "def install():\n    import thunder",
        "def install():\n    from hookkit.errors import HookError",
    ],
)
def test_autoload_imports_nothing_else(violations, source):
    (found,) = violations({"autoload.py": source, "install.py": "", "errors.py": ""})
    assert "only the standard library may be imported here" in found


@pytest.mark.parametrize(
    "source",
    [
        "import thunder.core.symbol",
        "from thunder import core",
        "from thunder.extend import OperatorExecutor",
        "import torch._C",
        "from torch import _dynamo",
        "from torch.utils._pytree import tree_map",
        "import torch\nversion = torch._C.version",
        "import torch as t\nversion = t._C",
        "import torch.nn.functional as F\npad = F._pad",
        "from torch import Tensor\nbase = Tensor._base",
        "import torch\nversion = getattr(torch, '_C').version",
        "import thunder\nprims = thunder.core.prims",
        "import importlib\nmodule = importlib.import_module('torch._dynamo')",
        "target = 'torch._higher_order_ops.wrap:wrap'",
    ],
)
def test_a_shipped_rule_uses_nothing_private(violations, source):
    (found,) = violations(in_rules(source))
    assert "rules must not" in found or "rules may only in hookkit.rule(...)" in found


@pytest.mark.parametrize(
    "source",
    [
        '"""Stands for torch._C."""\nimport torch\nversion = torch.__version__',
        "import hookkit\n@hookkit.rule('torch._dynamo:op')\ndef op(x): ...",
        "@rule(targets=['torch._dynamo:op', 'torch._C:op'])\ndef op(x): ...",
        "import torch\ndef f(x):\n    return x._base, torch.add(x, x)",
        "import thunder\ncompile = thunder.jit",
    ],
)
def test_a_shipped_rule_may_use_what_is_public(violations, source):
    assert not [found for found in violations(in_rules(source)) if "__init__" not in found]


def test_private_modules_are_closed_to_rules_only(violations):
    assert not violations({"engine/values/wrapping.py": "from thunder.core.proxies import Proxy\nimport torch._C"})


CHANGES = [
    "import torch\ntorch.Tensor.rename = None",
    "import torch\ndel torch.Tensor.rename",
    "import torch\ntorch.backends.flag |= True",
    "import torch\ntorch.a, other = 1, 2",
    "import torch\ntorch.version: str = ''",
    "from torch.autograd import Function\nFunction.apply = None",
    "from torch.autograd import Function\nsetattr(Function, 'apply', None)",
    "import torch\ndelattr(torch.autograd.Function, 'apply')",
    "from thunder.core import jit_ext\njit_ext.lookasides[len] = None",
    "from thunder.core.jit_ext import lookasides\nlookasides[len] = None",
    "def install():\n    import thunder\n    thunder.jit = None",
]


@pytest.mark.parametrize("source", CHANGES)
def test_only_the_installers_change_torch_or_thunder(violations, source):
    files = {"engine/values/wrapping.py": source, "patch.py": source, "compat.py": source}
    (found,) = violations(files)
    assert found.startswith("hookkit/engine/values/wrapping.py:")
    assert "which only hookkit/patch.py and hookkit/compat.py may" in found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nTensor = torch.Tensor",
        "import torch\nx = torch.empty(1)\nx.requires_grad = True",
        "import torch\nclass A: pass\nA.dtype = torch.float32",
        "setattr(object(), 'name', None)",
    ],
)
def test_other_assignments_are_accepted(violations, source):
    assert not violations({"engine/values/wrapping.py": source})


def test_the_script_prints_violations_and_exits_with_one(violations, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["layering.py", str(tmp_path)])
    violations({"errors.py": ""})
    assert layering.main() == 0
    assert capsys.readouterr().out == "layering: ok\n"
    violations({"helpers.py": ""})
    assert layering.main() == 1
    assert capsys.readouterr().out.startswith("hookkit/helpers.py:1: ")
