"""The elements of a full tensor that one rank holds: arithmetic on mesh and placements, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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

    There is usually one run per dim. Strided sharding (a dim cut by tensor parallelism first and data parallelism
    second) leaves several, and an empty shard none::

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
        """The rank's piece of `full` as a view, if it is contiguous, so that it can be received in place; else None."""
        boxes = list(self.boxes())
        if len(boxes) != 1:
            return None
        view = full[boxes[0][0]]
        return view if view.is_contiguous() else None


@dataclass(frozen=True)
class FlatRegion(Region):
    """Elements `start` to `stop` (exclusive) of a tensor of shape `whole`, in memory order; the rank's piece is 1-D.

    They form several boxes if they begin or end within a row.
    """

    whole_shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, whole_shape: Sequence[int], start: int, stop: int) -> FlatRegion:
        """The region; all empty ones are equal."""
        start, stop = (start, stop) if start < stop else (0, 0)
        return cls((), tuple(whole_shape), start, stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start,)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        offset = 0
        for runs in _boxes_of_range(self.whole_shape, self.start, self.stop):
            numel = math.prod(stop - start for start, stop in runs)
            yield tuple(slice(start, stop) for start, stop in runs), (slice(offset, offset + numel),)
            offset += numel

    def take(self, full: torch.Tensor) -> torch.Tensor:
        return full.reshape(-1)[self.start : self.stop]

    def put(self, full: torch.Tensor, piece: torch.Tensor) -> None:
        for in_full, in_piece in self.boxes():
            target = full[in_full]
            target.copy_(piece[in_piece].view(target.shape))

    def window(self, full: torch.Tensor) -> torch.Tensor | None:
        return full.view(-1)[self.start : self.stop] if full.is_contiguous() else None


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
    flat = _flat_cut(name, shape, placements, mesh_shape)
    if flat is not None:
        return flat(coordinate[next(axis for axis, one in enumerate(placements) if not one.is_replicate())])
    dims = Region.whole(shape).runs
    for axis, (size, position) in enumerate(zip(mesh_shape, coordinate, strict=True)):
        (dims,) = _cut_by(placements, axis, name, shape, dims, size, [position])
    return Region(dims)


def regions_of_mesh(
    name: str, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[Region]:
    """The regions of all ranks of a mesh, in the row-major order of their coordinates, as in `region_at`.

    Every rank computes the same list, without communication. Linear in the size of the mesh.
    """
    flat = _flat_cut(name, shape, placements, mesh_shape)
    if flat is not None:
        axis = next(axis for axis, one in enumerate(placements) if not one.is_replicate())
        regions = [flat(position) for position in range(mesh_shape[axis])]
        return [regions[coordinate[axis]] for coordinate in itertools.product(*map(range, mesh_shape))]
    found = [Region.whole(shape).runs]
    for axis, size in enumerate(mesh_shape):
        found = [cut for dims in found for cut in _cut_by(placements, axis, name, shape, dims, size, range(size))]
    return [Region(dims) for dims in found]


def _cut_by(
    placements: Sequence[Placement],
    axis: int,
    name: str,
    shape: Sequence[int],
    dims: tuple[tuple[Run, ...], ...],
    size: int,
    positions: Sequence[int],
) -> Iterator[tuple[tuple[Run, ...], ...]]:
    """The parts of `dims` that the ranks at `positions` of an axis of `size` ranks hold."""
    placement = placements[axis]
    if placement.is_replicate():
        yield from [dims] * len(positions)
        return
    if isinstance(placement, Owned | Blocks):
        for position in positions:
            yield (_placed(name, placement, dims[0], shape, size, position), *dims[1:])
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


def _placed(
    name: str, placement: Owned | Blocks, rows: tuple[Run, ...], shape: Sequence[int], size: int, position: int
) -> tuple[Run, ...]:
    """The part held by the rank at `position` of `size`, of the rows that earlier placements leave."""
    if isinstance(placement, Owned):
        return rows if position == placement.rank else ()
    if rows != ((0, shape[0]),) and shape[0]:
        raise ValueError(
            f"{name}: {placement} counts rows of the whole tensor, but another axis cuts them too; use Shard(dim)"
        )
    layout = layout_for(placement, tuple(shape), size)
    first = layout.offset(position)
    return ((first, first + layout.length(position)),) if layout.length(position) else ()


def _flat_cut(
    name: str, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> Callable[[int], FlatRegion] | None:
    """Returns the region of the rank at a position of the axis that cuts between elements, None if there is none."""
    cutting = [(one, size) for one, size in zip(placements, mesh_shape, strict=True) if not one.is_replicate()]
    if not any(isinstance(one, Blocks) and one.elements is not None for one, _ in cutting):
        return None
    if len(cutting) > 1:
        raise ValueError(
            f"{name}: {cutting[0][0]} counts elements of the whole tensor, but another axis cuts it too; use Shard(dim)"
        )
    placement, size = cutting[0]
    layout = layout_for(placement, tuple(shape), size)
    return lambda at: FlatRegion.of(shape, layout.offset(at), layout.offset(at) + layout.length(at))


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
    """Merges runs that touch."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
