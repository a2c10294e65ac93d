"""`ChunkLayout` against `torch.chunk`, and against itself: chunks partition the dim."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.runtime.sharding import ChunkLayout


@st.composite
def layouts(draw: st.DrawFn) -> ChunkLayout:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    return ChunkLayout(shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 12)))


@given(layouts())
def test_chunks_are_torch_chunks(layout: ChunkLayout) -> None:
    whole = torch.arange(layout.numel).view(layout.shape)
    expected = torch.chunk(whole, layout.world_size, dim=layout.dim)
    for rank in range(layout.world_size):
        ours = whole.narrow(layout.dim, layout.offset(rank), layout.length(rank))
        assert ours.shape == layout.local_shape(rank)
        assert ours.numel() == layout.local_numel(rank)
        if rank < len(expected):
            assert torch.equal(ours, expected[rank])
        else:
            assert ours.numel() == 0


@st.composite
def uneven_layouts(draw: st.DrawFn) -> ChunkLayout:
    even = draw(layouts())
    if draw(st.booleans()):
        return replace(even, owner=draw(st.integers(0, even.world_size - 1)))
    return replace(even, unit=draw(st.integers(1, 12)))


@given(layouts() | uneven_layouts())
def test_chunks_partition_the_tensor(layout: ChunkLayout) -> None:
    end = 0
    for rank in range(layout.world_size):
        assert layout.offset(rank) == end
        end += layout.length(rank)
    assert end == layout.shape[layout.dim]
    assert sum(layout.local_numel(rank) for rank in range(layout.world_size)) == layout.numel


@given(uneven_layouts())
def test_cuts_lie_at_multiples_and_owned_tensors_are_whole(layout: ChunkLayout) -> None:
    for rank in range(layout.world_size):
        if layout.owner is not None:
            assert layout.local_shape(rank) == layout.shape if rank == layout.owner else not layout.length(rank)
        elif layout.length(rank):
            assert layout.offset(rank) % layout.unit == 0
    assert layout.lengths() == tuple(layout.length(rank) for rank in range(layout.world_size))
    runs = [(rank, run.length) for run in layout.runs for rank in range(run.first, run.first + run.ranks)]
    assert runs == list(enumerate(layout.lengths()))
    assert layout.numel <= layout.flat_numel < layout.numel + layout.world_size * max(1, layout.numel)
    assert layout.flat_numel % layout.world_size == 0
