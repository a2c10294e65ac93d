"""A training script that knows nothing of tools: `small_job.py [failure of the last rank in step 2]`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import fully_shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int = -1) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = torch.tanh(block(x))
        return x


def main(trouble: str) -> None:
    dist.init_process_group("gloo")
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(6):
        here = step == 2 and dist.get_rank() == dist.get_world_size() - 1
        if step == 2 and trouble == "kill before":
            pids = [0] * dist.get_world_size()
            dist.all_gather_object(pids, os.getpid())
            if not here:
                wait_for_the_end_of(pids[-1])
        if here and trouble.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if here and trouble == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if here and trouble == "elsewhere":
            wait_elsewhere()
        net(torch.randn(4, 16), 1 if here and trouble == "branch" else -1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def wait_elsewhere() -> None:
    time.sleep(1000)


def wait_for_the_end_of(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and ") Z " not in state.read_text():
        time.sleep(0.01)
    # Until gloo has noticed. On a busy machine this may come later: then the wait fails, as for "kill".
    time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
