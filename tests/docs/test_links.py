"""Links lead to files and headings of a clone; only the site's home links to pages that it generates, and says so."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.page_blocks import PAGES as ALL
from scripts.workspace import ROOT

sys.path.insert(0, str(ROOT / "website"))

import api_reference

REFERENCE = ROOT / "docs" / "reference"
HOME = ROOT / "docs" / "index.md"
# Pages that `website/build.py` generates, so that no clone contains them, and that HOME links to.
GENERATED = {REFERENCE / name for name in ("api/core.md", "commands.md", "errors.md")}
PAGES = [page for page in ALL if page not in GENERATED and page.parent != REFERENCE / "api"]

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def _prose(page: Path) -> str:
    """A page without blocks of code."""
    return _FENCE.sub("", page.read_text())


def _links(page: Path) -> Iterator[tuple[str, str]]:
    """Relative links of a page, each with the line that it is in."""
    for line in _prose(page).splitlines():
        for link in _LINK.finditer(_CODE.sub("code", line)):
            if not re.match(r"[a-z]+:", link["target"]):
                yield link["target"], line


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(page: Path) -> Iterator[str]:
    """Why links of a page lead nowhere in a clone."""
    for target, line in _links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if path in GENERATED:
            if page != HOME:
                yield f"{target} is generated; name its place on the site, without a link"
            elif "on the site" not in line:
                yield f"{target} is generated; say in its line that it is on the site"
        elif not path.exists() or path.parent == REFERENCE / "api":
            yield f"{target} is not in the repository"
        elif anchor and anchor not in _anchors(path):
            yield f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_in_a_clone(page: Path):
    assert list(problems(page)) == []


def test_generated_pages_are_generated_and_linked_to():
    generated = {REFERENCE / "api" / name for name in api_reference.pages()}
    assert generated | {REFERENCE / "commands.md", REFERENCE / "errors.md"} >= GENERATED
    assert {(page.parent / target).resolve() for page in PAGES for target, _ in _links(page)} >= GENERATED


_NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


def missing_tests(text: str) -> Iterator[str]:
    """Files of tests, and tests in them, that a page or a comment names and that are not there."""
    for path, name in _NAMED_TEST.findall(text):
        file = ROOT / path
        if not file.is_file() or (name and not re.search(rf"^def {name}\(", file.read_text(), re.MULTILINE)):
            yield f"{path}::{name}" if name else path


def test_named_tests_are_there():
    found = {page: [*missing_tests(page.read_text())] for page in (*ALL, *ROOT.glob("packages/*/src/**/*.py"))}
    assert {str(page): names for page, names in found.items() if names} == {}


def test_each_difference_has_a_test():
    page = (ROOT / "docs/explanation/differences.md").read_text()
    section = page.partition("## Different\n")[2].partition("\n## ")[0]
    assert len(_NAMED_TEST.findall(section)) == len(re.findall(r"^\|", section, re.MULTILINE)) - 2  # the table's head
