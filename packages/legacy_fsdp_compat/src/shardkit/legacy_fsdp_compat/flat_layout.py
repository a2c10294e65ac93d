"""Pure arithmetic of FSDP1's flat parameter: where each parameter lies in it, and which part a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "ALIGNMENT_BYTES",
    "FLAT_NAME",
    "PADDING_VALUE",
    "FlatLayout",
    "Interval",
    "aligned_numel",
    "intersection",
    "row_intervals",
]

Interval = tuple[int, int]
"""Elements [start, stop) of a tensor in row-major order; empty when start >= stop."""

FLAT_NAME = "_flat_param"
"""The last part of a flat parameter's name."""

ALIGNMENT_BYTES = 16
"""With `use_orig_params=True` every parameter starts at a multiple of so many bytes."""

PADDING_VALUE = 42
"""FSDP1 fills padding between parameters with this value."""


def aligned_numel(itemsize: int) -> int:
    """Elements of `itemsize` bytes in one alignment unit: 4 for float32, 8 for bfloat16."""
    return max(1, ALIGNMENT_BYTES // itemsize)


def intersection(left: Interval, right: Interval) -> Interval:
    """The elements in both intervals; an empty one is (x, x)."""
    start = max(left[0], right[0])
    return start, max(start, min(left[1], right[1]))


def row_intervals(shape: Sequence[int], world_size: int) -> tuple[Interval, ...]:
    """The elements of each rank when `torch.chunk` cuts a tensor on dim 0 (shape () counts as one row)."""
    rows, numel = (shape[0] if shape else 1), math.prod(shape)
    row = numel // rows if rows else 0
    chunk = -(-rows // world_size)
    return tuple((min(rank * chunk, rows) * row, min((rank + 1) * chunk, rows) * row) for rank in range(world_size))


@dataclass(frozen=True)
class FlatLayout:
    """How one unit's parameters lie in its flat parameter.

    The parameters follow each other in order of registration. With `alignment` A > 1 (use_orig_params=True) each starts
    at a multiple of A, and the whole is padded to a multiple of the world size; with A = 1 nothing is padded. Every
    rank holds `shard_numel` elements; the last ranks may hold fewer or none. Shapes (5, 3), (5,), (3,), world size 2,
    alignment 4, '.' is padding::

        element  0              15 16    21       24   27
                 |  w: 15 elements .| b: 5 |. . .| g: 3 .|
                 rank 0 -------------^      rank 1        -> 14 + 14

    Attributes:
        shapes: shapes of the parameters, in order.
        world_size: number of ranks that share the flat parameter.
        alignment: alignment A, in elements.
    """

    shapes: tuple[tuple[int, ...], ...]
    world_size: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.alignment < 1:
            raise ValueError(f"world_size={self.world_size} and alignment={self.alignment} must both be at least 1")

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """The interval of each parameter."""
        placed, end = [], 0
        for shape in self.shapes:
            start = -(-end // self.alignment) * self.alignment
            end = start + math.prod(shape)
            placed.append((start, end))
        return tuple(placed)

    @cached_property
    def numel(self) -> int:
        """Elements of the flat parameter with its inner padding, as in its metadata."""
        end = self.intervals[-1][1] if self.intervals else 0
        return end if self.alignment == 1 else -(-end // self.world_size) * self.world_size

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a full rank's part."""
        return -(-self.numel // self.world_size)

    def shard(self, rank: int) -> Interval:
        """The elements that `rank` holds."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def piece(self, index: int, rank: int) -> Interval:
        """The elements of parameter `index`, counted from its own start, that `rank` holds."""
        start, stop = self.intervals[index]
        low, high = intersection((start, stop), self.shard(rank))
        return (low - start, high - start) if low < high else (0, 0)

    def pieces(self, index: int) -> tuple[Interval, ...]:
        """`piece` of every rank, in rank order."""
        return tuple(self.piece(index, rank) for rank in range(self.world_size))

    def within_shard(self, index: int, rank: int) -> Interval:
        """Where the piece of parameter `index` lies in `rank`'s part."""
        low, high = intersection(self.intervals[index], self.shard(rank))
        first = self.shard(rank)[0]
        return (low - first, high - first) if low < high else (0, 0)
