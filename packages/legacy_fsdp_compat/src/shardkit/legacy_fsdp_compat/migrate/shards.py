"""Parts of tensors in files of torch.save: ShardedTensors and DTensors, read without a process group, and put together.

Classes of ours stand in for those that the file names, and keep what it says. Everything else that it might run is
refused. A DTensor has the boxes that its mesh and placements give it. Tensor parallelism cuts other dims than the
first, and the first one, too.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import is_inside, overlap
from shardkit.core.checkpoint.stored import Part, Read
from shardkit.core.region import regions_of_mesh
from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.torch_compat import ranks_of_mesh


class _Record:
    """Stands in for a class whose objects are only data."""

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)  # a dict, or (dict or None, slots)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)


def _stand_in(name: str) -> type:
    return type(name, (_Record,), {})


class StoredShards(torch.Tensor):
    """Stands in for ShardedTensor. One whose part is a ShardedTensor, as 2-D FSDP1 once wrote, is flattened: what its
    ranks are is what the inner one says, as torch gave the outer one numbers of its own.
    """

    parts: list[tuple[tuple[int, ...], torch.Tensor, int]]  # this file's parts: (offsets, tensor, rank)
    # every rank's part, as far as the file tells: (offsets, sizes, rank)
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    whole: tuple[int, ...]  # shape of the whole
    # whether there was an inner one, so that other files have parts of which this one does not tell
    nested: bool = False

    def __setstate__(self, state: Any) -> None:
        """Takes what ShardedTensor pickles: parts, metadata, process group, sharding, RRefs. Raises ValueError for
        anything else.
        """
        local, metadata = state[0], state[1]
        self.parts = [
            (_sizes(one.metadata.shard_offsets), one.tensor, _rank_of(one.metadata.placement)) for one in local
        ]
        self.boxes = [
            (_sizes(one.shard_offsets), _sizes(one.shard_sizes), _rank_of(one.placement))
            for one in metadata.shards_metadata
        ]
        self.whole = _sizes(metadata.size)
        if not all(isinstance(tensor, torch.Tensor) for _, tensor, _ in self.parts):
            raise ValueError("a ShardedTensor whose parts are no tensors")
        inner = [(offsets, tensor) for offsets, tensor, _ in self.parts if isinstance(tensor, StoredShards)]
        if inner:
            self.nested = True
            self.parts = [(_moved(at, by), part, rank) for by, one in inner for at, part, rank in one.parts]
            self.boxes = [(_moved(at, by), sizes, rank) for by, one in inner for at, sizes, rank in one.boxes]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """For messages: what a tensor prints is calculated."""
        return "a ShardedTensor"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """It is not for computing."""
        raise NotImplementedError(f"{function} on a stored ShardedTensor")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if any(type(one) is not int or not 0 <= one < 2**56 for one in sizes):
        raise ValueError(f"{sizes!r:.80} where sizes or offsets should be")
    return sizes


def _moved(offsets: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(offsets, by, strict=True)))


def _rank_of(placement: Any) -> int:
    rank = placement.__dict__.get("_rank")
    if rank is None:
        return -1
    if type(rank) is not int or not 0 <= rank < 2**31:
        raise ValueError(f"the rank {rank!r:.40}")
    return rank


class _MemoryFormat(_Record):
    """Stands in for the enum of memory formats, of which nothing is needed."""

    def __init__(self, value: object) -> None:
        self.value = value


_ProcessGroupState = _stand_in("ProcessGroupState")


def _attribute(cls: Any, name: str) -> Any:
    """`getattr` as pickles use it for what ShardedTensors need: a class inside theirs, and members of an enumeration,
    which some versions of Python (3.11.2) write by name.
    """
    if cls is _MemoryFormat:
        return _MemoryFormat(name)
    if (cls, name) != (StoredShards, "ProcessGroupState"):
        raise pickle.UnpicklingError(
            f"getattr({getattr(cls, '__name__', cls)}, {name!r}) is not allowed in a checkpoint"
        )
    return _ProcessGroupState


_SHARD = "torch.distributed._shard"
ALLOWED: list[Any] = [
    (StoredShards, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_stand_in("Shard"), f"{_SHARD}.sharded_tensor.shard.Shard"),
    (_stand_in("ShardMetadata"), f"{_SHARD}.metadata.ShardMetadata"),
    (_stand_in("ShardedTensorMetadata"), f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata"),
    (_stand_in("TensorProperties"), f"{_SHARD}.sharded_tensor.metadata.TensorProperties"),
    (_MemoryFormat, f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
    (_stand_in("ChunkShardingSpec"), f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"),
    (_stand_in("EnumerableShardingSpec"), f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec"),
    (_stand_in("remote_device"), "torch.distributed.remote_device._remote_device"),
    (_ProcessGroupState, f"{_SHARD}.sharded_tensor.api.ShardedTensor.ProcessGroupState"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    OrderedDict,
]


@dataclass(frozen=True)
class Box:
    """A box of a tensor, in one file."""

    offsets: tuple[int, ...]  # offsets, sizes: where it lies in the tensor
    sizes: tuple[int, ...]
    read: Read  # elements [low, high) of the *box*, in row-major order: a 1-D copy
    file: str  # where they are

    @property
    def row(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.sizes[1:])


def parts_of(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Part, ...]:
    """The parts, in order, that the boxes make up together; boxes without elements do not count. Raises CheckpointError
    for a box that is not in the tensor, and for rows that the boxes cover in part or twice. Rows that no box has are
    for `StoredTensor` to notice.
    """
    held = [box for box in boxes if math.prod(box.sizes)]
    for box in held:
        if not is_inside(box, shape):
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
    twice = next((pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)), None)
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


def without_mesh(name: str, tensor: DTensor, path: Path) -> torch.Tensor:
    """A DTensor as the shards that its file has a part of; a replicated one as the plain tensor that it is. Raises
    CheckpointError for sums that are not added up yet, and local tensors that the placements do not describe.
    """
    local, mesh = local_of(tensor).detach(), tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if not axes:
        return local
    place, found = mesh.get_coordinate(), ranks_of_mesh(mesh)
    if place is None or found is None:
        raise CheckpointError(f"'{name}' in {path} is a DTensor of a rank that is not in its mesh {mesh}")
    ranks, own = found
    ranks = ranks.permute(*(at for at in range(mesh.ndim) if at not in axes), *axes)
    ranks = ranks[*(one for at, one in enumerate(place) if at not in axes)]
    placements = [tensor.placements[axis] for axis in axes]
    try:
        regions = regions_of_mesh(f"'{name}' in {path}", tensor.shape, placements, ranks.shape)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    shards, numbers = StoredShards(), ranks.flatten().tolist()
    mine = regions[numbers.index(own)]
    if mine.shape != tuple(local.shape):
        raise CheckpointError(
            f"'{name}' in {path} has shape {tuple(local.shape)} on rank {own}, expected {mine.shape} by its placements "
            f"{tuple(tensor.placements)} on {mesh}"
        )
    shards.whole = tuple(tensor.shape)
    shards.boxes = [
        (tuple(one.start for one in box), tuple(one.stop - one.start for one in box), rank)
        for region, rank in zip(regions, numbers, strict=True)
        for box, _ in region.boxes()
    ]
    shards.parts = [(tuple(one.start for one in box), local[piece], own) for box, piece in mine.boxes()]
    return shards
