"""Holds the finished site against what is promised of it: no link in it is dead, and nothing comes from another host.

Fails the build with a list of what is wrong. Where a page links to another site is not followed.
"""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.DOTALL | re.MULTILINE)
MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
REMOTE_IN_CSS = re.compile(r"""(?:url\(|@import)\s*['"]?\s*((?:https?:)?//[^'")\s]+)""")


class Page(HTMLParser):
    """What a page has: the ids that can be linked to, its links, and what a browser fetches for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.ids.add(value)
            elif name in ("src", "srcset", "poster", "data") or (name == "href" and tag == "link"):
                self.fetched.append(value)
            elif name == "href":
                self.links.append(value)
            elif name == "style":
                self.fetched += REMOTE_IN_CSS.findall(value)


@functools.cache
def page(path: Path) -> Page:
    return Page(path.read_text())


def problems(root: Path) -> list[str]:
    """What is wrong with the site in a folder, as ``file: what``."""
    page.cache_clear()
    found = []
    for path in sorted(root.rglob("*.html")):
        for url in [*page(path).fetched, *page(path).links]:
            problem = problem_of(url, path, root, is_fetched=url in page(path).fetched)
            if problem:
                found.append(f"{path.relative_to(root)}: {problem}")
    for path in sorted([*root.rglob("*.md"), *root.glob("llms.txt")]):
        for url in MARKDOWN_LINK.findall(CODE.sub("", path.read_text())):
            problem = problem_of(url, path, root, is_fetched=False)
            if problem:
                found.append(f"{path.relative_to(root)}: {problem}")
    for path in sorted(root.rglob("*.css")):
        found += [f"{path.relative_to(root)}: fetches {url}" for url in REMOTE_IN_CSS.findall(path.read_text())]
    return found


def problem_of(url: str, path: Path, root: Path, *, is_fetched: bool) -> str | None:
    parts = urlsplit(url)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return f"fetches {url}" if is_fetched else None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if parts.path.startswith("/") or not target.is_relative_to(root.resolve()):
        return f"{url} leads out of the site"
    if not target.is_file():
        return f"{url} leads nowhere"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).ids:
        return f"{url}: there is no such place on the page"
    return None


def check(app: Sphinx, error: Exception | None) -> None:
    """Refuse a site with problems."""
    if error is None and app.builder.name == "html":
        found = problems(Path(app.outdir))
        if found:
            raise ExtensionError("\n".join(["the site is not as promised:", *found]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Have the site checked when it is written, the Markdown pages included."""
    app.connect("build-finished", check, priority=900)
    return {"parallel_read_safe": True}
