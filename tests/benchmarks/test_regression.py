"""A comparison that is worse than the last saved one on the same machine is reported, and nothing else is."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REGRESSION = Path(__file__).parents[2] / "benchmarks" / "regression.py"


def _ratio(median: float, spread: float = 0.02, rounds: int = 7) -> dict[str, float]:
    low, high = median - spread, median + spread
    return {
        "median": median,
        "first_quartile": low,
        "third_quartile": high,
        "least": low - spread,
        "most": high + spread,
        "rounds": rounds,
    }


def _run() -> dict[str, Any]:
    """The form of `compare.py --json`, which test_compare.py makes for real."""
    return {
        "surroundings": {
            "date": "2026-01-05 10:00",
            "cpu": "Some CPU @ 2.50GHz",
            "cores": 2,
            "system": "Linux 6.1",
            "torch": "2.13.0",
            "commit": "abc1234",
        },
        "settings": {"workload": "tiny", "world_size": 2, "device": "cpu", "systems": ["shardkit", "fsdp2", "ddp"]},
        "rows": [
            {"key": "step", "label": "step time", "ratios": {"fsdp2": _ratio(0.5), "ddp": _ratio(0.8)}},
            {"key": "calls", "label": "c10d calls", "ratios": {"fsdp2": _ratio(2.0, spread=0, rounds=1)}},
        ],
        "measured": {},
    }


def _regression(directory: Path, run: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "new.json"
    file.write_text(json.dumps({"runs": [run]}))
    command = [sys.executable, str(REGRESSION), str(file), f"--results={directory / 'results'}", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with one saved run."""
    done = _regression(tmp_path, _run(), "--save")
    assert done.returncode == 0, done.stderr
    assert "nothing saved of this" in done.stdout
    (file,) = (tmp_path / "results").iterdir()
    assert json.loads(file.read_text()) == _run()
    assert file.name == "tiny_2_cpu_shardkit.json"
    return tmp_path


def _changed(row: int, system: str, ratio: dict[str, float]) -> dict[str, Any]:
    run = copy.deepcopy(_run())
    run["rows"][row]["ratios"][system] = ratio
    run["surroundings"]["date"] = "2026-01-06 09:00"
    return run


@pytest.mark.parametrize(
    ("row", "system", "ratio", "line"),
    [
        (0, "fsdp2", _ratio(0.6), "step time, shardkit to fsdp2: 0.500 -> 0.600 WORSE"),
        (1, "fsdp2", _ratio(2.5, spread=0, rounds=1), "c10d calls, shardkit to fsdp2: 2.000 -> 2.500 WORSE"),
    ],
)
def test_a_ratio_that_has_grown_fails(saved: Path, row: int, system: str, ratio: Any, line: str) -> None:
    done = _regression(saved, _changed(row, system, ratio))
    assert done.returncode == 1, done.stdout
    assert line in done.stdout
    assert "1 of 3 ratios are worse" in done.stdout


@pytest.mark.parametrize("ratio", [_ratio(0.4), _ratio(0.54), _ratio(0.6, spread=0.2)])
def test_better_little_or_scattered_is_no_regression(saved: Path, ratio: Any) -> None:
    done = _regression(saved, _changed(0, "fsdp2", ratio))
    assert done.returncode == 0, done.stdout
    assert "WORSE" not in done.stdout


def test_the_last_saved_run_counts(saved: Path) -> None:
    worse = _changed(0, "fsdp2", _ratio(0.6))
    assert _regression(saved, worse, "--save").returncode == 1  # reported, and kept as asked
    assert _regression(saved, worse).returncode == 0
    assert len(list((saved / "results").iterdir())) == 1


@pytest.mark.parametrize(("part", "name", "value"), [("surroundings", "cpu", "Another"), ("settings", "world_size", 4)])
def test_another_machine_or_configuration_is_not_compared(saved: Path, part: str, name: str, value: Any) -> None:
    run = _changed(0, "fsdp2", _ratio(5.0))
    run[part][name] = value
    done = _regression(saved, run)
    assert done.returncode == 0
    assert "nothing saved of this" in done.stdout
