"""The cost of hooks: forward and backward of 16 small groups at world size 1, where nothing has to be communicated."""

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn

import shardkit.core
from benchmarks.rank_clock import by_ranks, clock, sampled
from tests.support import rank_mesh

_GROUPS = 16
_WIDTH = 8


class Scales(nn.Module):
    """A group of `count` parameters that does almost nothing with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(_WIDTH)) for _ in range(count))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


@by_ranks
@pytest.mark.parametrize("path", ["shardkit", "stock", "unsharded"])
@pytest.mark.parametrize("count", [1, 9, 50])
def test_hooks(benchmark, count, path):
    """Forward and backward of all groups, `count` parameters each."""
    clock.measure(benchmark, 1, _hooks, count, path)


def _hooks(rank, world_size, count, path):
    network = nn.Sequential(*(Scales(count) for _ in range(_GROUPS)))
    if path != "unsharded":
        fully_shard = shardkit.core.fully_shard if path == "shardkit" else stock.fully_shard
        mesh = rank_mesh((world_size,), ("shard",))
        for group in network:
            fully_shard(group, mesh=mesh)
        fully_shard(network, mesh=mesh)
    x = torch.ones(2, _WIDTH)

    def step():
        network(x).sum().backward()
        network.zero_grad(set_to_none=True)

    return sampled(step)
