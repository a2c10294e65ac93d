"""The benchmark of weights runs, with a model too small to measure anything, and counts what is sent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weights.py"
WAYS = ["sockets", "in place", "gather"]


@pytest.mark.slow
def test_tiny_comparison(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--width=24", "--receivers=2", "--passes=1", "--rounds=2", "--links=none"]
    command += [f"--json={result}", "--ways", *WAYS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sockets, in_place, gather = rows = json.loads(result.read_text())["rows"]
    assert [row["way"] for row in rows] == WAYS
    assert all(len(row["whole"]) == len(row["still"]) == 2 for row in rows)
    assert sum(sockets["sent"]) == sum(in_place["sent"])  # the script compares it with the bytes wanted
    assert gather["sent"][0] > sum(sockets["sent"]) and gather["sent"][1] == 0
    assert all(row["sender_memory"] > 0 and row["receiver_memory"] > 0 for row in rows)
    assert done.stdout.count("| none | 2 |") == 3
