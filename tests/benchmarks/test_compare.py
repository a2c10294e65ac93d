"""The comparisons run, with models too small to measure anything, and their tables follow from the samples."""

import json
import os
import shutil
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

    assert measured["alone"]["traffic"]["calls"] == {}
    assert sum(measured["fsdp2"]["traffic"]["calls"].values()) > 0
    for name in ("shardkit", "fsdp2"):
        for rank in measured[name]["agreement"]:
            assert rank["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or None in map(shutil.which, ("ip", "tc")), reason="network namespaces need root, ip and tc"
)
def test_muon_over_a_link(tmp_path):
    """Matrices stay whole, so the optimizer sends nothing. All traffic crosses the link, as memory is not shared."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(COMPARE), "--model=tiny", "--world-size=2", "--optimizer=muon", "--link=100mbit"]
    command += ["--systems=shardkit,fsdp2", "--rounds=1", "--steps=1", "--warmup=0", f"--json={result}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "largest load over the mean 1.0" in out
    (run,) = json.loads(result.read_text())["runs"]
    assert run["surroundings"]["link"] == "100mbit"
    ours, theirs = (run["measured"][name]["traffic"] for name in ("shardkit", "fsdp2"))
    assert 0 < ours["socket_bytes"] < theirs["socket_bytes"]
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert f"compare{process.pid}" not in left


WEIGHTS = Path(__file__).parents[2] / "benchmarks" / "weights.py"
WAYS = ["sockets", "in place", "gather"]


@pytest.mark.slow
def test_tiny_weights(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, str(WEIGHTS), "--width=24", "--receivers=2", "--passes=1", "--rounds=2", "--links=none"]
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
