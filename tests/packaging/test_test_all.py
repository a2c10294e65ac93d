"""`hatch run test-all` runs every part, whichever fails, and then fails itself."""

import os
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


@pytest.mark.parametrize("failing", [None, *PARTS])
def test_every_part_runs_and_one_that_fails_fails_all(tmp_path: Path, failing: str | None) -> None:
    """With programs that only note how they were called; one of them fails."""
    stand_in = f'#!/bin/sh\necho "${{0##*/}} $*" >>{tmp_path}/ran\n[ "${{0##*/}} $*" != "{failing}" ]\n'
    for name in {part.split()[0] for part in PARTS}:
        (tmp_path / name).write_text(stand_in)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    command = ["bash", str(SCRIPT), "-k", "one test"]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "ran").read_text().splitlines() == PARTS
    assert done.returncode == (failing is not None)
    assert done.stderr.split("failed: ")[1:] == ([] if failing is None else [f"{failing}\n"])
