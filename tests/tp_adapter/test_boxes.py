"""Local tensors that know their boxes, ranks' parts of logical tensors, and the logical tensors of a fused tensor."""

import copy
import io
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.core.parameters.region import Region
from shardkit.tp_adapter import CheckedLoadPlanner, SubBlocks
from shardkit.tp_adapter.boxes import BoxedTensor, Boxes
from shardkit.tp_adapter.logical import logical_part
from shardkit.tp_adapter.logical_tensor import LogicalTensor
from shardkit.tp_adapter.placing import Axis, region_held

WHOLE = torch.arange(24.0).view(8, 3)
REGION = Region((((0, 2), (4, 6)), ((0, 3),)))
BOXES = Boxes(WHOLE.shape, REGION)


def boxed() -> BoxedTensor:
    return BoxedTensor.of(REGION.take(WHOLE), BOXES)


def test_answers_where_its_boxes_lie():
    local = boxed()
    items = local.__create_write_items__("w", local)
    assert [(item.index.offset, item.tensor_data.chunk.sizes) for item in items] == [((0, 0), (2, 3)), ((4, 0), (2, 3))]
    assert {item.tensor_data.size for item in items} == {WHOLE.shape}
    assert [chunk.offsets for chunk in local.__create_chunk_list__()] == [(0, 0), (4, 0)]
    second = local.__get_tensor_shard__(MetadataIndex("w", torch.Size((4, 0))))
    assert type(second) is torch.Tensor
    assert torch.equal(second, WHOLE[4:6])
    second.zero_()
    assert not local[2:].any(), "a checkpoint that is loaded is written into the tensor itself"


def test_what_keeps_elements_in_place_keeps_boxes():
    local = boxed()
    kept = [local.detach(), torch.zeros_like(local), local.clone(), local.to(torch.bfloat16), local.view(4, 3)]
    assert [type(one) for one in kept] == [BoxedTensor] * len(kept)
    assert all(one.boxes is BOXES for one in kept)
    others = [local + 1, local.t(), local[1:], local.view(-1), local.sum(), local.plain()]
    assert [type(one) for one in others] == [torch.Tensor] * len(others)


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "staged": lambda state: StateDictStager().stage(state),
    "saved": saved_and_loaded,
    "cpu": lambda state: _copy_state_dict(state, _create_cpu_state_dict(state)),
}


# Rows 0-1 and 4-5 with others around and between them, as logical tensors lie in a weight that is packed in groups.
AMID_OTHERS = Boxes(WHOLE.shape, REGION, Region((((1, 3), (4, 6)), ((0, 3),))))


# `_create_cpu_state_dict` makes copies of plain local tensors with torch.empty, which no subclass hears of.
@pytest.mark.parametrize(
    ("kind", "boxes", "how"),
    [(BoxedTensor, BOXES, how) for how in COPIES if how != "cpu"]
    + [(LogicalTensor, boxes, how) for how in COPIES for boxes in (BOXES, AMID_OTHERS)],
    ids=lambda value: None if isinstance(value, Boxes) else getattr(value, "__name__", value),
)
def test_copies_know_their_boxes(kind: type[BoxedTensor | LogicalTensor], boxes: Boxes, how: str):
    other = torch.zeros(1, 3)
    rows = [other, *WHOLE[:2].split(1), *([other] if boxes is AMID_OTHERS else []), *WHOLE[4:6].split(1)]
    source = torch.cat(rows)[0 if boxes is AMID_OTHERS else 1 :]  # a view, as logical tensors are
    original = kind.of(source, boxes)
    copied = COPIES[how]({"w": original})["w"]
    source.fill_(-1)
    assert type(copied) is kind
    chunks = copied.__create_chunk_list__()
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 0), (4, 0)]
    for chunk in chunks:
        part = copied.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
        assert torch.equal(part, WHOLE[chunk.offsets[0] : chunk.offsets[0] + 2])


def test_a_logical_tensor_amid_others_is_filled_alone():
    local = torch.zeros(7, 3)
    logical = LogicalTensor.of(local, AMID_OTHERS)
    logical.copy_(LogicalTensor.of(REGION.take(WHOLE), BOXES))
    assert torch.equal(
        local, torch.cat([torch.zeros(1, 3), WHOLE[:2], torch.zeros(1, 3), WHOLE[4:6], torch.zeros(1, 3)])
    )
    assert torch.equal(logical.packed(), REGION.take(WHOLE))
    logical.detach().fill_(1.0)
    assert local.sum(1).tolist() == [0, 3, 3, 0, 3, 3, 0]
    logical.zero_()
    assert not local.any()


@pytest.mark.parametrize("boxes", [BOXES, AMID_OTHERS], ids=["alone", "amid others"])
def test_a_logical_tensor_is_filled_from_plain_tensors(boxes: Boxes):
    local = torch.zeros(7 if boxes.places else 4, 3)
    logical = LogicalTensor.of(local, boxes)
    held = REGION.take(WHOLE)
    for source, expected in (
        (WHOLE, held),
        (-held, -held),
        (torch.nn.Parameter(WHOLE.double()), held),
        (torch.tensor(7), 7),
    ):
        local.zero_()
        with torch.no_grad():
            assert logical.copy_(source) is logical
        assert logical.packed().equal(torch.empty(4, 3).copy_(torch.as_tensor(expected)))
        assert local.count_nonzero() == logical.packed().count_nonzero(), "others were written to"


ELSEWHERE = Boxes(WHOLE.shape, Region((((0, 4),), ((0, 3),))))
ALL = Boxes(WHOLE.shape, Region.whole(WHOLE.shape))
SHORTER = Boxes(torch.Size((7, 3)), REGION)


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (torch.ones(7, 3), r"a Tensor of shape \(7, 3\)"),
        (torch.ones(16, 3), r"a Tensor of shape \(16, 3\)"),
        (torch.ones(3), r"a Tensor of shape \(3,\)"),
        (torch.ones(4, 1), r"a Tensor of shape \(4, 1\)"),
        (LogicalTensor.of(torch.ones(4, 3), ELSEWHERE), r"LogicalTensor.*held here: \(4, 3\) at \(0, 0\)\)"),
        (LogicalTensor.of(torch.ones(8, 3), ALL), r"LogicalTensor.*held here: \(8, 3\) at \(0, 0\)\)"),
        (LogicalTensor.of(torch.ones(4, 3), SHORTER), r"LogicalTensor\(shape=\(7, 3\)"),
    ],
    ids=["rows", "more rows", "broadcast", "broadcast columns", "elsewhere", "all", "of another shape"],
)
def test_what_a_logical_tensor_is_not_filled_from(source: torch.Tensor, seen: str):
    local = torch.zeros(7, 3)
    mine = r"LogicalTensor\(shape=\(8, 3\), held here: \(2, 3\) at \(0, 0\), \(2, 3\) at \(4, 0\)\) "
    with pytest.raises(ValueError, match=mine + rf"got {seen}.*, expected .*\(8, 3\) .*\(4, 3\)"):
        LogicalTensor.of(local, AMID_OTHERS).copy_(source)
    assert not local.any()


def test_a_logical_tensor_has_its_whole_size_and_no_arithmetic():
    logical = LogicalTensor.of(REGION.take(WHOLE), BOXES)
    assert logical.shape == logical.size() == WHOLE.shape
    assert repr(logical) == "LogicalTensor(shape=(8, 3), held here: (2, 3) at (0, 0), (2, 3) at (4, 0))"
    with pytest.raises(NotImplementedError, match=r"aten\.add.*shape=\(8, 3\).*compute with the fused parameter"):
        logical + 1
    with pytest.raises(NotImplementedError, match="compute with the fused parameter"):
        WHOLE.clone().copy_(logical)


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]


def test_boxes_that_leave_holes_are_said_with_what_they_were_for():
    boxes = Boxes(torch.Size((8, 3)), Region((((0, 2), (4, 6)), ((0, 3),))))
    targets = {
        "a logical tensor, LogicalTensor(shape=(8, 3), held here: (2, 3)": LogicalTensor.of(torch.ones(4, 3), boxes),
        "a plain tensor": torch.ones(8, 3),
    }
    saved = TensorStorageMetadata(TensorProperties(), torch.Size((8, 3)), chunks(((0, 0), (4, 3))))
    for said, target in targets.items():
        planner = CheckedLoadPlanner()
        planner.set_up_planner({"w": target}, Metadata({"w": saved}), False)
        with pytest.raises(ValueError, match=r"w: the checkpoint's boxes of shape \(8, 3\) leave holes") as refused:
            planner.create_local_plan()
        assert f"to load into {said}" in str(refused.value)


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


QKV = ("q", "k", "v")


def rows_of(number: int, blocks: SubBlocks, length: int) -> list[int]:
    """The indices of a logical tensor, each looked at by itself."""
    if blocks.sizes is None:
        return [index for index in range(length) if index * len(blocks.names) // length == number]
    owner = [number for number, size in enumerate(blocks.sizes) for _ in range(size)]
    return [index for index in range(length) if owner[index % len(owner)] == number]


@given(moves())
def test_taken_apart_and_put_together(move):
    shape, blocks, *_ = move
    fused = torch.arange(math.prod(shape)).view(shape)
    parts, length = blocks.split(fused), shape[blocks.dim]
    assert len(parts) == len(blocks.names)
    for number, part in enumerate(parts):
        rows = rows_of(number, blocks, length)
        assert torch.equal(part, fused.index_select(blocks.dim, torch.tensor(rows)))
        assert [row for start, stop in blocks.runs(number, length) for row in range(start, stop)] == rows
        in_one_piece = rows == list(range(rows[0], rows[-1] + 1))
        assert not in_one_piece or part.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr(), "a view"
    assert torch.equal(blocks.fuse(parts), fused)


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
