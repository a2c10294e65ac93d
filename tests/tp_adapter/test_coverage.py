"""Boxes that leave holes or overlap are found."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.core.parameters.region import Region
from shardkit.tp_adapter import CheckedLoadPlanner
from shardkit.tp_adapter.boxes import Boxes
from shardkit.tp_adapter.logical_tensor import LogicalTensor


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((4, 4), [((0, 0), (4, 4))], None),
        ((4, 4), [((0, 2), (4, 2)), ((0, 0), (4, 2))], None),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (1, 2)), ((3, 2), (1, 2)), ((4, 0), (0, 4))], None),
        ((), [((), ())], None),
        ((0, 3), [], None),
        ((4, 4), [((0, 0), (2, 4)), ((3, 0), (1, 4))], "leave holes: they hold 12 of its 16 elements"),
        ((4, 4), [((0, 0), (4, 3)), ((1, 2), (2, 2))], "overlap: [0:4, 0:3] and [1:3, 2:4]"),
        ((4, 4), [((0, 0), (4, 4)), ((3, 0), (1, 4))], "overlap"),
        ((4, 4), [((2, 0), (4, 4))], "stick out of it: [2:6, 0:4]"),
    ],
)
def test_coverage(shape, boxes, problem):
    seen = coverage_problem(shape, chunks(*boxes))
    assert (seen or "").startswith(problem or "") and (seen is None) == (problem is None)


def test_says_what_it_would_load_into():
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
