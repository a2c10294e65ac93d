"""Ranks' parts of logical tensors, for any sizes and ranks: saved by some, loaded by others, whole in between."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.core.parameters.region import Region
from shardkit.tp_adapter import SubBlocks
from shardkit.tp_adapter.logical import logical_part
from shardkit.tp_adapter.logical_tensor import LogicalTensor
from shardkit.tp_adapter.placing import Axis, region_held


@dataclass(frozen=True)
class Mesh:
    """Ranks of tensor parallelism on the fused dim, and of data parallelism on `data_dim`."""

    tp: int
    dp: int
    data_dim: int

    def regions(self, shape: tuple[int, ...], blocks: SubBlocks) -> list[Region]:
        """The region of the fused tensor that each rank holds."""
        stacked = _StridedShard(blocks.dim, split_factor=len(blocks.names))
        placement: Placement = stacked if blocks.sizes is None else Shard(blocks.dim)
        axes = [Axis(self.dp, None), Axis(self.tp, placement if self.tp > 1 else Replicate())]
        coordinates = itertools.product(range(self.dp), range(self.tp))
        return [region_held("", shape, self.data_dim, axes, coordinate) for coordinate in coordinates]


@st.composite
def moves(draw):
    """A fused tensor's shape, its logical tensors, and two meshes."""
    names = tuple("qkv"[: draw(st.integers(1, 3))])
    sizes = draw(st.none() | st.tuples(*[st.integers(1, 4)] * len(names)))
    count = draw(st.integers(1, 6))  # of groups, or of indices of each logical tensor
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = count * (len(names) if sizes is None else sum(sizes))
    # Where torch.chunk falls on the ends of groups, ranks may get groups of different number, or none.
    whole = [tp for tp in range(1, 7) if sizes is not None and -(-shape[dim] // tp) % sum(sizes) == 0]
    ranks = st.sampled_from([tp for tp in range(1, 7) if count % tp == 0 or tp in whole])
    meshes = [Mesh(draw(ranks), draw(st.integers(1, 5)), draw(st.integers(0, len(shape) - 1))) for _ in range(2)]
    return tuple(shape), SubBlocks(names, dim, sizes), *meshes


def shards(parts: list[LogicalTensor]) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
    """The shards that a checkpoint would write or read: boxes of the whole, each with its memory."""
    return [
        (tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)), memory)
        for part in parts
        for chunk in part.__create_chunk_list__()
        for memory in [part.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))]
    ]


@given(moves())
def test_round_trips_over_any_ranks(move):
    shape, blocks, before, after = move
    fused = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    writers = [(region, region.take(fused).clone()) for region in before.regions(shape, blocks)]
    readers = [(region, torch.zeros(region.shape)) for region in after.regions(shape, blocks)]
    for number, expected in enumerate(blocks.split(fused)):
        parts = [logical_part(local, region, shape, blocks, number) for region, local in writers]
        assert {part.shape for part in parts} == {expected.shape}
        assert coverage_problem(expected.shape, [box for part in parts for box in part.__create_chunk_list__()]) is None
        saved = torch.zeros(expected.shape)
        for box, memory in shards(parts):
            saved[box] = memory
        assert torch.equal(saved, expected)
        for part in parts:
            assert torch.equal(part.packed(), part.boxes.region.take(expected).view(part.packed().shape))
        for box, memory in shards([logical_part(local, region, shape, blocks, number) for region, local in readers]):
            memory.copy_(saved[box])
    for region, local in readers:
        assert torch.equal(local, region.take(fused).view(local.shape))


@given(moves())
def test_plain_whole_tensors_fill_what_each_rank_holds(move):
    shape, blocks, mesh, _ = move
    fused = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    for region in mesh.regions(shape, blocks):
        local = torch.zeros(region.shape)
        for number, whole in enumerate(blocks.split(fused)):
            logical_part(local, region, shape, blocks, number).copy_(whole)
        assert torch.equal(local, region.take(fused).view(local.shape))


def test_whole_is_a_copy_of_what_lies_here_entirely():
    blocks, fused = SubBlocks(("q", "k"), sizes=(2, 1)), torch.arange(6.0)
    q = logical_part(fused, Region.whole((6,)), (6,), blocks, 0)
    assert type(q.whole()) is torch.Tensor and q.whole().tolist() == [0, 1, 3, 4]
    q.whole().zero_()
    assert fused.tolist() == [0, 1, 2, 3, 4, 5]
    part = logical_part(fused[:3], Region((((0, 3),),)), (6,), blocks, 0)
    with pytest.raises(
        ValueError, match=r"shape=\(4,\), held here: \(2,\) at \(0,\)\) is held in parts.*full_state_dict"
    ):
        part.whole()
