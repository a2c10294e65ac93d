"""The badges of the README agree with the packages, its chart with the saved results; there is one version."""

import re
import runpy
from importlib import metadata
from urllib.parse import unquote

from scripts.workspace import ROOT, packages

README = (ROOT / "README.md").read_text()
PROJECTS = {one.distribution: one.project for one in packages()}


def _badges() -> dict[str, str]:
    """The message of each badge by its label, as it is drawn. The text for readers without pictures is the same."""
    found = {}
    for text, path in re.findall(r"!\[([^\]]*)\]\(https://img\.shields\.io/badge/(\S+)-blue\)", README):
        # One dash separates, two draw one.
        label, message = (unquote(part).replace("--", "-") for part in re.split("(?<!-)-(?!-)", path))
        assert text == f"{label} {message.replace(' | ', ', ')}"
        found[label] = message
    return found


def test_every_badge_is_checked_here():
    assert list(_badges()) == ["Python", "torch", "license"]
    assert README.count("shields.io") == len(_badges()), "a badge of another form"


def test_pythons_are_those_that_every_package_declares_and_the_page_was_run_on():
    declared = {tuple(re.findall(r"Python :: (3\.\d+)", "\n".join(one["classifiers"]))) for one in PROJECTS.values()}
    run = re.search(r"^\| Python \|.*", (ROOT / "docs/reference/support.md").read_text(), re.MULTILINE)
    assert declared == {tuple(_badges()["Python"].split(" | "))}
    assert declared == {tuple(sorted(set(re.findall(r"\b3\.1\d\b(?!: not run)", run[0]))))}


def test_torch_is_the_range_of_core():
    (torch,) = (one for one in PROJECTS["shardkit-core"]["dependencies"] if one.startswith("torch>"))
    first, after = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups()
    assert _badges()["torch"] == f"2.{first} to 2.{int(after) - 1}"


def test_the_workspace_has_one_version():
    version = runpy.run_path(str(ROOT / "packages/core/src/shardkit/core/version.py"))["__version__"]
    assert runpy.run_path(str(ROOT / "scripts" / "release.py"))["wrong_versions"](version) == []
    assert {metadata.version(name) for name in PROJECTS} == {version}


def test_license_is_that_of_every_package():
    assert {one["license"] for one in PROJECTS.values()} == {_badges()["license"]}
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License\n")


def test_the_chart_is_drawn_from_the_saved_results():
    chart = runpy.run_path(str(ROOT / "website" / "benchmark_chart.py"))
    drawn = chart["draw"](chart["read"]())
    assert chart["CHART"].read_text() == drawn, "run `python website/benchmark_chart.py`"
