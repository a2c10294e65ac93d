"""Gathering one parameter group: the runtime's plan against the stock collective path, on gloo."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import stock_paths
from benchmarks.rank_clock import by_ranks, clock, sampled
from shardkit.core.runtime.choice import transport_for
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.plan import GatherItem, plan_gather
from shardkit.core.runtime.sharding import ChunkLayout

CPU = torch.device("cpu")
# Numels by name (MiB in fp32), all divisible by 12. `block` is a transformer block of width 512.
GROUPS = {
    "one-1MiB": (2**18 // 12 * 12,),
    "one-12MiB": (3 * 2**20,),
    "block-12MiB": (*(516,) * 6, 1536, 2052, 262152, 786432, *(1048572,) * 2),
    "fifty-1MiB": (5244,) * 50,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@by_ranks
@pytest.mark.parametrize("path", ["shardkit", "stock"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_gather(benchmark, group, dtype, world_size, path):
    clock.measure(benchmark, world_size, _gather, GROUPS[group], DTYPES[dtype], path)


def _gather(rank, world_size, numels, dtype, path):
    chunks = [torch.full((numel // world_size,), float(rank), dtype=dtype) for numel in numels]
    step = _planned(chunks, numels, rank, world_size) if path == "shardkit" else _stock(chunks, world_size)
    for full, numel in zip(step(), numels, strict=True):
        expected = torch.arange(world_size).repeat_interleave(numel // world_size).to(dtype)
        assert torch.equal(full, expected), f"{path} gathered something else"
    return sampled(step)


def _planned(chunks, numels, rank, world_size):
    items = [GatherItem(f"p{i}", ChunkLayout((n,), 0, world_size), chunks[0].dtype) for i, n in enumerate(numels)]
    plan = plan_gather(items, transport_for(dist.group.WORLD, CPU), "group", rank)
    lane = make_lane(CPU, "all-gather")

    def step():
        full = [torch.empty(numel, dtype=chunks[0].dtype) for numel in numels]
        lane.start(plan.transport.gather(plan, chunks, full), "group").wait()
        return full

    return step


def _stock(chunks, world_size):
    return lambda: stock_paths.gather(chunks, world_size)
