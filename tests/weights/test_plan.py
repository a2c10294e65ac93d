"""The plan of who sends what: each wanted element once, from a rank that has it, evenly shared."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.weights.boxes import Held, Piece, Wanted, cut, intersection, numel
from shardkit.weights.plan import Provided, buckets, plan
from tests.weights.layouts import (
    HYBRID,
    LLAMAS,
    REPLICATED,
    SHARDED,
    TWO_D,
    boxes,
    held,
    layouts,
    slices,
    tensor_parallel,
)


@given(layouts(), st.data())
def test_each_wanted_element_is_sent_once_by_a_rank_that_holds_it(layout, data):
    shape, placements, mesh = layout
    mine = boxes(shape, placements, mesh)
    provided = Provided({rank: [Held("w", torch.float32, shape, one)] for rank, one in enumerate(mine)})
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    want = Wanted("w", torch.float32, tuple((a, b) for a, b in bounds))
    planned = plan(provided, [want], bucket=data.draw(st.integers(1, 64)), turn=data.draw(st.integers(0, 3)))
    count = np.zeros(shape, dtype=int)
    for rank, pieces in planned.items():
        for piece in pieces:
            count[slices(piece.box)] += 1
            assert any(intersection(piece.box, one) == piece.box for one in mine[rank])
    expected = np.zeros(shape, dtype=int)
    expected[slices(want.box)] = 1
    assert (count == expected).all()


@pytest.mark.parametrize(
    ("model", "senders", "receivers", "placements"),
    [
        ("8B", 8, 16, SHARDED),
        ("8B", 8, 16, REPLICATED),
        ("8B", 64, 4, TWO_D),
        ("70B", 8, 2, HYBRID),
        ("70B", 32, 8, TWO_D),
        ("70B", 32, 8, REPLICATED),
        ("70B", 64, 16, SHARDED),
    ],
)
def test_senders_of_llama_share_the_work_evenly(model, senders, receivers, placements):
    mesh = [senders] if len(placements) == 1 else [2, senders // 2]
    shapes = LLAMAS[model]
    provided = Provided(held(shapes, placements, mesh))
    loads = Counter()
    for number, wants in enumerate(tensor_parallel(shapes, receivers)):
        total = 0
        for rank, pieces in plan(provided, wants, turn=number).items():
            nbytes = sum(piece.nbytes for piece in pieces)
            loads[rank] += nbytes
            total += nbytes
        assert total == sum(2 * numel(want.box) for want in wants)
    assert max(loads.values()) <= 1.1 * loads.total() / senders


def test_pieces_fill_buckets_in_order():
    pieces = [Piece("w", torch.float32, ((0, rows),), 0) for rows in (4, 5, 1, 20, 2)]
    found = buckets(pieces, 40)
    assert [(offset, nbytes, len(run)) for offset, nbytes, run in found] == [(0, 40, 3), (40, 80, 1), (120, 8, 1)]
    assert buckets([], 40) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3), st.integers(1, 40))
def test_a_box_is_cut_into_parts_that_fit(bounds, most):
    box = tuple((start, start + length) for start, length in bounds)
    parts = list(cut(box, most))
    assert all(numel(part) <= most for part in parts)
    cells = [cell for part in parts for cell in itertools.product(*(range(*run) for run in part))]
    assert sorted(cells) == list(itertools.product(*(range(*run) for run in box)))


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (Wanted("v", torch.float32, ((0, 4),), (4,)), "v: no sender has this tensor"),
        (
            Wanted("w", torch.float32, ((0, 4),), (4,)),
            r"w: wanted from a tensor of shape \(4,\), its shape is \(4, 6\)",
        ),
        (Wanted("w", torch.float32, ((0, 5), (0, 6))), r"wanted \[0:5, 0:6\], which does not lie within"),
        (Wanted("w", torch.float32, ((0, 4), (0, 6))), r"w: senders hold 12 of the 24 elements in \[0:4, 0:6\]"),
    ],
)
def test_wants_that_nobody_provides_are_named(want, words):
    provided = Provided({0: [Held("w", torch.float32, (4, 6), (((0, 2), (0, 6)),))]})
    with pytest.raises(ValueError, match=words):
        plan(provided, [want])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Held("w", torch.float16, (4,), ()), "w: sender 1 holds torch.float16 of shape"),
        (Held("w", torch.float32, (4,), (((1, 4),),)), r"w: some senders hold parts that overlap, such as \[0:2\]"),
    ],
)
def test_senders_that_disagree_are_named(other, words):
    with pytest.raises(ValueError, match=words):
        Provided({0: [Held("w", torch.float32, (4,), (((0, 2),),))], 1: [other]})
