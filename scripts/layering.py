"""Checks that hookkit's modules import only downwards and touch torch and thunder only where they may.

Run as ``python scripts/layering.py [ROOT]``, where ROOT is the folder that holds ``hookkit/`` (default: this
repository). Prints one ``file:line: message`` for each violation and exits with 1 if there is one. It reads the
source and imports nothing, so it sees only what is spelled out: a name bound by an ``import``, and chains of
attributes that start from it. An import under ``if TYPE_CHECKING:`` never runs and may point upwards.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# From top to bottom. A module may import modules of lower groups, not of its own group or a higher one. An entry that
# ends in "/" is a folder, whose modules may import each other; a longer entry inside it takes precedence.
ORDER = [
    ["mends/rules/"],
    ["rules/"],
    ["__main__.py"],
    ["doctor.py"],
    ["__init__.py"],
    ["pytest_plugin.py"],
    ["testing.py"],
    ["checks.py"],
    ["comparison.py"],
    ["diagnosis.py"],
    ["reporting.py"],
    ["install.py"],
    ["mends/"],
    ["engine/dispatch/"],
    ["engine/opaque/"],
    ["engine/traced/"],
    ["engine/joint/"],
    ["engine/pytorch/"],
    ["engine/interpreter/"],
    ["engine/trace/"],
    ["engine/values/"],
    ["engine/__init__.py"],
    ["declare.py", "scopes.py", "returned.py", "custom_gradient.py", "opaque_function.py", "regions.py"],
    ["rule.py"],
    ["signatures.py"],
    ["registry.py"],
    ["entry_points.py"],
    ["forms.py"],
    ["targets.py", "modes.py"],
    ["standard.py", "answers.py"],
    ["declared.py"],
    ["call.py"],
    ["operators.py"],
    ["residuals.py", "transforming.py"],
    ["notebook.py"],
    ["patch.py"],
    ["compat.py"],
    ["logs.py"],
    ["errors.py"],
    ["autoload.py"],
]
# Modules that import the standard library alone, and what their functions may import besides, upwards too.
STDLIB_ONLY = {"autoload.py": ["install.py", "compat.py"]}
# The folders of rules, which use nothing that a user's could not.
RULES = ("rules/", "mends/rules/")
# What only these import, and the folder itself.
ONLY_BY = {"mends/": ["install.py"]}
# The only modules that assign to attributes of torch or thunder.
INSTALLERS = ["patch.py", "compat.py"]

FOREIGN = ("torch", "thunder")
CLOSED = ("thunder.core", "thunder.extend")
DOTTED_NAME = re.compile(r"(torch|thunder)(\.\w+)+(:\w+(\.\w+)*)?")


def check(root: Path) -> list[str]:
    """Returns the violations under ``root/hookkit``, each as ``file:line: message``, in the files' order."""
    package = root / "hookkit"
    violations = []
    for file in sorted(package.rglob("*.py")):
        module = Module(package, file.relative_to(package).as_posix())
        found = sorted(set(module.violations()))
        violations += [f"hookkit/{module.path}:{line}: {message}" for line, message in found]
    return violations


def entry_of(path: str) -> str | None:
    """Returns the longest entry of ORDER that covers a path below ``hookkit/``, or None."""
    covering = (e for group in ORDER for e in group if path == e or (e.endswith("/") and path.startswith(e)))
    return max(covering, key=len, default=None)


def level_of(entry: str) -> int:
    """Returns the group of an entry of ORDER, counted from the top."""
    return next(level for level, group in enumerate(ORDER) if entry in group)


def is_closed(dotted: str) -> bool:
    """Tells whether a dotted name lies in a part of torch or thunder that rules must not use."""
    parts = dotted.replace(":", ".").split(".")
    private = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return parts[0] in FOREIGN and (private or ".".join(parts[:2]) in CLOSED)


class Module:
    """One source file of hookkit and what is checked in it.

    Args:
        package: The folder ``hookkit``.
        path: The file, relative to it, with slashes.
    """

    def __init__(self, package: Path, path: str) -> None:
        self.package = package
        self.path = path
        self.tree = ast.parse((package / path).read_text(encoding="utf-8"), filename=path)
        self.nodes = list(ast.walk(self.tree))
        self.foreign_names = self.find_foreign_names()

    def violations(self) -> Iterator[tuple[int, str]]:
        """Yields the line and the message of each violation."""
        if entry_of(self.path) is None:
            yield 1, "module is not in the ORDER of scripts/layering.py"
        elif self.path in STDLIB_ONLY:
            yield from self.check_stdlib_only()
        else:
            yield from self.check_direction()
        if self.path.startswith(RULES):
            yield from self.check_rules()
        if self.path not in INSTALLERS:
            yield from self.check_assignments()

    # Imports

    def imported_names(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yields each name that a statement binds, with the absolute dotted name it stands for."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("hookkit/" + self.path).split("/")[: -node.level]
                base = ".".join(parents + ([base] if base else []))
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"

    def imports(self) -> Iterator[tuple[ast.stmt, str, bool]]:
        """Yields each import that can run: the statement, the dotted name, and whether it is inside a function."""
        pending: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while pending:
            node, in_function = pending.pop()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for _, dotted in self.imported_names(node):
                    yield node, dotted, in_function
            in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            children = ast.iter_child_nodes(node)
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                children = iter(node.orelse)
            pending += [(child, in_function) for child in children]

    def target_of(self, dotted: str) -> str | None:
        """Returns the path of the hookkit module that importing a dotted name loads, or None for other packages."""
        top, *parts = dotted.split(".")
        if top != "hookkit":
            return None
        while parts:
            path = "/".join(parts)
            if (self.package / f"{path}.py").is_file():
                return f"{path}.py"
            if (self.package / path).is_dir():
                return f"{path}/__init__.py"
            parts.pop()
        return "__init__.py"

    def check_direction(self) -> Iterator[tuple[int, str]]:
        """Checks that what is imported of hookkit is in a lower group."""
        own = entry_of(self.path)
        assert own is not None
        for statement, dotted, _ in self.imports():
            target = self.target_of(dotted)
            entry = entry_of(target) if target else None
            for folder, users in ONLY_BY.items():
                if target and target.startswith(folder) and not self.path.startswith((folder, *users)):
                    yield statement.lineno, f"imports hookkit/{target}, which only {' and '.join(users)} may"
            if entry is not None and entry != own and level_of(entry) <= level_of(own):
                yield statement.lineno, f"imports hookkit/{target}, which is not below hookkit/{own}"

    def check_stdlib_only(self) -> Iterator[tuple[int, str]]:
        """Checks that only the standard library is imported, save what functions may import."""
        allowed = STDLIB_ONLY[self.path]
        for statement, dotted, in_function in self.imports():
            if dotted.split(".")[0] in sys.stdlib_module_names or (in_function and self.target_of(dotted) in allowed):
                continue
            yield (
                statement.lineno,
                f"imports {dotted}; only the standard library may be imported here, "
                f"and {' and '.join(allowed)} inside a function",
            )

    # Uses of torch and thunder

    def find_foreign_names(self) -> dict[str, str]:
        """Returns the file's names that come from torch or thunder, with the dotted name each stands for."""
        names = {}
        for node in self.nodes:
            for name, dotted in self.imported_names(node):
                if dotted.split(".")[0] in FOREIGN:
                    bare = isinstance(node, ast.Import) and name == dotted
                    names[name.split(".")[0]] = dotted.split(".")[0] if bare else dotted
        return names

    def foreign_path(self, node: ast.AST) -> str | None:
        """Returns the dotted name that a chain of attributes and subscripts stands for, if torch's or thunder's."""
        match node:
            case ast.Name(id=name):
                return self.foreign_names.get(name)
            case ast.Subscript(value=owner):
                return self.foreign_path(owner)
            case ast.Attribute(value=owner, attr=name):
                path = self.foreign_path(owner)
                return path and f"{path}.{name}"
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                path = self.foreign_path(owner)
                return path and f"{path}.{name}"
        return None

    def check_rules(self) -> Iterator[tuple[int, str]]:
        """Checks that a shipped rule uses nothing of torch or thunder that a user's could not."""
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        in_declarations = {
            id(constant)
            for node in self.nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("rule", "hookkit.rule")
            for constant in ast.walk(node)
        }
        for node in self.nodes:
            match node:
                case ast.Import() | ast.ImportFrom():
                    for _, dotted in self.imported_names(node):
                        if is_closed(dotted):
                            yield node.lineno, f"imports {dotted}, which rules must not"
                case ast.Attribute() | ast.Call() if id(node) not in inner:
                    path = self.foreign_path(node)
                    if path and is_closed(path):
                        yield node.lineno, f"uses {path}, which rules must not"
                case ast.Constant(value=str(text)) if id(node) not in in_declarations:
                    if DOTTED_NAME.fullmatch(text) and is_closed(text):
                        yield node.lineno, f"names {text!r}, which rules may only in hookkit.rule(...)"

    def check_assignments(self) -> Iterator[tuple[int, str]]:
        """Checks that nothing is set on, or deleted from, an object of torch or thunder."""
        for node in self.nodes:
            match node:
                case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                    changed = self.foreign_path(node)
                case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                    changed = self.foreign_path(owner)
                case _:
                    continue
            if changed:
                where = " and ".join(f"hookkit/{installer}" for installer in INSTALLERS)
                yield node.lineno, f"changes {changed}, which only {where} may"


def main() -> int:
    """Checks the tree named on the command line, or this repository."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check(root)
    print("\n".join(violations) or "layering: ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
