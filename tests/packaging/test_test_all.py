"""`hatch run test-all` and `hatch run gpu` run every part, whichever fails, and then fail themselves."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_all.sh"
PARTS = [
    "pytest -k one test",
    "hatch run trainers:test-all",
    "python -m tests.core.random_programs --count 200",
    "python -m tests.faults.campaign --each 10",
]
_RESULTS = "--profile .benchmarks/gpu --json .benchmarks/gpu/compare.json"
GPU_PARTS = ["pytest tests/gpu", f"python benchmarks/compare.py --device cuda {_RESULTS} --rounds 3"]


def _run(
    shell: str, arguments: list[str], parts: list[str], directory: Path, failing: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a script with programs that only note how they were called, to `directory / "ran"`; one fails."""
    stand_in = f'#!/bin/sh\necho "${{0##*/}} $*" >>{directory}/ran\n[ "${{0##*/}} $*" != "{failing}" ]\n'
    for name in {part.split()[0] for part in parts}:
        (directory / name).write_text(stand_in)
        (directory / name).chmod(0o755)
    path = os.pathsep.join([str(directory), os.environ["PATH"]])
    program = shutil.which(shell)
    assert program is not None
    return subprocess.run(
        [program, *arguments], env={"PATH": path}, check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("failing", [None, *PARTS])
def test_every_part_runs_and_one_that_fails_fails_all(tmp_path: Path, failing: str | None) -> None:
    done = _run("bash", [str(SCRIPT), "-k", "one test"], PARTS, tmp_path, failing)
    assert (tmp_path / "ran").read_text().splitlines() == PARTS
    assert done.returncode == (failing is not None)
    assert done.stderr.split("failed: ")[1:] == ([] if failing is None else [f"{failing}\n"])


@pytest.mark.parametrize("failing", [None, *GPU_PARTS])
def test_the_comparison_on_gpus_runs_after_a_test_that_fails(tmp_path: Path, failing: str | None) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]["scripts"]
    done = _run("sh", ["-c", scripts["gpu"].replace("{args}", "--rounds 3")], GPU_PARTS, tmp_path, failing)
    assert (tmp_path / "ran").read_text().splitlines() == GPU_PARTS
    assert done.returncode == (failing is not None)
