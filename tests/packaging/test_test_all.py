"""`hatch run test-all` runs every part, whichever fails, and then fails itself."""

import os
import shutil
import subprocess
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
