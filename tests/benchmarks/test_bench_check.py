"""`hatch run bench-save` and `bench-check`: a benchmark that is slower than the saved one fails."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]["scripts"]
# Instead of our benchmarks, which take a minute: the test is about the scripts.
BENCHMARK = "def test_one(benchmark):\n    benchmark(sum, range(1000))\n"


def _run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of the workspace on the benchmark in `directory`, or on ours, with results in `directory`."""
    first, options = SCRIPTS[script].split(maxsplit=1)
    assert first == "bench"
    words = shlex.split(SCRIPTS["bench"].replace("{args}", options.removesuffix("{args}")))
    assert words[:2] == ["pytest", "benchmarks"]
    where = directory / "test_one.py"
    command = [sys.executable, "-m", "pytest", str(where) if where.exists() else "benchmarks", *words[2:]]
    command += [f"--benchmark-storage=file://{directory / 'results'}", "-p", "no:cacheprovider"]
    # A worker of pytest-xdist marks its environment, and pytest-benchmark then measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_benchmark_that_is_slower_than_the_saved_one_fails(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(BENCHMARK)
    done = _run("bench-save", tmp_path)
    assert done.returncode == 0, done.stdout
    (file,) = (tmp_path / "results").rglob("*.json")
    saved = json.loads(file.read_text())
    assert saved["commit_info"]["id"]
    assert saved["machine_info"]["python_version"]
    for factor, expected in ((100, 0), (0.01, 1)):
        changed = json.loads(json.dumps(saved))
        for name in ("min", "max", "mean", "median"):
            changed["benchmarks"][0]["stats"][name] = saved["benchmarks"][0]["stats"][name] * factor
        file.write_text(json.dumps(changed))
        done = _run("bench-check", tmp_path)
        assert done.returncode == expected, done.stdout + done.stderr
    assert "Performance has regressed" in done.stdout + done.stderr


def test_a_comparison_with_nothing_says_what_to_run_first(tmp_path: Path) -> None:
    """As in a fresh clone, before any benchmark runs."""
    done = _run("bench-check", tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "ERROR: no benchmarks have been saved on this machine" in done.stderr
    assert "run `hatch run bench-save` first" in done.stderr
    assert "collected" not in done.stdout
