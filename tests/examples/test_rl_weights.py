"""The scripts of examples/rl_weights: two ranks train, a server generates with their weights, and the reward rises."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "rl_weights"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("arguments", [(), ("--delta",)], ids=["whole", "delta"])
def test_the_reward_rises(tmp_path, arguments):
    environment = {**os.environ, "SHARDKIT_SHARED_MEMORY": "0"}
    with (tmp_path / "server.txt").open("w") as said:
        server = subprocess.Popen([sys.executable, SCRIPTS / "server.py"], stdout=said, stderr=said, env=environment)
    try:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        trained = subprocess.run(
            [*launch, SCRIPTS / "train.py", *arguments],
            check=False, capture_output=True, text=True, env=environment, timeout=400,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stderr + (tmp_path / "server.txt").read_text()
        assert server.poll() is None, (tmp_path / "server.txt").read_text()
    finally:
        server.kill()
        server.wait()
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", trained.stdout)]
    assert rewards[0] < 0.3 and rewards[-1] > 0.8
