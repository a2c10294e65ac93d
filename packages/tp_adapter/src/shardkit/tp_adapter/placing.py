"""Pure arithmetic: placements for a dim that both model parallelism and data parallelism have cut.

Note [Order of cuts]
Model parallelism cuts first and data parallelism cuts the result, so a rank holds a chunk of a chunk. But meshes have
the data-parallel axes first, and DTensor reads placements from left to right. Where both cut the same dim, the
data-parallel placement is strided: it divides the dim into as many parts as model parallelism makes, and takes its
chunk of each. Ten rows over (dp=2, tp=2)::

    tp cuts first     0 1 2 3 4 | 5 6 7 8 9
    then dp           0 1 2 | 3 4 ; 5 6 7 | 8 9
    left to right     dp 0: 0 1 2 5 6 7, dp 1: 3 4 8 9      strided, split_factor=2
    then tp           0 1 2 | 5 6 7 ; 3 4 | 8 9             the same

With uneven sizes the two readings can differ: nine rows over (dp=4, tp=2) give row 8 to (dp 3, tp 1) when tp cuts
first. Read from left to right, (strided, Shard) gives it to (dp 3, tp 0), as row 8 is all that dp 3 has. The placements
would then be wrong. The same holds for fused weights. In such cases the sharded DTensor lies on a mesh that has the
model axes first, where left to right is the order of cuts.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from shardkit.core.parameters.region import Region, region_at
from shardkit.tp_adapter.torch_compat import FALLS_BACK, StridedShard

__all__ = ["Axis", "cuts", "order_of_cuts", "region_held", "torch_reads_truly"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh of a sharded parameter.

    Attributes:
        size: number of ranks along it.
        placement: the cut of model parallelism on it; Replicate on a replicate axis of data parallelism; None on the
            axis that data parallelism shards over.
    """

    size: int
    placement: Placement | None


def cuts(placement: Placement | None, dim: int) -> bool:
    """Whether a placement of model parallelism cuts `dim`."""
    return placement is not None and getattr(placement, "dim", None) == dim


def order_of_cuts(
    shape: Sequence[int], dim: int, axes: Sequence[Axis]
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """An order of the axes, and a placement for each in that order, that describe a parameter correctly.

    Args:
        shape: shape of the whole parameter.
        dim: the dim that data parallelism cuts.
        axes: axes of the mesh, in stock `fully_shard`'s order, which is kept if possible.

    Returns:
        Indices into `axes`, and placements. See Note [Order of cuts].
    """
    kept = tuple(range(len(axes)))
    placements = _left_to_right(dim, axes)
    if placements == _bare(dim, axes) or _all_even(shape[dim], dim, axes):
        return kept, placements
    if _is_true(shape[dim], _sizes(axes), placements, *_cut_order(dim, axes), dim):
        return kept, placements
    order, bare = _cut_order(dim, axes)
    return order, bare


def torch_reads_truly(shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether torch by itself gathers a tensor correctly whose placements cut from left to right.

    It reads a strided placement as an order of cuts: later axes whose sizes multiply to its `split_factor` have cut
    first. With even cuts the result is the same. Where no axes multiply to it, the tensor is gathered axis by axis,
    with wrong sizes as soon as another axis cuts the same dim.
    """
    for dim, length in enumerate(shape):
        cutting = [(size, one) for size, one in zip(sizes, placements, strict=True) if cuts(one, dim) and size > 1]
        strided = [index for index, (_, one) in enumerate(cutting) if isinstance(one, StridedShard)]
        if not strided or (len(cutting) == 1 and FALLS_BACK):
            continue
        behind = itertools.accumulate((size for size, _ in cutting[strided[0] + 1 :]), operator.mul)
        factor = getattr(cutting[strided[0]][1], "split_factor", 1)
        if len(strided) > 1 or factor not in behind or length % math.prod(size for size, _ in cutting):
            return False
    return True


def region_held(name: str, shape: Sequence[int], dim: int, axes: Sequence[Axis], coordinate: Sequence[int]) -> Region:
    """The part of a parameter on the rank at `coordinate`: model parallelism cuts first, data parallelism second."""
    order, placements = _cut_order(dim, axes)
    return region_at(name, shape, placements, [axes[i].size for i in order], [coordinate[i] for i in order])


def _sizes(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


def _bare(dim: int, axes: Sequence[Axis]) -> tuple[Placement, ...]:
    return tuple(Shard(dim) if axis.placement is None else axis.placement for axis in axes)


def _left_to_right(dim: int, axes: Sequence[Axis]) -> tuple[Placement, ...]:
    """Placements in the order of the axes; data parallelism's is strided if later axes cut the same dim."""
    placements: list[Placement] = []
    for index, axis in enumerate(axes):
        if axis.placement is not None:
            placements.append(axis.placement)
            continue
        parts = math.prod(later.size for later in axes[index + 1 :] if cuts(later.placement, dim))
        placements.append(StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim))
    return tuple(placements)


def _cut_order(dim: int, axes: Sequence[Axis]) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Axes of model parallelism in their order, then those of data parallelism."""
    order = sorted(range(len(axes)), key=lambda index: axes[index].placement is None)
    bare = _bare(dim, axes)
    return tuple(order), tuple(bare[index] for index in order)


def _all_even(length: int, dim: int, axes: Sequence[Axis]) -> bool:
    """Whether every cut of `dim` leaves equal chunks in any order; then the two readings agree."""
    cutting = [axis for axis in axes if axis.placement is None or cuts(axis.placement, dim)]
    strided = any(isinstance(axis.placement, StridedShard) for axis in cutting)
    return not strided and length % math.prod(axis.size for axis in cutting) == 0


@functools.lru_cache(maxsize=1024)
def _is_true(
    length: int,
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tuple[int, ...],
    in_order: tuple[Placement, ...],
    dim: int,
) -> bool:
    """Whether the placements, read from left to right, give every rank its indices of `dim`."""
    along = [_along(placement, dim) for placement in placements]
    along_in_order = [_along(placement, dim) for placement in in_order]
    sizes_in_order = [sizes[index] for index in order]
    relevant = [range(size) if not one.is_replicate() else range(1) for size, one in zip(sizes, along, strict=True)]
    for coordinate in itertools.product(*relevant):
        held = region_at("", (length,), along_in_order, sizes_in_order, [coordinate[index] for index in order])
        if region_at("", (length,), along, sizes, coordinate) != held:
            return False
    return True


def _along(placement: Placement, dim: int) -> Placement:
    """The placement as it acts on a 1-D tensor that stands for `dim`."""
    if not cuts(placement, dim):
        return Replicate()
    parts = getattr(placement, "split_factor", 1)
    return StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
