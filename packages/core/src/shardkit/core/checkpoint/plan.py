"""The plan of a save: which rank writes which box of which tensor, and other values. Each rank decides alone.

Note [No planning step]
Stock collects every rank's plan on one rank, removes duplicates there, and sends each rank its part back. Here a rank
derives the boxes of all ranks from the mesh, placements and shape of a DTensor. It also derives which replica writes:
entry number `n` of the state is written by replica `n % replicas`. So it writes its own boxes at once, and the rank
that writes the index computes all ranks' boxes. The rest is told in the note that each rank leaves for the committing
one (`saving.py`): plain tensors, objects, and DTensors whose local tensor has boxes of its own.

Ranks need not hold the same modules, as with pipeline parallelism. A plain value is then written by the first rank that
has it. The parameter groups of a rank's optimizer name only its parameters; those of a checkpoint name all parameters.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.checkpoint.leaves import (
    MODEL,
    OPTIMIZER,
    At,
    Captured,
    LeafPath,
    Leaves,
    check_has_values,
    name_of,
    object_bytes,
)
from shardkit.core.parameters.placements import is_ours
from shardkit.core.parameters.region import Box, regions_of_mesh
from shardkit.core.torch_compat import local_of

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
        """The boxes that each rank writes, as entry number `number` of the state: (global rank, offsets, sizes)."""
        replicas, replica_of = _replicas(self.placements, self.mesh_shape)
        boxes = _boxes_of_mesh(self.shape, self.placements, self.mesh_shape)
        writing = number % replicas
        for rank, replica, mine in zip(self.ranks, replica_of, boxes, strict=True):
            if replica == writing:
                for offsets, sizes, _ in mine:
                    yield rank, offsets, sizes


def is_described_by_layout(tensor: torch.Tensor) -> bool:
    """Whether mesh and placements fully determine where a tensor's elements lie."""
    return isinstance(tensor, DTensor) and not hasattr(local_of(tensor), "__create_chunk_list__")


def own_pieces(path: LeafPath, tensor: torch.Tensor, number: int) -> list[tuple[Piece, torch.Tensor]]:
    """This rank's pieces of a tensor, with the values; a plain tensor is one piece. Raises as `boxes_of`."""
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
    """This rank's boxes of a tensor that are not empty: offsets, sizes, and a view of the values.

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
    placements = tuple(tensor.placements)
    if any(not one.is_replicate() and getattr(one, "dim", None) is None and not is_ours(one) for one in placements):
        raise ValueError(
            f"{name_of(path)}: placements {placements}, expected Shard or Replicate; redistribute it first"
        )
    boxes = _boxes_of_mesh(tuple(tensor.shape), placements, place.mesh_shape)[place.number]
    # A piece whose first dims are merged has fewer dims than its boxes.
    return [(offsets, sizes, local[in_local].view(sizes)) for offsets, sizes, in_local in boxes]


@dataclass(frozen=True)
class _Place:
    """A mesh, and this rank's number in the row-major order of its coordinates; None if it is not in it."""

    mesh_shape: Sizes
    ranks: Sizes
    number: int | None


@functools.lru_cache(maxsize=16)
def _place(mesh: DeviceMesh) -> _Place:
    """Cached, because a mesh computes these anew on each call."""
    shape, coordinate = tuple(mesh.mesh.shape), mesh.get_coordinate()
    number = None if coordinate is None else int(np.ravel_multi_index(coordinate, shape))
    return _Place(shape, tuple(mesh.mesh.flatten().tolist()), number)


@functools.lru_cache(maxsize=64)
def _replicas(placements: tuple[Placement, ...], mesh_shape: Sizes) -> tuple[int, Sizes]:
    """The number of ranks that hold the same elements, and the replica number of each rank of the mesh."""
    sizes = [size if place.is_replicate() else 1 for size, place in zip(mesh_shape, placements, strict=True)]
    numbers = np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), mesh_shape)
    return math.prod(sizes), tuple(numbers.flatten().tolist())


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


@dataclass
class Plan:
    """This rank's part of a save."""

    # the tensors that layouts describe, each with its number; empty if the ranks' layouts differ
    layouts: list[tuple[int, Layout]] = field(default_factory=list)
    # `described` are pieces that layouts describe; `told` are pieces that other ranks cannot know of.
    described: list[Piece] = field(default_factory=list)
    told: list[Piece] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)  # the tensors of both, in that order
    objects: list[tuple[LeafPath, bytes]] = field(default_factory=list)  # bytes of values that are not tensors
    empties: list[LeafPath] = field(default_factory=list)  # paths of empty mappings
    # the leaves in this rank's note, if any object comes before a tensor
    order: list[LeafPath] = field(default_factory=list)


def make_plan(captured: Captured, rank: int, *, by_layout: bool) -> Plan:
    """The plan of a (global) rank. Not collective. Raises TypeError, ValueError for state that cannot be stored.

    `by_layout` says whether all ranks have the same names and layouts. If not, as with pipeline parallelism, each rank
    notes everything it writes, and the plain values in `captured` are those that it has to write.
    """
    plan = Plan()
    told: list[tuple[Piece, torch.Tensor]] = []
    number = 0
    for path, value in captured.shared.values.items():
        if isinstance(value, DTensor):
            check_has_values(name_of(path), local_of(value))
            known = by_layout and is_described_by_layout(value)
            # Without a layout its number may differ between ranks, so its writer must not depend on it.
            pieces = own_pieces(path, value, number if known else 0)
            if known:
                plan.layouts.append((number, Layout.of(path, value)))
                plan.described += [piece for piece, _ in pieces]
                plan.values += [values for _, values in pieces]
                number += 1
            else:
                told += pieces
        elif rank == 0 or not by_layout:
            _add_plain(plan, told, path, value)
    for path, value in captured.own.values.items():
        if isinstance(value, DTensor):
            raise TypeError(f"{name_of(path)}: a DTensor in per-rank state; put it into user=, which is sharded")
        _add_plain(plan, told, path, value)
    plan.told = [piece for piece, _ in told]
    plan.values += [values for _, values in told]
    plan.order = _order(captured, shared=rank == 0 or not by_layout)
    plan.empties = [*(captured.shared.empties if rank == 0 or not by_layout else ()), *captured.own.empties]
    return plan


def _order(captured: Captured, *, shared: bool) -> list[LeafPath]:
    """The order of user and per-rank state, as a run may iterate over a dict; tensors first is the default."""
    leaves = {
        path: value for path, value in captured.shared.values.items() if shared and path[0] not in (MODEL, OPTIMIZER)
    }
    leaves |= captured.own.values
    is_object = [not isinstance(value, torch.Tensor) for value in leaves.values()]
    return [] if is_object == sorted(is_object) else list(leaves)


def _add_plain(plan: Plan, told: list[tuple[Piece, torch.Tensor]], path: LeafPath, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        plan.objects.append((path, _cached_bytes(path, value)))
        return
    check_has_values(name_of(path), value)
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"{name_of(path)}: a tensor of layout {value.layout}, expected a dense one; convert it")
    if value.numel():
        told += own_pieces(path, value, 0)
    else:
        shape = tuple(value.shape)
        told.append((Piece(path, value.dtype, shape, (0,) * value.ndim, shape), value.detach()))


_SCALARS: dict[tuple[type, str], bytes] = {}


def _cached_bytes(path: LeafPath, value: Any) -> bytes:
    """Caches the bytes of scalars by type and text: 0.0 and -0.0 differ."""
    if type(value) not in (bool, int, float, str, type(None)):
        return object_bytes(name_of(path), value)
    key = type(value), repr(value)
    if key not in _SCALARS:
        if len(_SCALARS) >= 1024:
            _SCALARS.clear()
        _SCALARS[key] = object_bytes(name_of(path), value)
    return _SCALARS[key]


def layouts_digest(leaves: Mapping[LeafPath, Any]) -> int:
    """A 60-bit number. Two ranks have the same one if, and almost surely only if, their plans match.

    Plans match if the values have the same names, the DTensors the same layouts, and the optimizers' groups the same
    parameters.
    """
    digest = hashlib.sha256()
    for path, value in leaves.items():
        names = value if path[-1] == "params" and isinstance(value, list) else None
        digest.update(repr((path, names)).encode())
        if isinstance(value, DTensor) and is_described_by_layout(value):
            layout = Layout.of(path, value)
            look = (str(layout.dtype), layout.shape, layout.placements, layout.mesh_shape)
            digest.update(repr(look).encode())
            digest.update(_ranks_digest(layout.ranks))
    return int.from_bytes(digest.digest()[:8], "little") >> 4


@functools.lru_cache(maxsize=16)
def _ranks_digest(ranks: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr(ranks).encode()).digest()


_GROUPS = (OPTIMIZER, "param_groups")


@dataclass(frozen=True)
class Group:
    """A parameter group: its options as text, and its parameters."""

    options: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class Holding:
    """Facts about a rank's state for the other ranks: paths of its plain values, and its parameter groups."""

    plain: tuple[LeafPath, ...]
    groups: tuple[Group, ...]


@dataclass
class _Merged:
    """A parameter group of the checkpoint, with the rank that writes it and its number on that rank."""

    options: str
    params: dict[str, None]
    rank: int
    number: int


def holding_of(leaves: Leaves) -> Holding:
    """This rank's holding. Not collective."""
    plain = tuple(
        path for path, value in leaves.values.items() if not isinstance(value, DTensor) and not is_in_group(path)
    )
    below: dict[Any, dict[LeafPath, Any]] = {}
    for path, value in leaves.values.items():
        if is_in_group(path):
            below.setdefault(path[2], {})[path[3:]] = value
    params = [tuple(group.pop(("params",), ())) for group in below.values()]
    return Holding(plain, tuple(Group(repr(group), names) for group, names in zip(below.values(), params, strict=True)))


def is_in_group(path: LeafPath) -> bool:
    """Whether a value belongs to a parameter group of an optimizer."""
    return path[:2] == _GROUPS and len(path) > 3


def part_of(leaves: Leaves, holdings: Sequence[Holding], rank: int) -> Leaves:
    """The leaves that this rank writes: all DTensors, and its part of the rest. `holdings` has every rank's."""
    owner: dict[LeafPath, int] = {}
    for holder, holding in enumerate(holdings):
        for path in holding.plain:
            owner.setdefault(path, holder)
    groups = _merge(holdings)
    places = {At(one.number): (At(place), one) for place, one in enumerate(groups) if one.rank == rank}
    part = Leaves(empties=leaves.empties)
    for path, value in leaves.values.items():
        if is_in_group(path):
            if path[2] in places:
                place, one = places[path[2]]
                part.values[(*_GROUPS, place, *path[3:])] = list(one.params) if path[3:] == ("params",) else value
        elif isinstance(value, DTensor) or owner[path] == rank:
            part.values[path] = value
    return part


def _merge(holdings: Sequence[Holding]) -> list[_Merged]:
    """Merges the groups of all ranks: groups with the same options are joined, those of the same number first."""
    merged: list[_Merged] = []
    for rank, holding in enumerate(holdings):
        used: set[int] = set()
        for number, group in enumerate(holding.groups):
            places = [number, *range(len(merged))]
            fits = (p for p in places if p < len(merged) and p not in used and merged[p].options == group.options)
            place = next(fits, len(merged))
            if place == len(merged):
                merged.append(_Merged(group.options, {}, rank, number))
            merged[place].params.update(dict.fromkeys(group.params))
            used.add(place)
    return merged
