"""The elements of a full tensor that one rank holds: arithmetic on mesh and placements, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.parameters.placements import Blocks, Owned, layout_for

Run = tuple[int, int]
"""Indices [start, stop) of one dim."""

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """The indices of each dim that a rank holds, as runs; the rank holds their outer product.

    Strided sharding (tensor parallelism cuts a dim first, then data parallelism) leaves several, an empty shard none::

        Shard(0) of 10 rows, rank 1 of 4     runs ((3, 6),)
        the same, rank 3 of 8                runs ()
        strided: rows 0-1 and 4-5            runs ((0, 2), (4, 6))
    """

    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Pairs of equal boxes: the box in the full tensor, and the box in the rank's piece."""
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
        """The rank's piece of `full`: a view if it is one box, else a copy."""
        boxes = list(self.boxes())
        if len(boxes) == 1:
            return full[boxes[0][0]].reshape(self.shape)
        piece = full.new_empty(self.shape)
        for in_full, in_piece in boxes:
            part = piece[in_piece]
            part.copy_(full[in_full].reshape(part.shape))
        return piece

    def put(self, full: torch.Tensor, piece: torch.Tensor) -> None:
        for in_full, in_piece in self.boxes():
            target = full[in_full]
            target.copy_(piece[in_piece].reshape(target.shape))

    def window(self, full: torch.Tensor) -> torch.Tensor | None:
        """The rank's piece of `full` as a view, if it is contiguous, so that it can be received in place; else None."""
        boxes = list(self.boxes())
        if len(boxes) != 1:
            return None
        view = full[boxes[0][0]]
        return view if view.is_contiguous() else None


@dataclass(frozen=True)
class MergedRegion(Region):
    """Rows `start` to `stop` (exclusive) of a box of the tensor (`runs`), with its first `merged` dims merged into one.

    The rank's piece has one dim for the merged ones, so its boxes have fewer dims than those of the tensor; there are
    several if it begins or ends within a merged dim.
    """

    merged: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *Region(self.runs[self.merged :]).shape)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        sizes, offset = Region(self.runs).shape, 0
        firsts = [run[0][0] if run else 0 for run in self.runs]
        rest = tuple((0, size) for size in sizes[self.merged :])
        for leading in _boxes_of_range(sizes[: self.merged], self.start, self.stop):
            rows = math.prod(stop - start for start, stop in leading)
            box = zip(firsts, (*leading, *rest), strict=True)
            yield (
                tuple(slice(first + start, first + stop) for first, (start, stop) in box),
                (slice(offset, offset + rows), *(slice(*run) for run in rest)),
            )
            offset += rows


def _boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Run, ...]]:
    """The boxes that elements `start` to `stop` of a tensor of `shape` form, in memory order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if start < first * row:
        partial = first - 1
        for inner in _boxes_of_range(shape[1:], start - partial * row, min(row, stop - partial * row)):
            yield ((partial, partial + 1), *inner)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if last >= first:
        for inner in _boxes_of_range(shape[1:], 0, stop - last * row):
            yield ((last, last + 1), *inner)


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """The region of this rank's local tensor; a plain tensor is whole, and a rank outside the mesh holds nothing."""
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
    """The region of the rank at `coordinate` of a mesh; placements cut from left to right, as DTensor defines it.

    `Blocks` cuts last, what the others leave.
    """
    (region,) = _regions(name, shape, placements, mesh_shape, [(position,) for position in coordinate])
    return region


def regions_of_mesh(
    name: str, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[Region]:
    """The regions of all ranks of a mesh, in the row-major order of their coordinates, as in `region_at`.

    Every rank computes the same list, without communication. Linear in the size of the mesh.
    """
    return _regions(name, shape, placements, mesh_shape, [range(size) for size in mesh_shape])


def _regions(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    positions: Sequence[Sequence[int]],
) -> list[Region]:
    """The regions of the ranks at each combination of `positions` on the axes."""
    found = [Region.whole(shape).runs]
    for axis, (size, along) in enumerate(zip(mesh_shape, positions, strict=True)):
        found = [cut for dims in found for cut in _cut_by(placements, axis, name, dims, size, along)]
    blocks = next((axis for axis, one in enumerate(placements) if isinstance(one, Blocks)), None)
    if blocks is None:
        return [Region(dims) for dims in found]
    coordinates = itertools.product(*positions)
    return [
        _in_blocks(name, dims, placements, blocks, mesh_shape[blocks], at[blocks])
        for dims, at in zip(found, coordinates, strict=True)
    ]


def _cut_by(
    placements: Sequence[Placement],
    axis: int,
    name: str,
    dims: tuple[tuple[Run, ...], ...],
    size: int,
    positions: Sequence[int],
) -> Iterator[tuple[tuple[Run, ...], ...]]:
    """The parts of `dims` that the ranks at `positions` of an axis of `size` ranks hold, or share if it has blocks."""
    placement = placements[axis]
    if placement.is_replicate() or isinstance(placement, Blocks):
        yield from [dims] * len(positions)
        return
    if isinstance(placement, Owned):
        for position in positions:
            yield (dims[0] if position == placement.rank else (), *dims[1:])
        return
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise ValueError(f"{name}: placements {tuple(placements)}, expected Shard or Replicate; redistribute it first")
    # A strided placement cuts the dim into `split_factor` parts and takes its chunk of each part.
    count = getattr(placement, "split_factor", 1)
    parts = [_chunk(dims[dim], count, index) for index in range(count)]
    for position in positions:
        runs = _joined(run for part in parts for run in _chunk(part, size, position))
        yield (*dims[:dim], runs, *dims[dim + 1 :])


def _in_blocks(
    name: str, dims: tuple[tuple[Run, ...], ...], placements: Sequence[Placement], axis: int, size: int, position: int
) -> Region:
    """The part of `dims` that the `Blocks` of an axis of `size` ranks gives the rank at `position`."""
    layout = layout_for(placements[axis], Region(dims).shape, size)
    length = layout.length(position)
    start = layout.offset(position) if length else 0  # regions without elements are equal
    merged = len(dims) - len(layout.shape) + 1
    if merged == 1:
        return Region((_cut(dims[0], start, start + length), *dims[1:]))
    if any(len(runs) > 1 for runs in dims):
        raise ValueError(
            f"{name}: placements {tuple(placements)} leave a part that lies in several places, of which "
            f"{placements[axis]} cannot take blocks; use Shard(dim)"
        )
    return MergedRegion(dims, merged, start, start + length)


def _chunk(runs: tuple[Run, ...], count: int, index: int) -> tuple[Run, ...]:
    """Part `index` of the indices of `runs`, divided into `count` like torch.chunk; the last is short or empty."""
    total = sum(stop - start for start, stop in runs)
    chunk = -(-total // count)
    return _cut(runs, index * chunk, (index + 1) * chunk)


def _cut(runs: tuple[Run, ...], first: int, last: int) -> tuple[Run, ...]:
    """The indices of `runs` from position `first` to `last` (exclusive)."""
    cut, seen = [], 0
    for start, stop in runs:
        low, high = start + max(first - seen, 0), min(stop, start + last - seen)
        if low < high:
            cut.append((low, high))
        seen += stop - start
    return tuple(cut)


def _joined(runs: Iterator[Run]) -> tuple[Run, ...]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
