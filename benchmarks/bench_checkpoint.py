"""Checkpoints of a sharded network of 48 parameters, 3.5 million elements: sharded files, and full state dicts in."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import shardkit.core
from benchmarks.bench_gather import DTYPES
from benchmarks.rank_clock import by_ranks, clock, sampled
from tests.support import rank_mesh

PATHS = pytest.mark.parametrize("path", ["shardkit", "stock"])
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 4])
KINDS = pytest.mark.parametrize("dtype", DTYPES)


@by_ranks
@PATHS
@WORLD_SIZES
@KINDS
def test_save(benchmark, dtype, world_size, path):
    """`torch.distributed.checkpoint.save` of `state_dict()`."""
    clock.measure(benchmark, world_size, _save, DTYPES[dtype], path)


@by_ranks
@PATHS
@WORLD_SIZES
@KINDS
def test_load(benchmark, dtype, world_size, path):
    """`torch.distributed.checkpoint.load` into `state_dict()`."""
    clock.measure(benchmark, world_size, _load, DTYPES[dtype], path)


@by_ranks
@PATHS
@WORLD_SIZES
def test_load_full(benchmark, world_size, path):
    """A full state dict that rank 0 has alone."""
    clock.measure(benchmark, world_size, _load_full, path)


def _save(rank, world_size, dtype, path):
    network = _network(world_size, dtype, path)
    with _Directory(rank) as directory:
        return sampled(lambda: dcp.save(network.state_dict(), checkpoint_id=directory))


def _load(rank, world_size, dtype, path):
    network = _network(world_size, dtype, path)
    expected = [parameter.to_local().clone() for parameter in network.parameters()]
    with _Directory(rank) as directory:
        dcp.save(network.state_dict(), checkpoint_id=directory)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()
        seconds = sampled(lambda: dcp.load(network.state_dict(), checkpoint_id=directory))
    for parameter, saved in zip(network.parameters(), expected, strict=True):
        assert torch.equal(parameter.to_local(), saved), f"{path} loaded something else"
    return seconds


def _load_full(rank, world_size, path):
    network = _network(world_size, torch.float32, path)
    full = {name: torch.full(p.shape, 0.5) for name, p in network.named_parameters()} if rank == 0 else {}
    if path == "shardkit":
        seconds = sampled(lambda: shardkit.core.load_full_state_dict(network, full if rank == 0 else None))
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # A copy: the call puts its distributed tensors into the dict that it is given.
        seconds = sampled(lambda: set_model_state_dict(network, dict(full), options=options))
    assert all(bool((parameter.to_local() == 0.5).all()) for parameter in network.parameters())
    return seconds


class _Directory:
    """A directory that all ranks know; rank 0 makes it and removes it."""

    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        made = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(made)
        self.path = made[0]
        return self.path

    def __exit__(self, *unused):
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.path)


def _network(world_size, dtype, path):
    fully_shard = shardkit.core.fully_shard if path == "shardkit" else stock.fully_shard
    mesh = rank_mesh((world_size,), ("shard",))
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)) for _ in range(12))
    network = nn.Sequential(*blocks).to(dtype)
    for block in network:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)
