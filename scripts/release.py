"""A release in one command: checks the workspace, builds every package twice, and compares the two builds.

    hatch run release --dry-run    checks and builds in a temporary directory
    hatch run release              the same, then leaves the files in dist/ and tags the commit

Checked: no change is uncommitted; the version is the same in the code, the pins between packages, the changelog and the
citation; the changelog gives it a date (a dry run only says so); both builds are the same bytes; `twine check`; every
wheel has `py.typed`, its licence and no tests. Publishing is left to `twine upload dist/*`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.workspace import Package, packages  # noqa: E402


def main() -> int:
    """1 if something stands against a release; each such thing is a line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="leave nothing behind: no files in dist/, no tag")
    dry_run = parser.parse_args().dry_run
    version = runpy.run_path(str(ROOT / "packages/core/src/shardkit/core/version.py"))["__version__"]
    problems = [*uncommitted(), *wrong_versions(version)]
    if undated := undated_changelog(version):
        if dry_run:
            print(f"before the release: {undated}")
        else:
            problems.append(undated)
    if not problems:
        with tempfile.TemporaryDirectory(prefix="shardkit-release-") as directory:
            problems = build_and_check(Path(directory), version)
            if not problems and not dry_run:
                keep(Path(directory) / "first" / "dist", version)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def uncommitted(root: Path = ROOT) -> list[str]:
    """Files that differ from the commit, so that a build of the commit would not have them."""
    changed = git("status", "--porcelain", root=root).splitlines()
    return [f"not committed: {line.strip()}" for line in changed]


def wrong_versions(version: str, root: Path = ROOT) -> list[str]:
    """Places that name another version than the code."""
    problems = []
    for package in packages():
        extras = package.project.get("optional-dependencies", {}).values()
        for requirement in [*package.project.get("dependencies", []), *(one for extra in extras for one in extra)]:
            if requirement.startswith("shardkit-") and not requirement.endswith(f"=={version}"):
                problems.append(f"{package.distribution} requires {requirement}; expected =={version}")
    headings = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if headings[:1] != [version]:
        problems.append(f"CHANGELOG.md begins with {headings[:1]}; expected {version}")
    cited = re.findall(r'^version: "?([^"\n]+)"?$', (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited != [version]:
        problems.append(f"CITATION.cff names {cited}; expected {version}")
    return problems


def undated_changelog(version: str, root: Path = ROOT) -> str | None:
    """The problem with the changelog's heading, None if it has a date."""
    heading = re.compile(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", re.MULTILINE)
    dated = heading.search((root / "CHANGELOG.md").read_text())
    return None if dated else f"CHANGELOG.md has no date behind [{version}]"


def build_and_check(directory: Path, version: str) -> list[str]:
    """Builds the commit twice, in two places, and returns the problems of the files."""
    first, second = (build(directory / name) for name in ("first", "second"))
    if (names := sorted(first)) != sorted(second):
        return [f"two builds made other files: {names} and {sorted(second)}"]
    problems = [f"{name}: two builds differ" for name in names if digest(first[name]) != digest(second[name])]
    for name in names:
        print(f"{digest(first[name])}  {name}")
        if name.endswith(".whl"):
            problems += wheel_problems(first[name], version)
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, first.values())],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    return problems if checked.returncode == 0 else [*problems, checked.stdout + checked.stderr]


def build(directory: Path) -> dict[str, Path]:
    """The source distributions of the commit, and wheels from nothing but these, by file name."""
    tree, dist = directory / "tree", directory / "dist"
    tree.mkdir(parents=True)
    archive = directory / "tree.tar"
    git("archive", "--output", str(archive), "HEAD")
    unpack(archive, tree)
    for package in packages():
        hatchling("sdist", tree / package.path.relative_to(ROOT), dist)
    for sdist in sorted(dist.glob("*.tar.gz")):
        unpack(sdist, directory / "sources")
        hatchling("wheel", directory / "sources" / sdist.name.removesuffix(".tar.gz"), dist)
    return {path.name: path for path in sorted(dist.iterdir())}


def unpack(archive: Path, directory: Path) -> None:
    """Unpacks an archive of git or hatchling. Python knows filters from 3.11.4 on."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(directory)


def hatchling(target: str, source: Path, dist: Path) -> None:
    """Builds one file. hatchling writes the same bytes at any time, as it dates all entries alike."""
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(dist)]
    subprocess.run(command, cwd=source, check=True, env=environment, stdout=subprocess.DEVNULL)


def wheel_problems(wheel: Path, version: str) -> list[str]:
    """Files that are missing from a wheel, or should not be in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    problems = []
    import_path = "/".join(package_of(wheel).import_name.split("."))
    for wanted in (f"{import_path}/py.typed", f"{Path(metadata).parent}/licenses/LICENSE"):
        if wanted not in names:
            problems.append(f"{wheel.name}: no {wanted}")
    problems += [
        f"{wheel.name}: {name} is not part of the package"
        for name in names
        if re.search(r"(^|/)(tests?|conftest\.py|test_[^/]*\.py)(/|$)", name) or name.endswith((".pyc", ".so"))
    ]
    expected = {"Version": version, "License-Expression": "BSD-3-Clause", "Requires-Python": ">=3.11"}
    problems += [
        f"{wheel.name}: {key} is {fields[key]!r}, expected {value!r}"
        for key, value in expected.items()
        if fields[key] != value
    ]
    if not fields.get_payload().strip():
        problems.append(f"{wheel.name}: no description")
    return problems


def package_of(wheel: Path) -> Package:
    """The package that a wheel was built from."""
    distribution = wheel.name.split("-")[0].replace("_", "-")
    return next(package for package in packages() if package.distribution == distribution)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def keep(built: Path, version: str) -> None:
    """Moves the files to dist/, which must not exist, and tags the commit."""
    shutil.copytree(built, ROOT / "dist")
    git("tag", "--annotate", f"v{version}", "--message", f"shardkit {version}")
    print(f"tagged v{version}; publish with: twine upload dist/*, then git push origin v{version}")


def git(*arguments: str, root: Path = ROOT) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
