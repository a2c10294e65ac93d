"""Which elements of a full tensor one rank holds: arithmetic on a DTensor's mesh and placements, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement

Run = tuple[int, int]
"""Indices [start, stop) of one dim."""

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """The indices of each dim that a rank holds, as runs; the rank holds their outer product.

    One run per dim is the rule. Strided sharding (a dim cut by tensor parallelism first and data parallelism second)
    leaves several, and an empty shard none::

        Shard(0) of 10 rows, rank 1 of 4     runs ((3, 6),)
        the same, rank 3 of 8                runs ()
        strided: rows 0-1 and 4-5            runs ((0, 2), (4, 6))
    """

    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor of `shape`."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's piece."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """Elements of the rank's piece."""
        return math.prod(self.shape)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Pairs of equal boxes: where it lies in the full tensor, and where in the rank's piece."""
        located = []
        for runs in self.runs:
            offset, pairs = 0, []
            for start, stop in runs:
                pairs.append((slice(start, stop), slice(offset, offset + stop - start)))
                offset += stop - start
            located.append(pairs)
        for pairs_per_dim in itertools.product(*located):
            yield tuple(pair[0] for pair in pairs_per_dim), tuple(pair[1] for pair in pairs_per_dim)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The rank's piece of `full`: a view where it is one box, else a copy."""
        boxes = list(self.boxes())
        if len(boxes) == 1:
            return full[boxes[0][0]]
        piece = full.new_empty(self.shape)
        for in_full, in_piece in boxes:
            piece[in_piece] = full[in_full]
        return piece

    def put(self, full: torch.Tensor, piece: torch.Tensor) -> None:
        """Writes the rank's piece into `full`."""
        for in_full, in_piece in self.boxes():
            full[in_full] = piece[in_piece]

    def window(self, full: torch.Tensor) -> torch.Tensor | None:
        """The view of `full` that is the rank's piece, if it is contiguous, so that it can be received in place."""
        boxes = list(self.boxes())
        if len(boxes) != 1:
            return None
        view = full[boxes[0][0]]
        return view if view.is_contiguous() else None


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """The region of this rank's local tensor; a plain tensor is whole, and a rank outside the mesh holds nothing.

    Raises ValueError for a placement that is neither Replicate nor sharding.
    """
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Region(((),) * max(tensor.ndim, 1))
    return region_at(name, tensor.shape, tensor.placements, tensor.device_mesh.mesh.shape, coordinate)


def region_at(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Region:
    """The region of the rank at `coordinate` of a mesh; placements cut from left to right, as DTensor defines it."""
    dims: list[tuple[Run, ...]] = [((0, size),) if size else () for size in shape]
    for placement, size, position in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(
                f"{name}: placements {tuple(placements)}, expected Shard or Replicate; redistribute it first"
            )
        # A strided placement cuts the dim into `split_factor` parts and takes its chunk of each part.
        count = getattr(placement, "split_factor", 1)
        parts = (_chunk(dims[dim], count, index) for index in range(count))
        dims[dim] = _joined(run for part in parts for run in _chunk(part, size, position))
    return Region(tuple(dims))


def regions_of_mesh(
    name: str, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[Region]:
    """The regions of all ranks of a mesh, in the row-major order of their coordinates; as `region_at` has each.

    Every rank comes to the same list, so that nobody has to ask. Linear in the size of the mesh.
    """
    found: list[tuple[tuple[Run, ...], ...]] = [tuple(((0, size),) if size else () for size in shape)]
    for placement, size in zip(placements, mesh_shape, strict=True):
        if placement.is_replicate():
            found = [dims for dims in found for _ in range(size)]
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(
                f"{name}: placements {tuple(placements)}, expected Shard or Replicate; redistribute it first"
            )
        cut = []
        for dims in found:
            parts = [_chunks(part, size) for part in _chunks(dims[dim], getattr(placement, "split_factor", 1))]
            for position in range(size):
                runs = _joined(run for part in parts for run in part[position])
                cut.append((*dims[:dim], runs, *dims[dim + 1 :]))
        found = cut
    return [Region(dims) for dims in found]


def _chunks(runs: tuple[Run, ...], count: int) -> list[tuple[Run, ...]]:
    """All `count` parts of the indices of `runs`."""
    return [_chunk(runs, count, index) for index in range(count)]


def _chunk(runs: tuple[Run, ...], count: int, index: int) -> tuple[Run, ...]:
    """Part `index` of the indices of `runs`, cut into `count` by the rule of torch.chunk, the last short or empty."""
    total = sum(stop - start for start, stop in runs)
    chunk = -(-total // count)
    return _cut(runs, index * chunk, (index + 1) * chunk)


def _cut(runs: tuple[Run, ...], first: int, last: int) -> tuple[Run, ...]:
    """Indices number `first` to `last` (exclusive) of `runs`."""
    cut, seen = [], 0
    for start, stop in runs:
        low, high = start + max(first - seen, 0), min(stop, start + last - seen)
        if low < high:
            cut.append((low, high))
        seen += stop - start
    return tuple(cut)


def _joined(runs: Iterator[Run]) -> tuple[Run, ...]:
    """Merges runs that touch."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
