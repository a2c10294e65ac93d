"""Boxes that leave holes or overlap are found."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.parameters.region import Region
from shardkit.tp_adapter import CheckedLoadPlanner
from shardkit.tp_adapter.boxes import Boxes
from shardkit.tp_adapter.logical_tensor import LogicalTensor


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]


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
