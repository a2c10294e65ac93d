"""Reducing one parameter group's gradients: the runtime's plan against the stock collective path, on gloo."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import stock_paths
from benchmarks.bench_gather import CPU, DTYPES, GROUPS
from benchmarks.rank_clock import by_ranks, clock, sampled
from shardkit.core.runtime.choice import transport_for
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.plan import Mean, ReduceItem, plan_reduce
from shardkit.core.runtime.sharding import ChunkLayout


@by_ranks
@pytest.mark.parametrize("path", ["shardkit", "stock"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_reduce(benchmark, group, dtype, world_size, path):
    """The mean in fp32 of gradients in `dtype`."""
    clock.measure(benchmark, world_size, _reduce, GROUPS[group], DTYPES[dtype], path)


def _reduce(rank, world_size, numels, dtype, path):
    grads = [torch.full((numel,), float(rank), dtype=dtype) for numel in numels]
    step = _planned(grads, numels, rank, world_size) if path == "shardkit" else _stock(grads, world_size)
    for chunk, numel in zip(step(), numels, strict=True):
        expected = torch.full((numel // world_size,), (world_size - 1) / 2)
        assert torch.equal(chunk, expected), f"{path} reduced to something else"
    return sampled(step)


def _planned(grads, numels, rank, world_size):
    items = [ReduceItem(f"p{i}", ChunkLayout((numel,), 0, world_size)) for i, numel in enumerate(numels)]
    transport = transport_for(dist.group.WORLD, CPU)
    plan = plan_reduce(items, transport, "group", rank, grads[0].dtype, torch.float32)
    lane = make_lane(CPU, "reduce-scatter")

    def step():
        output = plan.allocate_output()
        program = plan.transport.reduce(plan, grads, output, Mean(after=float(world_size)))
        lane.start(program, "group").wait()
        return plan.output_views(output)

    return step


def _stock(grads, world_size):
    return lambda: stock_paths.reduce(grads, world_size, torch.float32)
