"""Which box of which tensor is written by which rank: arithmetic on layouts, the same on every rank.

Note [No planning step]
Stock collects every rank's plan on one rank, removes duplicates there, and sends each rank its part back. Here a rank
that holds a DTensor knows from mesh, placements and shape what all ranks of the mesh hold, and which of several
replicas writes: number `n` of the state is written by replica `n % replicas`. So it writes its own boxes at once, and
whoever writes the index computes everybody's. What cannot be known that way is told in the note that each rank leaves
for the one that commits (`parts.py`): plain tensors, objects, and DTensors whose local tensor has boxes of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.placements import is_ours
from shardkit.core.region import Box, regions_of_mesh
from shardkit.core.torch_compat import local_of

__all__ = ["Layout", "Piece", "boxes_of", "is_described_by_layout", "own_pieces"]

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of `shape`, at `offsets`, of `sizes`."""

    path: LeafPath
    dtype: torch.dtype
    shape: Sizes
    offsets: Sizes
    sizes: Sizes


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies over the ranks of a mesh; `ranks` are global, in row-major order of their coordinates."""

    path: LeafPath
    dtype: torch.dtype
    shape: Sizes
    placements: tuple[Placement, ...]
    mesh_shape: Sizes
    ranks: Sizes

    @classmethod
    def of(cls, path: LeafPath, tensor: DTensor) -> Layout:
        """Not collective."""
        place = _place(tensor.device_mesh)
        return cls(path, tensor.dtype, tuple(tensor.shape), tuple(tensor.placements), place.mesh_shape, place.ranks)

    def boxes(self, number: int) -> Iterator[tuple[int, Sizes, Sizes]]:
        """What each rank writes of it, as number `number` of the state: (global rank, offsets, sizes)."""
        replicas, replica_of = _replicas(self.placements, self.mesh_shape)
        boxes = _boxes_of_mesh(self.shape, self.placements, self.mesh_shape)
        writing = number % replicas
        for rank, replica, mine in zip(self.ranks, replica_of, boxes, strict=True):
            if replica == writing:
                for offsets, sizes, _ in mine:
                    yield rank, offsets, sizes


def is_described_by_layout(tensor: torch.Tensor) -> bool:
    """Whether mesh and placements say all about where a tensor's elements lie."""
    return isinstance(tensor, DTensor) and not hasattr(local_of(tensor), "__create_chunk_list__")


def own_pieces(path: LeafPath, tensor: torch.Tensor, number: int) -> list[tuple[Piece, torch.Tensor]]:
    """What this rank writes of a tensor, with the values; a plain tensor whole. Raises as `boxes_of`."""
    if isinstance(tensor, DTensor):
        place = _place(tensor.device_mesh)
        if place.number is None:
            return []
        replicas, replica_of = _replicas(tuple(tensor.placements), place.mesh_shape)
        if replica_of[place.number] != number % replicas:
            return []
    shape = tuple(tensor.shape)
    return [
        (Piece(path, tensor.dtype, shape, offsets, sizes), values) for offsets, sizes, values in boxes_of(path, tensor)
    ]


def boxes_of(path: LeafPath, tensor: torch.Tensor) -> list[tuple[Sizes, Sizes, torch.Tensor]]:
    """The boxes that this rank holds of a tensor: offsets, sizes, and a view of the values; none that are empty.

    Raises ValueError for a placement that is neither Replicate nor sharding.
    """
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, tuple(tensor.shape), tensor.detach())] if tensor.numel() else []
    local: Any = local_of(tensor).detach()
    if hasattr(local, "__create_chunk_list__"):
        chunks = local.__create_chunk_list__()
        return [
            (tuple(c.offsets), tuple(c.sizes), local.__get_tensor_shard__(MetadataIndex(name_of(path), c.offsets)))
            for c in chunks
            if math.prod(c.sizes)
        ]
    place = _place(tensor.device_mesh)
    if place.number is None:
        return []
    boxes = _boxes_of_mesh(tuple(tensor.shape), _checked(path, tensor), place.mesh_shape)[place.number]
    # A piece that is cut between elements is 1-D; its boxes are not.
    return [(offsets, sizes, local[in_local].view(sizes)) for offsets, sizes, in_local in boxes]


@dataclass(frozen=True)
class _Place:
    """A mesh, and this rank's number in the row-major order of its coordinates; None if it is not in it."""

    mesh_shape: Sizes
    ranks: Sizes
    number: int | None


@functools.lru_cache(maxsize=16)
def _place(mesh: DeviceMesh) -> _Place:
    """Kept, as a mesh works these out anew each time that it is asked."""
    shape, coordinate = tuple(mesh.mesh.shape), mesh.get_coordinate()
    number = None if coordinate is None else _linear(coordinate, shape)
    return _Place(shape, tuple(mesh.mesh.flatten().tolist()), number)


def _checked(path: LeafPath, tensor: DTensor) -> tuple[Placement, ...]:
    placements = tuple(tensor.placements)
    for placement in placements:
        if not placement.is_replicate() and getattr(placement, "dim", None) is None and not is_ours(placement):
            raise ValueError(
                f"{name_of(path)}: placements {placements}, expected Shard or Replicate; redistribute it first"
            )
    return placements


@functools.lru_cache(maxsize=64)
def _replicas(placements: tuple[Placement, ...], mesh_shape: Sizes) -> tuple[int, Sizes]:
    """How many ranks hold the same, and the number among these of each rank of the mesh."""
    replicated = [place.is_replicate() for place in placements]
    sizes = [size if same else 1 for size, same in zip(mesh_shape, replicated, strict=True)]
    numbers = tuple(
        _linear([at if same else 0 for at, same in zip(coordinate, replicated, strict=True)], sizes)
        for coordinate in itertools.product(*map(range, mesh_shape))
    )
    return math.prod(sizes), numbers


def _linear(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for at, size in zip(coordinate, shape, strict=True):
        number = number * size + at
    return number


@functools.lru_cache(maxsize=4096)
def _boxes_of_mesh(
    shape: Sizes, placements: tuple[Placement, ...], mesh_shape: Sizes
) -> tuple[tuple[tuple[Sizes, Sizes, Box], ...], ...]:
    """The boxes of each rank of a mesh: offsets, sizes, and where they lie in the rank's tensor."""
    return tuple(
        tuple(
            (tuple(one.start for one in in_full), tuple(one.stop - one.start for one in in_full), in_local)
            for in_full, in_local in (region.boxes() if region.numel else ())
        )
        for region in regions_of_mesh("a tensor", shape, placements, mesh_shape)
    )
