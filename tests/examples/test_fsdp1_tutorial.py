"""The FSDP1 script of examples/fsdp1_tutorial: the same losses on stock and, with its imports rewritten, on ours."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from shardkit.legacy_fsdp_compat.migrate.script import rewrite

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp1_tutorial" / "train.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


RUNS = [("--use-orig-params",), ("--strategy", "SHARD_GRAD_OP", "--bfloat16")]
DRIVER = """
import json, os, runpy, sys
script, runs = sys.argv[1], json.loads(sys.argv[2])
for number, arguments in enumerate(runs):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # keys of their own in the agent's store
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""
"""Both runs in one job: most of the time of a job goes into starting its processes."""


def run(script: Path, directory: Path) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of each run, on two processes."""
    (directory / "driver.py").write_text(DRIVER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "driver.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        done = subprocess.run(
            [*launcher, str(script), json.dumps(RUNS)],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        # Seen once, on an overloaded machine: SIGABRT in a rank. Which side aborts, and why, is open.
        if "SIGABRT" not in done.stderr:
            break
        warnings.warn(f"{script.name} aborted:\n{done.stderr}", stacklevel=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(int(step), float(loss), float(norm)) for step, loss, norm in LINE.findall(done.stdout)]
    assert [step for step, *_ in found] == list(range(10)) * len(RUNS), done.stdout
    return [[(loss, norm) for _, loss, norm in found[first : first + 10]] for first in range(0, len(found), 10)]


@pytest.mark.slow
def test_the_losses_are_those_of_stock(tmp_path: Path):
    ours = tmp_path / "train_on_shardkit.py"
    result = rewrite(SCRIPT.read_text())
    assert result.findings == []
    changed = [
        (before, after)
        for before, after in zip(SCRIPT.read_text().splitlines(), result.source.splitlines(), strict=True)
        if before != after
    ]
    assert all(before.startswith("from torch.distributed.fsdp") for before, _ in changed)
    assert all(after.startswith("from shardkit.legacy_fsdp_compat") for _, after in changed)
    ours.write_text(result.source)
    for arguments, expected, seen in zip(RUNS, run(SCRIPT, tmp_path), run(ours, tmp_path), strict=True):
        assert expected[-1][0] < expected[0][0]
        tolerance = 2e-2 if "--bfloat16" in arguments else 2e-5
        for step, (theirs, mine) in enumerate(zip(expected, seen, strict=True)):
            assert mine == pytest.approx(theirs, rel=tolerance), f"step {step} of {' '.join(arguments)}"
