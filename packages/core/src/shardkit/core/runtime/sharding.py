"""Pure shard arithmetic: how one dim of a shape is cut over the ranks of a shard group. Knows no process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class Run(NamedTuple):
    """`ranks` consecutive ranks from `first` on, each of which holds `length` indices of the dim."""

    first: int
    ranks: int
    length: int


@dataclass(frozen=True)
class ChunkLayout:
    """How `torch.chunk` cuts dim `dim` of `shape` over `world_size` ranks.

    Every rank except the last ones holds `chunk = ceil(shape[dim] / world_size)` indices of the dim; one rank may hold
    fewer and the ranks after it none. `shape = (10, 3)`, `dim = 0`, `world_size = 4`::

        rank     0        1        2        3
        rows   0 1 2 |  3 4 5 |  6 7 8 |  9 . .      '.' is padding: 12 padded rows, 10 real ones
        offset   0        3        6        9

    On dim 0 all padding comes after the real elements, so the unpadded tensor is a prefix of the padded one.

    With `unit` the dim is cut only at multiples of `unit` indices, and `chunk` is the smallest sufficient multiple.
    With `owner` one rank holds all of it. In both cases the ranks' slots have no padding between them::

        unit = 4      rows   0 1 2 3 | 4 5 6 7 | 8 9 |
        owner = 2     rows           |         | 0 1 2 3 4 5 6 7 8 9 |

    All values are computed in closed form: a layout takes the same memory for 8 ranks and for 8,000.

    Attributes:
        numel: elements of the whole tensor.
        chunk: indices of the dim that a full rank holds.
        padded_local_shape, padded_local_numel: a full rank's chunk; every rank's chunk when padded.
        padded_numel: elements of all ranks' padded chunks together.
        flat_numel: elements of the flat tensor under an unsharded one.
        has_equal_slots: whether that is one padded slot for each rank, so that a collective can gather into it.
    """

    shape: tuple[int, ...]
    dim: int
    world_size: int
    unit: int = 1
    owner: int | None = None
    numel: int = field(init=False, compare=False)
    chunk: int = field(init=False, compare=False)
    padded_local_shape: tuple[int, ...] = field(init=False, compare=False)
    padded_local_numel: int = field(init=False, compare=False)
    padded_numel: int = field(init=False, compare=False)
    flat_numel: int = field(init=False, compare=False)
    has_equal_slots: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size, numel = self.shape[self.dim], math.prod(self.shape)
        chunk = size if self.owner is not None else -(-size // (self.world_size * self.unit)) * self.unit
        shape = (*self.shape[: self.dim], chunk, *self.shape[self.dim + 1 :])
        padded = self.world_size * math.prod(shape)
        if self.dim == 0 and self.unit == 1 and self.owner is None:
            flat = padded
        else:  # a multiple of the world size, so that a smaller group, which divides it, can cut it evenly
            flat = -(-numel // self.world_size) * self.world_size
        vars(self).update(
            numel=numel,
            chunk=chunk,
            padded_local_shape=shape,
            padded_local_numel=math.prod(shape),
            padded_numel=padded,
            flat_numel=flat,
            has_equal_slots=self.dim == 0 and flat == padded,
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The ranks in order, as runs of neighbours whose chunks have one length: at most three runs."""
        size, chunk = self.shape[self.dim], self.chunk
        if self.owner is not None:
            after = self.world_size - self.owner - 1
            owned = (Run(0, self.owner, 0), Run(self.owner, 1, size), Run(self.owner + 1, after, 0))
            return tuple(run for run in owned if run.ranks)
        full = size // chunk if chunk else self.world_size
        runs = [Run(0, full, chunk)]
        if full < self.world_size and full * chunk < size:
            runs.append(Run(full, 1, size - full * chunk))
        first = sum(run.ranks for run in runs)
        runs.append(Run(first, self.world_size - first, 0))
        return tuple(run for run in runs if run.ranks)

    def length(self, rank: int) -> int:
        """Indices of the dim that `rank` holds; 0 when its chunk is empty."""
        if self.owner is not None:
            return self.chunk if rank == self.owner else 0
        return max(0, min(self.chunk, self.shape[self.dim] - rank * self.chunk))

    def offset(self, rank: int) -> int:
        """First index of the dim that `rank` holds, clamped to the dim's size for an empty chunk."""
        if self.owner is not None:
            return self.chunk if rank > self.owner else 0
        return min(rank * self.chunk, self.shape[self.dim])

    def lengths(self) -> tuple[int, ...]:
        """Indices of the dim on each rank, for one `split_with_sizes` call; its length is the size of the group."""
        return tuple(run.length for run in self.runs for _ in range(run.ranks))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length(rank), *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        return math.prod(self.local_shape(rank))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of `shape`, as torch makes them."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


def runs_together(layouts: Sequence[ChunkLayout]) -> list[tuple[int, int]]:
    """(first, ranks) of consecutive ranks whose chunks are alike in all `layouts`, over all ranks in order."""
    firsts = sorted({run.first for layout in layouts for run in layout.runs})
    ends = [*firsts[1:], layouts[0].world_size]
    return [(first, end - first) for first, end in zip(firsts, ends, strict=True)]
