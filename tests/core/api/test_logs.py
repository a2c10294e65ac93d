"""SHARDKIT_LOGS: messages of the loggers that it names, with the rank."""

import os
import subprocess
import sys

import pytest

from shardkit.core.observers import start_logs

SCRIPT = """
import logging
import torch
import torch.distributed as dist
from torch import nn
from shardkit.core import fully_shard
logging.basicConfig()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)))
model(torch.ones(1, 2)).sum().backward()
model.reset_iter_state()
"""


@pytest.mark.parametrize(
    ("logs", "modules"),
    [
        ("all,+core.engine", ["engine.root", "engine.group", "engine.group", "engine.step"]),
        ("all,-core.engine", []),
    ],
)
def test_the_loggers_that_are_named_write_once(logs: str, modules: list[str]) -> None:
    environment, command = {**os.environ, "SHARDKIT_LOGS": logs}, [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stderr.splitlines() if "shardkit" in line]
    assert [line.split(" rank 0 shardkit.core.")[1].split(":")[0] for line in lines] == modules
    if modules:
        assert "Sequential is a root: 4 parameters in 2 groups of 2 calls" in lines[0]


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_LOGS", "+engine")
    with pytest.raises(ValueError, match=r"SHARDKIT_LOGS has '\+engine'; use all, core.engine or core.checkpoint"):
        start_logs.__wrapped__()
