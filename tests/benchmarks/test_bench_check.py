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
ONE = "benchmarks/bench_hooks.py::test_hooks[1-unsharded]"


def _run(script: str, storage: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of the workspace for one benchmark, with results elsewhere."""
    line = SCRIPTS[script].removeprefix("bench ")
    words = shlex.split(line if script == "bench" else SCRIPTS["bench"].replace("{args}", line))
    assert words[:2] == ["pytest", "benchmarks"]
    words = [ONE if word == "benchmarks" else word for word in words[1:] if word != "{args}"]
    words += [f"--benchmark-storage=file://{storage}", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_benchmark_that_is_slower_than_the_saved_one_fails(tmp_path: Path) -> None:
    done = _run("bench-save", tmp_path)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.rglob("*.json")
    saved = json.loads(file.read_text())
    assert saved["commit_info"]["id"]
    assert saved["machine_info"]["torch"]
    for factor, expected in ((100, 0), (0.01, 1)):
        changed = json.loads(json.dumps(saved))
        for name in ("min", "max", "mean", "median"):
            changed["benchmarks"][0]["stats"][name] = saved["benchmarks"][0]["stats"][name] * factor
        file.write_text(json.dumps(changed))
        done = _run("bench-check", tmp_path)
        assert done.returncode == expected, done.stdout
    assert "Performance has regressed" in done.stdout + done.stderr
