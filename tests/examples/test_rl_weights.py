"""The script of examples/rl_weights: two ranks train, a third process generates, and the reward rises."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "rl_weights" / "train.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("arguments", [(), ("--delta",)], ids=["whole", "delta"])
def test_the_reward_rises(tmp_path, arguments):
    environment = {**os.environ, "SHARDKIT_SHARED_MEMORY": "0"}
    with (tmp_path / "generate.txt").open("w") as said:
        generating = subprocess.Popen([sys.executable, SCRIPT, "--generate"], stdout=said, stderr=said, env=environment)
    try:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        trained = subprocess.run(
            [*launch, SCRIPT, *arguments], check=False, capture_output=True, text=True, env=environment, timeout=400
        )
        assert trained.returncode == 0, trained.stderr + (tmp_path / "generate.txt").read_text()
        assert generating.wait(60) == 0, (tmp_path / "generate.txt").read_text()
    finally:
        generating.kill()
        generating.wait()
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", trained.stdout)]
    assert rewards[0] < 0.3 and rewards[-1] > 0.8
