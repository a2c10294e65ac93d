"""Two dimensions, data and tensor parallelism on a 2x2 mesh of four ranks: a training step, saving and loading.

The network has 12 blocks of two matrices, 13 MiB in all, cut by rows and by columns over the tensor-parallel ranks. The
paths are timed in turn, on the same ranks.
"""

import functools
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit.core
from benchmarks.rank_clock import by_ranks, clock, in_turn
from tests.support import rank_mesh, run_ranks

NAMES = ["shardkit", "stock"]
PATHS = pytest.mark.parametrize("path", NAMES)


@by_ranks
@PATHS
def test_step_2d(benchmark, path):
    """Forward, backward and AdamW."""
    clock.report(benchmark, [seconds[path] for seconds in _both(_steps)])


@by_ranks
@PATHS
def test_save_2d(benchmark, path):
    """`torch.distributed.checkpoint.save` of the weights; `collectives` counts those that redistribute tensors."""
    benchmark.extra_info["collectives"] = max(run_ranks(4, _collectives_of_a_save, path))
    clock.report(benchmark, [seconds[path] for seconds in _both(_saves)])


@by_ranks
@PATHS
def test_load_2d(benchmark, path):
    """`torch.distributed.checkpoint.load` of the weights."""
    clock.report(benchmark, [seconds[path] for seconds in _both(_loads)])


@functools.cache
def _both(body):
    return run_ranks(4, body, timeout=120.0)


def _steps(rank, world_size):
    return in_turn({path: _step(path) for path in NAMES})


def _step(path):
    network = _network(path)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = torch.randn(64, 192)

    def step():
        network(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _saves(rank, world_size):
    states, where = {path: _network(path).state_dict() for path in NAMES}, _directory()
    seconds = in_turn(
        {path: functools.partial(dcp.save, state, checkpoint_id=f"{where}/{path}") for path, state in states.items()}
    )
    _remove(where)
    return seconds


def _loads(rank, world_size):
    states, where = {path: _network(path).state_dict() for path in NAMES}, _directory()
    for path, state in states.items():
        dcp.save(state, checkpoint_id=f"{where}/{path}")
    seconds = in_turn(
        {path: functools.partial(dcp.load, state, checkpoint_id=f"{where}/{path}") for path, state in states.items()}
    )
    _remove(where)
    return seconds


def _collectives_of_a_save(rank, world_size, path):
    state, where = _network(path).state_dict(), _directory()
    with CommDebugMode() as communication:
        dcp.save(state, checkpoint_id=where)
    _remove(where)
    return sum(count for op, count in communication.get_comm_counts().items() if "functional" in str(op))


def _directory():
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    return where[0]


def _remove(where):
    dist.barrier()
    shutil.rmtree(where, ignore_errors=True)


def _network(path):
    fully_shard = shardkit.core.fully_shard if path == "shardkit" else stock.fully_shard
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)) for _ in range(12)))
    for block in network:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(network, mesh=mesh["dp"])
    network(torch.zeros(1, 192)).sum().backward()
    network.zero_grad()
    return network
