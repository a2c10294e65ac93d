"""The comparison runs, on a network too small to measure anything, and its table follows from its samples."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
SYSTEMS = ["shardkit", "fsdp2", "alone"]


@pytest.mark.slow
def test_tiny_comparison(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, str(COMPARE), "--model=tiny", "--world-size=2", f"--systems={','.join(SYSTEMS)}"]
    command += ["--rounds=3", "--steps=1", "--warmup=1", f"--json={result}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(result.read_text())["runs"]
    measured = run["measured"]
    assert list(measured) == SYSTEMS

    rows = {row["key"]: row for row in run["rows"]}
    steps = {name: [times["step"] for times in one["rounds"]] for name, one in measured.items()}
    expected = median(ours / theirs for ours, theirs in zip(steps["shardkit"], steps["fsdp2"], strict=True))
    assert rows["step"]["ratios"]["fsdp2"]["median"] == pytest.approx(expected)
    assert "agreement with shardkit" in done.stderr
