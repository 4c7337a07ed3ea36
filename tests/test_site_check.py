"""scripts/site_check.py: what it finds in a site, and what it says where there is no browser."""

import pytest

pytest.importorskip("playwright", reason="the docs extra is not installed")

import site_check

import hookkit.testing

IS_BROWSER_THERE = site_check.executable() is not None
WHERE_THERE_IS_A_BROWSER = pytest.mark.skipif(not IS_BROWSER_THERE, reason="NOT RUN: there is no Chromium here")


@WHERE_THERE_IS_A_BROWSER
def test_the_check_finds_what_is_wrong_with_a_page(tmp_path):
    (tmp_path / "right.html").write_text("<p>short</p>")
    (tmp_path / "wide.html").write_text('<div style="width: 900px">wide</div>')
    (tmp_path / "loud.html").write_text("<script>console.error('no'); throw Error('never')</script>")
    (tmp_path / "poor.html").write_text('<script src="gone.js"></script>')
    found = site_check.check(tmp_path)
    assert "wide.html, 400: is 9" in "\n".join(found)
    assert not any(line.startswith(("right.html", "wide.html, 1300")) for line in found)
    for said in ("loud.html, 1300: console: no", "loud.html, 400: script: never", "poor.html, 400: not found: file:"):
        assert any(line.startswith(said) for line in found), found


@WHERE_THERE_IS_A_BROWSER
def test_the_check_finds_that_a_name_is_not_found(tmp_path, monkeypatch):
    (tmp_path / "search.html").write_text('<div id="search-results"></div>')
    monkeypatch.setattr(site_check, "PATIENCE", 200)
    found = site_check.check(tmp_path)
    assert found == [f"search.html: does not find hookkit.{name}" for name in site_check.SEARCHED]


def test_what_is_searched_for_is_public():
    assert set(site_check.SEARCHED) <= {*hookkit.__all__, *hookkit.testing.__all__}


def test_without_a_browser_nothing_passes(tmp_path, monkeypatch, capsys):
    (tmp_path / "page.html").write_text("<p>short</p>")
    monkeypatch.setenv("HOOKKIT_CHROMIUM", str(tmp_path / "none"))
    assert site_check.main([str(tmp_path)]) == 2
    assert "THE SITE WAS NOT CHECKED" in capsys.readouterr().err
