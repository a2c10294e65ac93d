"""Bodies that train a small model under the profiler on every rank."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import fully_shard
from shardkit.tools.profiling import profile
from shardkit.tools.report.schema import Report

WIDTH = 12  # every world size from 1 to 4 divides it
BLOCKS = 3
BATCH = 5
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROOT_BYTES = 2 * BLOCK_BYTES


class Chain(nn.Module):
    """Equal blocks between two linear layers that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def sharded_chain(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(0)
    model = Chain()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    """One step."""
    for _ in range(micro_batches):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled(
    rank: int,
    world_size: int,
    steps: int,
    prepare: Callable[[Any], None] | None = None,
    shared: bool = True,
    micro_batches: int = 1,
    **options: Any,
) -> Report | None:
    """The report of a run of `steps` steps, two more before it begins so that forward's order is known."""
    mesh = None
    if not shared:
        os.environ["SHARDKIT_SHARED_MEMORY"] = "0"
        # Whether memory is shared is asked once for a process group, so this takes a new one.
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = sharded_chain(mesh)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        train(model, optimizer)
    with profile(model, optimizer, **options) as run:
        for _ in range(steps):
            train(model, optimizer, micro_batches)
    return run.report
