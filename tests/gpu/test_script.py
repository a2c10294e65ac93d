"""The script on a CPU: all of its parts, parts that fail, hang and crash, a machine without a GPU, and publishing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import publish
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
    broken = {"memory": ["fail", "crash", "nothing"], "speed": ["hang", "nothing"]}
    done = _run(
        *("--parts", "memory,speed", "--out", str(tmp_path)),
        SHARDKIT_GPU_TESTS="cpu",
        SHARDKIT_GPU_TESTS_BREAK=json.dumps(broken),
    )
    assert done.returncode == 1
    states = {(row["part"], row["check"]): row["state"] for row in _rows(tmp_path)}
    assert states["memory", "fail"] == states["memory", "crash"] == "failed" and states["speed", "hang"] == "hung"
    assert states["memory", "nothing"] == states["speed", "nothing"] == "ok"
    assert "(most recent call first)" in (tmp_path / "log.txt").read_text()  # the stack of the rank that hung


def test_a_machine_without_a_gpu() -> None:
    done = _run("--minutes", "1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "there is no GPU on this machine" in done.stdout and done.stdout.count("\n") == 1


def _published(gpu: str | None) -> dict[str, Any]:
    facts = {"gpu": gpu, "torch": "2.11.0", "nccl": "2.28.9", "commit": "0123abc", "date": "2026-01-02"}
    row = {"part": "speed", "job": "one rank", "check": "deep", "state": "ok", "note": "", "seconds": 1.0}
    figures = {"stock": {"ms": 20.0, "host_ms": 18.0}, "ours": {"ms": 10.0, "host_ms": 9.0}, "world": 1}
    return {
        "facts": facts,
        "rows": [{**row, "figures": figures}, {**row, "part": "right", "state": "hung", "figures": None}],
    }


def test_results_are_published_between_the_marks(tmp_path: Path) -> None:
    pages = [tmp_path / page for page in publish._PAGES]
    for page in pages:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"before\n{publish.BEGIN}\nnothing yet\n{publish.END}\nafter\n")
    for number in range(2):  # a second time replaces the first
        (tmp_path / "results.json").write_text(json.dumps(_published("NVIDIA H100 80GB HBM3")))
        path = publish.publish(tmp_path, tmp_path)
        assert path.name == "nvidia-h100-80gb-hbm3.json", number
    for page in pages:
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "nothing yet" not in text
        assert text.count("| deep, one rank: ms a step | 20 | 10 | 0.50 |") == 1
        assert "1 checks held, 1 did not (right: one rank, deep)" in text
    (tmp_path / "results.json").write_text(json.dumps(_published(None)))
    with pytest.raises(SystemExit, match="without a GPU"):
        publish.publish(tmp_path, tmp_path)


@pytest.mark.parametrize("page", publish._PAGES)
def test_the_pages_have_a_place_for_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count(publish.BEGIN) == text.count(publish.END) == 1
    assert (ROOT / publish._RESULTS).exists() or "no figure is from a gpu" in text.lower().replace("\n", " ")
