"""The built site in a browser: pages fit a desktop and a phone, figures load, nothing comes from another host."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.workspace import ROOT
from tests.tools.browser import Page, browser, installed


def _pages(entries: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, in order, without ".md"."""
    places = [place for entry in entries for place in entry.values()]
    return [name for one in places for name in ([one.removesuffix(".md")] if isinstance(one, str) else _pages(one))]


PAGES = _pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("zensical") is None, reason="zensical is not installed here: hatch run docs:check"
    ),
    pytest.mark.skipif(installed() is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def built() -> Path:
    done = subprocess.run(
        [sys.executable, ROOT / "website" / "build.py", "build"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "website" / "built"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 800)], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_its_figures_load(built: Path, page: Page, name: str, width: int, height: int):
    page.errors.clear()
    page.requests.clear()
    page.open(built / f"{name}.html", width, height)
    expected = len(re.findall(r"^!\[", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE))
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('article h1').innerText.trim()")
    figures = "[...document.querySelectorAll('article img:not(.twemoji)')]"
    page.evaluate(f"{figures}.forEach(one => one.loading = 'eager')")  # or they load when they are seen
    page.evaluate(f"Promise.all({figures}.map(one => one.decode()))")
    assert page.evaluate(f"{figures}.length") == expected
    assert page.evaluate(f"{figures}.every(one => one.complete && one.naturalWidth > 100)")
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_every_page_is_in_the_navigation(built: Path):
    pages = {str(path.relative_to(built).with_suffix("")) for path in built.rglob("*.html")}
    assert pages - {"404"} == set(PAGES)


def test_a_search_finds_an_error(built: Path):
    assert "already a DTensor with placements" in (built / "search.json").read_text()
