"""State dicts of a sharded network of 48 parameters and 13 MiB on two ranks."""

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardkit.core
from benchmarks.rank_clock import by_ranks, clock, sampled
from tests.support import rank_mesh


@by_ranks
@pytest.mark.parametrize("path", ["shardkit", "stock"])
def test_sharded_state_dict(benchmark, path):
    """`state_dict()`: DTensors, no communication."""
    clock.measure(benchmark, 2, _sharded, path)


@by_ranks
@pytest.mark.parametrize("path", ["shardkit", "stock"])
def test_full_state_dict(benchmark, path):
    """Full tensors, on rank 0 only."""
    clock.measure(benchmark, 2, _full, path)


def _sharded(rank, world_size, path):
    return sampled(_network(world_size, path).state_dict)


def _full(rank, world_size, path):
    network = _network(world_size, path)
    if path == "shardkit":
        return sampled(lambda: shardkit.core.full_state_dict(network))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return sampled(lambda: get_model_state_dict(network, options=options))


def _network(world_size, path):
    fully_shard = shardkit.core.fully_shard if path == "shardkit" else stock.fully_shard
    mesh = rank_mesh((world_size,), ("shard",))
    blocks = (nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)) for _ in range(12))
    network = nn.Sequential(*blocks)
    for block in network:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    network(torch.zeros(1, 192)).sum().backward()
    return network
