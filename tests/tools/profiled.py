"""Bodies that train a small model under the profiler on every rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.tools.profiling import profile
from shardkit.tools.report.schema import Report
from tests.support.sharding import shard_each

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
    return shard_each(*model.blocks, model, mesh=mesh)


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(BATCH, WIDTH)).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, micro_batches: int = 1) -> torch.Tensor:
    """One step; returns the last loss."""
    for _ in range(micro_batches):
        loss = backward(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def profiled(
    rank: int,
    world_size: int,
    count: int,
    *,
    prepare: Callable[[Any], None] | None = None,
    mesh: Callable[[], DeviceMesh | None] = lambda: None,
    micro_batches: int = 1,
    before: int = 2,
    **options: Any,
) -> Report | None:
    """The report of a run of that many steps, with two before it begins so that forward's order is known."""
    model = sharded_chain(mesh())
    if prepare is not None:
        prepare(model)
    optimizer = adamw(model)
    for _ in range(before):
        train(model, optimizer)
    with profile(model, optimizer, **options) as run:
        for _ in range(count):
            train(model, optimizer, micro_batches=micro_batches)
    return run.report
