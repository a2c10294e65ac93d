"""Two parallelisms on one dim: the arithmetic against torch.chunk twice, and `full_tensor()` of parameters."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core import fully_shard
from shardkit.core.parameters.region import region_at
from shardkit.tp_adapter.placing import Axis, order_of_cuts, region_held, torch_reads_truly
from shardkit.tp_adapter.torch_compat import FALLS_BACK
from tests.support import on_ranks
from tests.support.models import Composed
from tests.tp_adapter.models import axes

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


MESHES = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (1, 2, 2), (2, 1, 2)]}
SHAPES = [(1,), (3,), (9,), (8, 3), (1, 6), (5, 7), (0, 3), (2, 4, 3)]


def multiplied(model: Any, x: float) -> torch.Tensor:
    return (getattr(model.weight, "to_local", lambda: model.weight)() * x).sum()


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks(timeout=300.0)
def test_every_cut(rank: int, world_size: int) -> None:
    """Shard, compare the rank's part, gather, compare; then the same with forward, backward and the gradient."""
    for mesh_shape, shape in itertools.product(MESHES[world_size], SHAPES):
        data, tensor = axes(mesh_shape)
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        tp_placements = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placement, dim in itertools.product(tp_placements, range(len(shape))):
            weight = nn.Parameter(distribute_tensor(whole, tensor, [placement]))
            holder: Any = Composed(multiplied, weight=weight)
            local = holder.weight.to_local().clone()
            fully_shard(holder, mesh=data, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            what = f"{shape} {placement} cut on {dim} over {mesh_shape}"
            sharded = holder.weight
            chunks = local.chunk(data.size(-1), dim)
            mine = data.get_local_rank(data.ndim - 1)
            expected = chunks[mine] if mine < len(chunks) else local.narrow(dim, 0, 0)
            assert torch.equal(sharded.to_local().reshape(-1), expected.reshape(-1)), what
            assert torch.equal(sharded.detach().full_tensor(), whole), what
            holder(2.0).backward()
            assert torch.equal(holder.weight.grad.full_tensor(), torch.full_like(whole, 2.0)), what
            assert holder.weight.grad.placements == sharded.placements, what
