"""The examples, as their heads say to start them, for a few steps."""

import re
import sys
from pathlib import Path

import pytest

from tests.trainers.launch import ROOT, succeeded

LOSS = {"hf_trainer": r"'loss': '?([0-9.]+)", "lightning": r"loss ([0-9.]+)"}


@pytest.mark.parametrize("name", sorted(LOSS))
def test_it_trains_on_our_engine(name: str, tmp_path: Path):
    pytest.importorskip("accelerate" if name == "hf_trainer" else "lightning")
    script = ROOT / "examples" / name / "train.py"
    command = [sys.executable, str(script), "--steps=20"]
    if name == "hf_trainer":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command.append(f"--directory={tmp_path}")
    done = succeeded(command, tmp_path)
    ran = r"^shardkit .* runs .*: [\d,]+ parameters in \d+ groups, 2 ranks$"
    assert len(re.findall(ran, done.stderr, re.MULTILINE)) == 1
    losses = [float(value) for value in re.findall(LOSS[name], done.stdout + done.stderr)]
    assert len(losses) >= 2, done.stdout
    assert losses[-1] < losses[0]
