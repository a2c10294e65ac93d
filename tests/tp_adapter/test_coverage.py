"""Boxes that leave holes or overlap are found."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from shardkit.tp_adapter.coverage import coverage_problem


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
