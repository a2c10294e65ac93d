"""The arithmetic of two parallelisms on one dim, against torch.chunk applied twice, and against stock."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.parameters.region import region_at
from shardkit.tp_adapter.placing import Axis, order_of_cuts, region_held, torch_reads_truly
from shardkit.tp_adapter.torch_compat import FALLS_BACK

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def chunked_twice(whole: torch.Tensor, dim: int, axes: list[Axis], coordinate: tuple[int, ...]) -> torch.Tensor:
    """The part that a rank holds, by torch.chunk: model axes first, the data-parallel one last."""
    cut = sorted(range(len(axes)), key=lambda index: axes[index].placement is None)
    for index in cut:
        placement = axes[index].placement or Shard(dim)
        if not isinstance(placement, Replicate):
            chunks = torch.chunk(whole, axes[index].size, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = (*chunks, *[empty] * axes[index].size)[coordinate[index]]
    return whole


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    model = [
        Axis(draw(SIZES), Shard(draw(dims)) if draw(st.integers(0, 3)) else Replicate())
        for _ in range(draw(st.integers(1, 2)))
    ]
    data = [Axis(draw(SIZES), None)]
    if draw(st.booleans()):
        data.insert(0, Axis(2, Replicate()))
    axes = [*data, *model] if draw(st.integers(0, 4)) else [*model, *data]
    return shape, draw(dims), axes


@given(layouts())
def test_placements_say_what_ranks_hold(layout):
    shape, dim, axes = layout
    order, placements = order_of_cuts(shape, dim, axes)
    assert sorted(order) == list(range(len(axes)))
    sizes = [axes[index].size for index in order]
    whole = torch.arange(math.prod(shape)).view(shape)
    for coordinate in itertools.product(*(range(min(axis.size, 3)) for axis in axes)):
        expected = chunked_twice(whole, dim, axes, coordinate)
        held = region_held("", shape, dim, axes, coordinate)
        described = region_at("", shape, placements, sizes, [coordinate[index] for index in order])
        assert described.shape == held.shape
        assert math.prod(held.shape) == expected.numel()
        if expected.numel():
            assert torch.equal(held.take(whole), expected)
            assert torch.equal(described.take(whole), expected)


@pytest.mark.parametrize(
    ("length", "sizes", "placements", "truly"),
    [
        (16, (2, 4), (_StridedShard(0, split_factor=2), Shard(0)), False),
        (16, (2, 2), (_StridedShard(0, split_factor=2), Shard(0)), True),
        (12, (2, 2), (_StridedShard(0, split_factor=3), Shard(0)), False),
        (18, (2, 3), (_StridedShard(0, split_factor=3), Shard(0)), True),
        (15, (2, 3), (_StridedShard(0, split_factor=3), Shard(0)), False),
        (12, (2, 1), (_StridedShard(0, split_factor=3), Shard(0)), FALLS_BACK),
        (9, (2, 4), (Shard(0), Shard(0)), True),
        (16, (4, 2), (Shard(0), _StridedShard(0, split_factor=2)), False),
    ],
)
def test_what_torch_reads_truly(length, sizes, placements, truly):
    assert torch_reads_truly((length,), sizes, placements) == truly
