"""Gathering and reducing one group with and without compression, pairwise over gloo's loopback device.

Loopback is fast: the results show the cost of rounding, not the time that fewer bytes save on a network.
"""

import pytest
import torch
import torch.distributed as dist

from benchmarks.bench_gather import CPU, DTYPES
from benchmarks.rank_clock import by_ranks, clock, sampled
from shardkit.core import CompressionPolicy
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.pairwise import PairwiseTransport
from shardkit.core.runtime.plan import GatherItem, Mean, ReduceItem, plan_gather, plan_reduce
from shardkit.core.runtime.sharding import ChunkLayout

# A transformer block of width 512: 12 MiB in fp32.
SHAPES = ((1536, 512), (512, 512), (2048, 512), (512, 2048), (512,), (512,))
KINDS = {
    "full": CompressionPolicy(),
    "bf16": CompressionPolicy(gather="bf16", reduce="bf16"),
    "int8": CompressionPolicy(gather="int8", reduce="int8"),
    "int8-feedback": CompressionPolicy(gather="int8", reduce="int8", error_feedback=True),
}


@by_ranks
@pytest.mark.parametrize("kind", ["full", "bf16", "int8"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(benchmark, dtype, world_size, kind):
    """fp32 shards to parameters in `dtype`."""
    clock.measure(benchmark, world_size, _gather, DTYPES[dtype], kind)


@by_ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(benchmark, dtype, world_size, kind):
    """The mean in fp32 of gradients in `dtype`."""
    clock.measure(benchmark, world_size, _reduce, DTYPES[dtype], kind)


def _layouts(world_size):
    return [ChunkLayout(shape, 0, world_size) for shape in SHAPES]


def _gather(rank, world_size, dtype, kind):
    over = PairwiseTransport(dist.group.WORLD, CPU).compressing(KINDS[kind])
    items = [GatherItem(f"p{i}", layout, dtype) for i, layout in enumerate(_layouts(world_size))]
    plan = plan_gather(items, over, "group", rank)
    chunks = [torch.full(item.layout.local_shape(rank), float(rank)) for item in items]
    flats = [torch.empty(item.layout.padded_numel, dtype=dtype) for item in items]
    lane = make_lane(CPU, "all-gather")
    seconds = sampled(lambda: lane.start(plan.transport.gather(plan, chunks, flats), "group").wait())
    for flat, item in zip(flats, items, strict=True):
        expected = torch.arange(world_size).repeat_interleave(item.layout.numel // world_size).to(dtype)
        assert torch.equal(flat, expected), f"{kind} gathered something else"
    return seconds


def _reduce(rank, world_size, dtype, kind):
    over = PairwiseTransport(dist.group.WORLD, CPU).compressing(KINDS[kind])
    items = [ReduceItem(f"p{i}", layout) for i, layout in enumerate(_layouts(world_size))]
    plan = plan_reduce(items, over, "group", rank, dtype, torch.float32)
    grads = [torch.full(shape, float(rank), dtype=dtype) for shape in SHAPES]
    lane = make_lane(CPU, "reduce-scatter")
    output = plan.allocate_output()

    def step():
        program = plan.transport.reduce(plan, list(grads), output, Mean(after=float(world_size)))
        lane.start(program, "group").wait()

    seconds = sampled(step)
    for chunk in plan.output_views(output):
        assert torch.allclose(chunk, torch.full_like(chunk, (world_size - 1) / 2)), f"{kind} reduced to something else"
    return seconds
