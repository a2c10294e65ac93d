"""The script on a CPU: all of its parts, parts that fail, hang and crash, and a machine without a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.plan import PARTS
from tests.support.lacking import lacking

ROOT = Path(__file__).parents[2]


def hang(place: Any) -> None:
    time.sleep(600)


def fail(place: Any) -> None:
    raise AssertionError("as asked")


def crash(place: Any) -> None:
    os.abort()


def nothing(place: Any) -> None:
    pass


def _run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """From the root, with no path set: the script brings its own."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "tests.gpu", *words]
    return subprocess.run(
        command, cwd=ROOT, env=env | environment, capture_output=True, text=True, timeout=500, check=False
    )


def _rows(directory: Path) -> list[dict[str, Any]]:
    assert len([*directory.iterdir()]) <= 8
    rows: list[dict[str, Any]] = json.loads((directory / "results.json").read_text())["rows"]
    return rows


@pytest.mark.slow
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    done = _run("--minutes", "8", "--out", str(tmp_path), SHARDKIT_GPU_TESTS="cpu")
    rows = _rows(tmp_path)
    bad = [(row["check"], row["state"], row["note"]) for row in rows if row["state"] not in ("ok", "skipped")]
    assert not bad, done.stdout + (tmp_path / "log.txt").read_text()[-4000:]
    assert done.returncode == 0
    assert {row["part"] for row in rows} == set(PARTS)
    skipped = {row["note"] for row in rows if row["state"] == "skipped"}
    skipped = {note for note in skipped if "msgspec is not installed" not in note and not lacking(note)}
    assert skipped <= {"needs a GPU"}
    assert done.stdout.rstrip().endswith((tmp_path / "table.txt").read_text().rstrip())


def test_a_check_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    broken = {"memory": ["fail", "crash", "hang", "nothing"]}
    done = _run(
        *("--parts", "memory", "--out", str(tmp_path)),
        SHARDKIT_GPU_TESTS="cpu",
        SHARDKIT_GPU_TESTS_BREAK=json.dumps(broken),
    )
    assert done.returncode == 1
    states = {row["check"]: row["state"] for row in _rows(tmp_path)}
    assert states == {"fail": "failed", "crash": "failed", "hang": "hung", "nothing": "ok"}
    assert "(most recent call first)" in (tmp_path / "log.txt").read_text()  # the stack of the rank that hung


def test_a_machine_without_a_gpu() -> None:
    done = _run("--minutes", "1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "there is no GPU on this machine" in done.stdout and done.stdout.count("\n") == 1
