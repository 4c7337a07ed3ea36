"""Opens every page of the built site in Chromium, on a wide and on a narrow screen: site_check.py [ROOT].

Finds errors in the console, files that a page asks for and does not get, pages that scroll sideways, and public names
that the search does not find. ROOT is the folder of the site (default: ``docs/_build/html``). Chromium is what
``HOOKKIT_CHROMIUM`` names, one on the path, or Playwright's own. Exits with 1 if something is wrong, and with 2 if
there is no browser: then nothing was checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

BUILT = Path(__file__).parent.parent / "docs/_build/html"
WIDTHS = (1300, 400)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SEARCHED = ("recompute", "custom_gradient", "check_rule", "UntraceableError")
PATIENCE = 10_000  # milliseconds
NO_BROWSER = """\
############################################################################
THE SITE WAS NOT CHECKED: there is no Chromium here.
Install one (Debian: apt-get install chromium; or: playwright install
chromium), or name one in HOOKKIT_CHROMIUM.
############################################################################"""


def executable() -> str | None:
    """Where Chromium is; None leaves it to Playwright."""
    return os.environ.get("HOOKKIT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def problems_of(page: Page, path: Path, width: int) -> Iterator[str]:
    """What is wrong with one page at one width."""
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(f"script: {error}"))
    page.on("requestfailed", lambda request: said.append(f"not found: {request.url}"))
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    yield from said
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        yield f"is {wide} pixels wide on a screen of {width}"


def pages(root: Path) -> list[Path]:
    """The pages of a site, but for those that Sphinx makes of source code."""
    return sorted(path for path in root.rglob("*.html") if "_static" not in path.parts)


def check_pages(browser: Browser, root: Path) -> Iterator[str]:
    """What is wrong with the pages of a site."""
    for width in WIDTHS:
        context = browser.new_context(viewport={"width": width, "height": 900})
        for path in pages(root):
            page = context.new_page()
            yield from (f"{path.relative_to(root)}, {width}: {found}" for found in problems_of(page, path, width))
            page.close()
        context.close()


def check_search(browser: Browser, root: Path) -> Iterator[str]:
    """Which public names the search does not find."""
    page = browser.new_page()
    for name in SEARCHED:
        page.goto(f"{(root / 'search.html').as_uri()}?q={name}")
        try:
            page.wait_for_selector(f"#search-results a[href*='reference/api/'][href$='.{name}']", timeout=PATIENCE)
        except Error:
            yield f"search.html: does not find hookkit.{name}"
    page.close()


def check(root: Path) -> list[str] | None:
    """What is wrong with the site in a folder; None if there is no browser."""
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        except Error as error:
            print(error, file=sys.stderr)
            return None
        try:
            search = check_search(browser, root) if (root / "search.html").exists() else ()
            return [*check_pages(browser, root), *search]
        finally:
            browser.close()


def main(arguments: list[str] | None = None) -> int:
    """Check the site; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=BUILT)
    root: Path = parser.parse_args(arguments).root.resolve()
    if not pages(root):
        parser.error(f"there is no page in {root}; make docs builds them")
    found = check(root)
    if found is None:
        print(NO_BROWSER, file=sys.stderr)
        return 2
    print("\n".join(found) or f"{len(pages(root))} pages, each at {' and '.join(map(str, WIDTHS))} pixels: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
