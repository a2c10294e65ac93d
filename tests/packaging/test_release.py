"""`scripts/release.py` refuses a release that is not ready; `hatch run release --dry-run` builds for real."""

import runpy
import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.workspace import ROOT, packages

RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "release.py"))
METADATA = "Metadata-Version: 2.4\nVersion: 0.1.0\nLicense-Expression: BSD-3-Clause\nRequires-Python: >=3.11\n\nText\n"


def _wheel(directory: Path, **changed: str | None) -> Path:
    entries = {
        "shardkit/core/__init__.py": "",
        "shardkit/core/py.typed": "",
        "shardkit_core-0.1.0.dist-info/METADATA": METADATA,
        "shardkit_core-0.1.0.dist-info/licenses/LICENSE": "BSD",
    }
    path = directory / "shardkit_core-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (entries | changed).items():
            if text is not None:
                archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"shardkit/core/py.typed": None}, "no shardkit/core/py.typed"),
        ({"shardkit_core-0.1.0.dist-info/licenses/LICENSE": None}, "licenses/LICENSE"),
        ({"tests/core/api/test_clip.py": ""}, "tests/core/api/test_clip.py is not part"),
        ({"shardkit_core-0.1.0.dist-info/METADATA": METADATA.replace("0.1.0", "0.2.0")}, "Version is '0.2.0'"),
        ({"shardkit_core-0.1.0.dist-info/METADATA": METADATA.replace("Text\n", "")}, "no description"),
    ],
)
def test_what_is_wrong_with_a_wheel(tmp_path: Path, changed: dict[str, str | None], problem: str):
    assert RELEASE["wheel_problems"](_wheel(tmp_path), "0.1.0") == []
    (found,) = RELEASE["wheel_problems"](_wheel(tmp_path, **changed), "0.1.0")
    assert problem in found


def test_versions_and_changelog(tmp_path: Path):
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - Unreleased\n")
    (tmp_path / "CITATION.cff").write_text('version: "0.1.0"\n')
    problems = RELEASE["wrong_versions"]("0.2.0", tmp_path)
    assert any("CITATION.cff names ['0.1.0']" in problem for problem in problems)
    assert any("shardkit-core==0.1.0; expected ==0.2.0" in problem for problem in problems)
    assert not any("CHANGELOG" in problem for problem in problems)
    assert "no date" in RELEASE["undated_changelog"]("0.2.0", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - 2026-12-01\n")
    assert RELEASE["undated_changelog"]("0.2.0", tmp_path) is None


def test_the_workspace_has_one_version():
    expected = runpy.run_path(str(ROOT / "packages/core/src/shardkit/core/version.py"))["__version__"]
    assert RELEASE["wrong_versions"](expected) == []
    assert {version(package.distribution) for package in packages()} == {expected}


def test_a_changed_tree_is_refused(tmp_path: Path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert RELEASE["uncommitted"](tmp_path) == []
    (tmp_path / "new.py").write_text("")
    assert RELEASE["uncommitted"](tmp_path) == ["not committed: ?? new.py"]
