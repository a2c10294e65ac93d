"""One version for every package, the changelog and the citation."""

import re
import runpy
from importlib.metadata import version

import pytest

from tests.packaging.workspace import ROOT, Package, packages

VERSION = runpy.run_path(str(ROOT / "packages/core/src/shardkit/core/version.py"))["__version__"]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_installed_version(package: Package):
    assert version(package.distribution) == VERSION


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_siblings_are_pinned_to_the_same_version(package: Package):
    extras = package.project.get("optional-dependencies", {}).values()
    requirements = package.project.get("dependencies", []) + [name for extra in extras for name in extra]
    siblings = [requirement for requirement in requirements if requirement.startswith("shardkit-")]
    assert [requirement.split("==")[-1] for requirement in siblings] == [VERSION] * len(siblings)


def test_changelog_has_the_version_first():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == VERSION


def test_citation_has_the_version():
    cited = re.search(r'^version: "?([^"\n]+)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == VERSION
