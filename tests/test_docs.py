"""What the docs say about the code, held against it: every message, and the names of functions."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import hookkit
from hookkit import engine, errors, mends

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ((?:`[^`]+`(?: or )?)+) \|", re.MULTILINE)


def text_of(node):
    """A message as it stands in the source, with an ellipsis for each part that varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(v) for v in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case _:
            return "…"


@functools.cache
def messages():
    """Each message of hookkit's errors and warnings, with the name of its class and its place."""
    return list(find_messages())


def find_messages():
    for path in sorted((ROOT / "hookkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name, said = getattr(node.func, "id", getattr(node.func, "attr", "")), node.args[0]
            if name == "warn_user":
                name = getattr(node.args[1], "id", "")
            elif name == "warn_at":
                name, said = getattr(node.args[2], "id", ""), node.args[1]
            message = " ".join(text_of(said).split())
            if name in errors.__all__ and re.search("[a-z]", message):  # not one that is another's text
                yield pytest.param(name, message, id=f"{path.stem}-{node.lineno}")


@functools.cache
def rows():
    """The messages that the page has, by class."""
    name, found = "", []
    for line in (ROOT / "docs/reference/errors.md").read_text().splitlines():
        if line.startswith("## "):
            name = line[3:].strip()
        for row in ROW.findall(line):
            found += [(name, message) for message in re.findall("`([^`]+)`", row)]
    return found


def test_the_reference_has_each_file_of_rules():
    named = re.findall(r"{shipped-rules} (\S+\.py)", (ROOT / "docs/reference/shipped_rules.md").read_text())
    assert sorted(named) == sorted(
        p.relative_to(ROOT / "hookkit").as_posix() for p in (ROOT / "hookkit").glob("**/rules/[a-z]*.py")
    )


def test_the_api_has_every_public_name():
    pages = [page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"auto\w+:: hookkit\.(\w+)", page)}
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert set(hookkit.__all__) <= named
    assert set(hookkit.__all__) - {"Declaration", "testing"} == set(listed)


MEMBERS = [hookkit.Rule.backward, hookkit.Rule.meta, hookkit.Rule.when, hookkit.Rule.unregister]
PUBLIC = [getattr(hookkit, name) for name in hookkit.__all__ if name != "testing"]


@pytest.mark.parametrize("public", [*PUBLIC, *MEMBERS], ids=lambda public: public.__qualname__)
def test_a_public_name_has_an_example(public):
    assert "\n    >>> " in inspect.getdoc(public)


def covers(row, message):
    parts = [part.strip() for part in row.split("…") if part.strip()]
    return all(part in message for part in parts)


@pytest.mark.parametrize(("name", "message"), messages())
def test_the_reference_has_a_message(name, message):
    assert any(covers(row, message) for owner, row in rows() if owner == name), f"{name}: {message}"


@pytest.mark.parametrize(("name", "row"), rows())
def test_a_message_of_the_reference_is_in_the_code(name, row):
    assert any(covers(row, p.values[1]) for p in messages() if p.values[0] == name)


def test_the_reference_has_every_class():
    text = (ROOT / "docs/reference/errors.md").read_text()
    assert all(f"## {name}\n" in text for name in errors.__all__)
    assert set(errors.__all__) <= set(hookkit.__all__)


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", "examples/README.md", "examples/plugin_package/README.md"]
)
def test_a_link_of_a_page_of_the_repository_leads_somewhere(check_site, page):
    urls = check_site.MARKDOWN_LINK.findall((ROOT / page).read_text())
    assert [url for url in urls if "://" not in url and not (ROOT / page).parent.joinpath(url).exists()] == []


@pytest.fixture
def check_site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    return pytest.importorskip("check_site", reason="the docs extra is not installed")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.html", '<a href="b.html">', "b.html leads nowhere"),
        ("a.html", '<a href="#there">', "#there: there is no such place on the page"),
        ("a.html", '<a href="../x.html">', "../x.html leads out of the site"),
        ("a.html", '<a href="/a.html">', "/a.html leads out of the site"),
        ("a.html", '<script src="https://example.org/x.js">', "fetches https://example.org/x.js"),
        ("a.html", '<link rel="icon" href="//example.org/x.svg">', "fetches //example.org/x.svg"),
        ("a.css", "@import url('https://example.org/x.css');", "fetches https://example.org/x.css"),
        ("a.md", "[b](b.md)", "b.md leads nowhere"),
        ("a.html", '<p id="here"><a href="#here"><a href="a.html#here"><a href="https://example.org">', None),
        ("a.md", "`[b](b.md)` [a](a.md) [c](https://example.org)", None),
    ],
)
def test_the_check_of_the_site_finds(check_site, tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    assert check_site.problems(tmp_path) == ([f"{name}: {problem}"] if problem else [])


def test_the_layout_has_every_module():
    page = (ROOT / "docs/contributing.md").read_text()
    named = set(re.findall(r"`(?:hookkit/)?([\w/]+\.py)`", page))
    package = ROOT / "hookkit"
    there = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if not p.name.startswith("_")}
    assert {name for name in there if "rules/" not in name} <= named | {f"engine/{name}" for name in named}


MODULES = {
    found.name.rpartition(".")[2]: found.name
    for package in (engine, mends)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.ispkg
}
NAMES = re.compile(r"`(\w+)\.(\w+(?:\.\w+)*)`")


def names_of_functions():
    for path in sorted((ROOT / "docs/explanation").glob("*.md")):
        for module, name in NAMES.findall(path.read_text()):
            if module in MODULES:
                yield MODULES[module], name
            elif (ROOT / f"hookkit/{module}.py").exists() and name != "py":
                yield f"hookkit.{module}", name


@pytest.mark.parametrize(("module", "name"), sorted(set(names_of_functions())))
def test_a_function_that_the_explanation_names_is_there(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
