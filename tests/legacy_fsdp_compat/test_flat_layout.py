"""The arithmetic of the flat parameter, by its properties and against stock's own flat parameter (test_checkpoints)."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.legacy_fsdp_compat.flat_layout import FlatLayout, aligned_numel, intersection, row_intervals

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)
layouts = st.builds(FlatLayout, shapes, st.integers(1, 6), st.sampled_from([1, 2, 4, 8]))


@given(layouts)
def test_parameters_follow_each_other_aligned(layout: FlatLayout):
    end = 0
    for shape, (start, stop) in zip(layout.shapes, layout.intervals, strict=True):
        assert start % layout.alignment == 0
        assert 0 <= start - end < layout.alignment
        assert stop - start == math.prod(shape)
        end = stop
    if layout.alignment == 1:
        assert layout.numel == end
    else:
        assert layout.numel % layout.world_size == 0
        assert 0 <= layout.numel - end < layout.world_size


@given(layouts)
def test_ranks_hold_everything_once(layout: FlatLayout):
    edges = [layout.shard(rank) for rank in range(layout.world_size)]
    assert edges[0][0] == 0
    assert edges[-1][1] == layout.numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    for index, shape in enumerate(layout.shapes):
        held = [element for start, stop in layout.pieces(index) for element in range(start, stop)]
        assert held == list(range(math.prod(shape)))


@given(layouts)
def test_pieces_lie_in_the_shard_where_the_flat_parameter_has_them(layout: FlatLayout):
    for rank in range(layout.world_size):
        first = layout.shard(rank)[0]
        for index in range(len(layout.shapes)):
            piece, place = layout.piece(index, rank), layout.within_shard(index, rank)
            assert piece[1] - piece[0] == place[1] - place[0] >= 0
            assert piece == (0, 0) or first + place[0] == layout.intervals[index][0] + piece[0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 6))
def test_rows_are_cut_as_torch_chunk_cuts(shape: list[int], world_size: int):
    import torch

    flat = torch.arange(math.prod(shape)).view(shape)
    chunks = [chunk.reshape(-1).tolist() for chunk in flat.chunk(world_size)]
    chunks += [[]] * (world_size - len(chunks))
    assert [list(range(*interval)) for interval in row_intervals(shape, world_size)] == chunks


@given(*[st.tuples(st.integers(0, 9), st.integers(0, 9))] * 2)
def test_intersection(left: tuple[int, int], right: tuple[int, int]):
    assert set(range(*intersection(left, right))) == set(range(*left)) & set(range(*right))


def test_the_example_of_the_docstring():
    layout = FlatLayout(((5, 3), (5,), (3,)), 2, 4)
    assert layout.intervals == ((0, 15), (16, 21), (24, 27))
    assert (layout.numel, layout.shard(0), layout.shard(1)) == (28, (0, 14), (14, 28))


def test_alignment_is_16_bytes():
    assert [aligned_numel(size) for size in (2, 4, 8, 16)] == [8, 4, 2, 1]


@pytest.mark.parametrize(("world_size", "alignment"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(world_size: int, alignment: int):
    with pytest.raises(ValueError, match="at least 1"):
        FlatLayout(((1,),), world_size, alignment)
