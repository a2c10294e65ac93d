"""examples/rl_weights/grpo.py: TRL's GRPO on two ranks, with completions of servers that get the weights."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.support.ports import free_ports
from tests.trainers.launch import ENVIRONMENT, ROOT, succeeded

pytest.importorskip("trl")

EXAMPLE = ROOT / "examples" / "rl_weights"
REQUEST = {"prompts": [[3], [5, 7]], "tokens": 6, "seed": 11}


@pytest.mark.parametrize("options", [(), pytest.param(("--delta",), marks=pytest.mark.slow)])
def test_servers_generate_with_the_latest_weights_and_the_reward_rises(options: tuple[str, ...], tmp_path):
    """The script itself checks the version of each answer."""
    import torch
    from transformers import AutoModelForCausalLM

    weights, *ports = free_ports(3)
    address, urls = f"tcp://127.0.0.1:{weights}", [f"http://127.0.0.1:{port}" for port in ports]
    serve = [sys.executable, EXAMPLE / "server.py", "--weights", address, "--port"]
    servers = [subprocess.Popen([*serve, str(port)], env=os.environ | ENVIRONMENT) for port in ports]
    try:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [EXAMPLE / "grpo.py", "--weights", address, "--servers", *urls, "--out", tmp_path, *options]
        done = succeeded(command, timeout=500)
        assert re.search(r"^shardkit .* runs .* groups, 2 ranks$", done.stderr, re.MULTILINE)

        spec = importlib.util.spec_from_file_location("server", EXAMPLE / "server.py")
        assert spec is not None and spec.loader is not None
        server = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(server)
        trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        expected = {"version": 80, **server.generate(trained, **REQUEST)}
        assert [server.complete(url, **REQUEST) for url in urls] == [expected, expected]
    finally:
        for one in servers:
            one.kill()
            one.wait()
    rewards = [float(one) for one in re.findall(r"'reward': '?([0-9.]+)", done.stdout)]
    assert rewards[0] < 0.2 and rewards[-1] > 0.6
