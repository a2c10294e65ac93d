"""The logical tensors of a fused tensor: taken apart, put together, and refused where that is not possible."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.tp_adapter import SubBlocks

QKV = ("q", "k", "v")


def rows_of(number: int, blocks: SubBlocks, length: int) -> list[int]:
    """The indices of a logical tensor, each looked at by itself."""
    if blocks.sizes is None:
        return [index for index in range(length) if index * len(blocks.names) // length == number]
    owner = [number for number, size in enumerate(blocks.sizes) for _ in range(size)]
    return [index for index in range(length) if owner[index % len(owner)] == number]


@st.composite
def fused_tensors(draw):
    names = tuple("abcd"[: draw(st.integers(1, 4))])
    sizes = draw(st.none() | st.tuples(*[st.integers(1, 4)] * len(names)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = draw(st.integers(1, 4)) * (len(names) if sizes is None else sum(sizes))
    return SubBlocks(names, dim, sizes), torch.arange(float(torch.Size(shape).numel())).view(shape)


@given(fused_tensors())
def test_taken_apart_and_put_together(case):
    blocks, fused = case
    parts, length = blocks.split(fused), fused.shape[blocks.dim]
    assert len(parts) == len(blocks.names)
    for number, part in enumerate(parts):
        rows = rows_of(number, blocks, length)
        assert torch.equal(part, fused.index_select(blocks.dim, torch.tensor(rows)))
        assert [row for start, stop in blocks.runs(number, length) for row in range(start, stop)] == rows
    assert torch.equal(blocks.fuse(parts), fused)


def test_from_stacked_to_packed_and_back():
    """Two groups of two queries, a key and a value: rows q q q q k k v v become q q k v q q k v."""
    packed = SubBlocks(QKV, sizes=(2, 1, 1))
    stacked = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])
    weight = packed.fuse(stacked.split((4, 2, 2)))
    assert weight.tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert torch.cat(packed.split(weight)).equal(stacked)
    whole = SubBlocks(QKV, sizes=(4, 2, 2))  # the stack itself: one group
    assert [part.tolist() for part in whole.split(stacked)] == [[10, 11, 12, 13], [20, 21], [30, 31]]
    assert whole.split(stacked)[1].data_ptr() == stacked[4:].data_ptr(), "a view"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"names": ()}, "expected distinct names of logical tensors, at least one"),
        ({"names": ("q", "q")}, r"names=\('q', 'q'\).*expected distinct names"),
        ({"names": QKV, "sizes": (2, 1)}, r"sizes=\(2, 1\).*expected one positive size for each"),
        ({"names": QKV, "sizes": (2, 0, 1)}, "expected one positive size for each"),
        ({"names": QKV, "sizes": (4 / 2, 1, 1)}, r"sizes=\(2\.0, 1, 1\).*one positive size.*of type int"),
        ({"names": QKV, "dim": -1}, "dim=-1.*expected a dim counted from 0"),
    ],
)
def test_declarations_that_make_no_sense(arguments, said):
    with pytest.raises(ValueError, match=said):
        SubBlocks(**arguments)


def test_sizes_may_be_a_list():
    packed = SubBlocks(list(QKV), sizes=[2, 1, 1])
    assert packed.sizes == (2, 1, 1)
    assert {packed} == {SubBlocks(QKV, sizes=(2, 1, 1))}


def test_tensors_that_do_not_fit():
    packed, stacked = SubBlocks(QKV, sizes=(2, 1, 1)), SubBlocks(QKV)
    with pytest.raises(
        ValueError, match=r"of shape \(6, 3\) is not groups of 4 on dim 0, made of .*\(2, 1, 1\) in each"
    ):
        packed.split(torch.ones(6, 3))
    with pytest.raises(
        ValueError, match=r"of shape \(8,\) is not 3 logical tensors.*of one size.*sizes=.*group by gro"
    ):
        stacked.split(torch.ones(8))
    with pytest.raises(ValueError, match=re.escape("shapes [(4,), (2,)], expected one for each name, with dim 0")):
        packed.fuse([torch.ones(4), torch.ones(2)])
    for wrong in ((4, 2, 1), (4, 4, 2), (5, 2, 2), (4, 2)):
        with pytest.raises(ValueError, match=r"got tensors of shapes .*expected"):
            packed.fuse([torch.ones(rows) for rows in wrong])
    with pytest.raises(ValueError, match=re.escape("after the first, expected [(4, 3), (4, 3), (4, 3)]")):
        stacked.fuse([torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 2)])
