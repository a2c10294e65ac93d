"""Two dimensions, data and tensor parallelism on a 2x2 mesh of four ranks: a training step, saving and loading.

The network has 12 blocks of two matrices, 13 MiB in all, cut by rows and by columns over the tensor-parallel ranks. The
paths are timed in turn, on the same ranks.
"""

import functools
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit.core
from benchmarks.turns import in_turn, slowest
from tests.support import rank_mesh, run_ranks
from tests.support.sharding import shard_each

NAMES = ["shardkit", "stock"]
PATHS = pytest.mark.parametrize("path", NAMES)


class RankClock:
    """A timer for pytest-benchmark that advances by the seconds which the ranks have measured."""

    def __init__(self) -> None:
        self._now = 0.0
        self._samples: list[float] = []

    def __call__(self) -> float:
        return self._now

    def tick(self) -> None:
        self._now += self._samples.pop(0)

    def report(self, benchmark, body, path) -> None:
        """The times of `body` on one path, which is timed in turn with the other; the slowest rank's count."""
        self._samples = [*slowest(_ranks(body))[path]]
        benchmark.pedantic(self.tick, rounds=len(self._samples))


clock = RankClock()
pytestmark = pytest.mark.benchmark(timer=clock)


@functools.cache
def _ranks(body):
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(4, body, directory, timeout=120.0)


@PATHS
def test_step_2d(benchmark, path):
    """Forward, backward and AdamW."""
    clock.report(benchmark, _steps, path)


@PATHS
def test_save_2d(benchmark, path, tmp_path):
    """`torch.distributed.checkpoint.save` of the weights; `collectives` counts those that redistribute tensors."""
    benchmark.extra_info["collectives"] = max(run_ranks(4, _collectives_of_a_save, tmp_path, path))
    clock.report(benchmark, _saves, path)


@PATHS
def test_load_2d(benchmark, path):
    """`torch.distributed.checkpoint.load` of the weights."""
    clock.report(benchmark, _loads, path)


def _steps(rank, world_size, directory):
    return in_turn({path: _step(path) for path in NAMES}, rounds=12, warmup=3)


def _step(path):
    network = _network(path)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = torch.randn(64, 192)

    def step():
        network(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _saves(rank, world_size, directory):
    return _of_states(dcp.save, directory)


def _loads(rank, world_size, directory):
    return _of_states(dcp.load, directory)


def _of_states(call, directory):
    """Seconds of the call with the weights of each path, which have been saved."""
    calls = {}
    for path in NAMES:
        state, place = _network(path).state_dict(), f"{directory}/{path}"
        dcp.save(state, checkpoint_id=place)
        calls[path] = functools.partial(call, state, checkpoint_id=place)
    return in_turn(calls, rounds=12, warmup=3)


def _collectives_of_a_save(rank, world_size, directory, path):
    with CommDebugMode() as communication:
        dcp.save(_network(path).state_dict(), checkpoint_id=directory)
    return sum(count for op, count in communication.get_comm_counts().items() if "functional" in str(op))


def _network(path):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)) for _ in range(12)))
    for block in network:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard_each(*network, network, api=shardkit.core if path == "shardkit" else stock, mesh=mesh["dp"])
    network(torch.zeros(1, 192)).sum().backward()
    network.zero_grad()
    return network
