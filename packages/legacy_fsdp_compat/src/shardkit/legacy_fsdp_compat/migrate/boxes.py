"""Tensors put together from boxes: tensor parallelism cuts other dims than the first, and the first one, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.stored import Part, Read

__all__ = ["Box", "parts_of"]


@dataclass(frozen=True)
class Box:
    """A box of a tensor, in one file.

    Attributes:
        offsets, sizes: where it lies in the tensor.
        read: elements [low, high) of the *box*, in row-major order: a 1-D copy.
        file: where they are.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Read
    file: str

    @property
    def row(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.sizes[1:])


def parts_of(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Part, ...]:
    """The parts, in order, that the boxes make up together; boxes without elements do not count.

    Raises:
        CheckpointError: for a box that is not in the tensor, and for rows that the boxes cover in part or twice. Rows
            that no box has are for `StoredTensor` to notice.
    """
    held = [box for box in boxes if math.prod(box.sizes)]
    for box in held:
        ends = [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
        if len(box.sizes) != len(shape) or min(box.offsets, default=0) < 0 or any(map(int.__gt__, ends, shape)):
            raise CheckpointError(
                f"'{name}' of shape {shape} has a part of shape {box.sizes} at {box.offsets} in {box.file}, which lies "
                "outside of it"
            )
    if all(box.sizes[1:] == shape[1:] for box in held):
        return tuple(sorted((_rows(box) for box in held), key=lambda part: part.start))
    edges = sorted({edge for box in held for edge in (box.offsets[0], box.offsets[0] + box.sizes[0])})
    strips = []
    for first, last in itertools.pairwise(edges):
        across = [box for box in held if box.offsets[0] <= first and last <= box.offsets[0] + box.sizes[0]]
        if across:
            strips.append(_strip(name, shape, first, last, across))
    return tuple(strips)


def _rows(box: Box) -> Part:
    """A box of whole rows, as it is."""
    start = box.offsets[0] * box.row if box.offsets else 0
    return Part(start, start + math.prod(box.sizes), lambda low, high: box.read(low - start, high - start), box.file)


def _strip(name: str, shape: tuple[int, ...], first: int, last: int, boxes: list[Box]) -> Part:
    """Rows [first, last), which boxes cover beside each other."""
    row = math.prod(shape[1:])
    twice = next((pair for pair in itertools.combinations(boxes, 2) if _overlap(*pair)), None)
    covered = sum(box.row for box in boxes)
    if twice or covered != row:
        seen = f"twice, in {twice[0].file} and {twice[1].file}" if twice else f"{covered} of {row} elements of each"
        raise CheckpointError(
            f"'{name}' of shape {shape}: of rows {first} to {last} the checkpoint has {seen}; its parts there are "
            f"{[(box.offsets, box.sizes) for box in boxes]}. Is a rank's file missing, or are there files of several "
            "checkpoints?"
        )
    file, *others = dict.fromkeys(box.file for box in boxes)
    return Part(first * row, last * row, _reader(shape, boxes), file, tuple(others))


def _overlap(left: Box, right: Box) -> bool:
    """Whether two boxes of the same rows share elements."""
    pairs = zip(left.offsets[1:], left.sizes[1:], right.offsets[1:], right.sizes[1:], strict=True)
    return all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in pairs)


def _reader(shape: tuple[int, ...], boxes: list[Box]) -> Read:
    row = math.prod(shape[1:])

    def read(low: int, high: int) -> torch.Tensor:
        first, last = low // row, -(-high // row)
        rows: torch.Tensor | None = None
        for box in boxes:
            found = box.read((first - box.offsets[0]) * box.row, (last - box.offsets[0]) * box.row)
            if rows is None:
                rows = torch.empty((last - first, *shape[1:]), dtype=found.dtype)
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True))
            rows[:, *place] = found.view(last - first, *box.sizes[1:])
        assert rows is not None
        return rows.view(-1)[low - first * row : high - first * row]

    return read
