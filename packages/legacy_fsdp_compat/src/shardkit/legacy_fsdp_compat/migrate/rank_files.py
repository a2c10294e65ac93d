"""Files written by single ranks: SHARDED (parts of every tensor) and LOCAL (parts of flat tensors).

Their ShardedTensors and DTensors are read without a process group. Classes of ours stand in for those that a file
names, and keep their data. Nothing else in the file may run. A DTensor's boxes follow from its mesh and placements,
because tensor parallelism may cut any dim, including the first.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
from shardkit.core.checkpoint.leaves import LeafPath, LeftOut, name_of
from shardkit.core.checkpoint.stored import (
    Checkpoint,
    Part,
    Read,
    StoredTensor,
    by_rows,
    mapped_reader,
    paths_of,
    whole,
)
from shardkit.core.checkpoint.torch_files import load_torch_file
from shardkit.core.parameters.region import regions_of_mesh
from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.torch_compat import ranks_of_mesh


class _Record:
    """Stands in for a class that only holds data."""

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)  # a dict, or (dict or None, slots)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)


def _stand_in(name: str) -> type:
    return type(name, (_Record,), {})


class StoredShards(torch.Tensor):
    """Stands in for ShardedTensor. A nested one, as 2-D FSDP1 once wrote, is flattened: the inner one gives the ranks,
    because torch numbered those of the outer one differently.
    """

    parts: list[tuple[tuple[int, ...], torch.Tensor, int]]  # this file's parts: (offsets, tensor, rank)
    # every rank's part that is known from the file: (offsets, sizes, rank)
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    whole: tuple[int, ...]  # shape of the whole
    # whether it was nested, so that other files have parts that this one does not list
    nested: bool = False

    def __setstate__(self, state: Any) -> None:
        """Reads the pickled state of ShardedTensor: parts, metadata, process group, sharding, RRefs. Raises ValueError
        for anything else.
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
            raise ValueError("a ShardedTensor whose parts are not tensors")
        inner = [(offsets, tensor) for offsets, tensor, _ in self.parts if isinstance(tensor, StoredShards)]
        if inner:
            self.nested = True
            self.parts = [(_moved(at, by), part, rank) for by, one in inner for at, part, rank in one.parts]
            self.boxes = [(_moved(at, by), sizes, rank) for by, one in inner for at, sizes, rank in one.boxes]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """For messages: printing a tensor would compute with it."""
        return "a ShardedTensor"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses to compute."""
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
    """Stands in for the enum of memory formats, which is not needed."""

    def __init__(self, value: object) -> None:
        self.value = value


_ProcessGroupState = _stand_in("ProcessGroupState")


def _attribute(cls: Any, name: str) -> Any:
    """`getattr` as pickles of ShardedTensors need it: for a class inside theirs, and for members of an enum, which some
    versions of Python (3.11.2) write by name.
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
        return math.prod(self.sizes[1:])


def from_boxes(path: LeafPath, dtype: torch.dtype, shape: tuple[int, ...], boxes: Sequence[Box]) -> StoredTensor:
    """The tensor that boxes form together; empty boxes are ignored. Raises CheckpointError if the boxes do not cover
    each element of a tensor once.
    """
    held = [box for box in boxes if math.prod(box.sizes)]
    if problem := coverage_problem(shape, held):
        raise CheckpointError(
            f"'{name_of(path)}' of shape {shape}: its parts {problem}. Is a rank's file missing, or are there files of "
            f"several checkpoints? They are in {sorted({box.file for box in held})}"
        )
    if all(box.sizes[1:] == shape[1:] for box in held):
        return StoredTensor(path, dtype, shape, tuple(sorted(map(_rows, held), key=lambda part: part.start)))
    read = by_rows(dtype, shape, partial(_fill, held))
    return StoredTensor.of(path, dtype, shape, read, dict.fromkeys(box.file for box in held))


def _rows(box: Box) -> Part:
    """A box of whole rows, unchanged."""
    start = box.offsets[0] * box.row if box.offsets else 0
    return Part(start, start + math.prod(box.sizes), box.read, (box.file,))


def _fill(boxes: list[Box], offsets: tuple[int, ...], rows: torch.Tensor) -> None:
    """Copies the boxes' part of whole rows into `rows`."""
    first, last = offsets[0], offsets[0] + len(rows)
    for box in boxes:
        low, high = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
        if low < high:
            found = box.read((low - box.offsets[0]) * box.row, (high - box.offsets[0]) * box.row)
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True))
            rows[low - first : high - first, *place] = found.view(high - low, *box.sizes[1:])


def without_mesh(name: str, tensor: DTensor, path: Path) -> torch.Tensor:
    """A DTensor as shards, of which its file has a part; a replicated one as a plain tensor. Raises CheckpointError for
    partial sums, and for local tensors that do not match the placements.
    """
    local, mesh = local_of(tensor).detach(), tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if not axes:
        return local
    place, found = mesh.get_coordinate(), ranks_of_mesh(mesh)
    if place is None or found is None:
        raise CheckpointError(
            f"'{name}' in {path} is a DTensor of a rank that is not in its mesh {mesh}; "
            "save it on the ranks of the mesh"
        )
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
            f"{tuple(tensor.placements)} on {mesh}; save the checkpoint again"
        )
    shards.whole = tuple(tensor.shape)
    shards.boxes = [
        (tuple(one.start for one in box), tuple(one.stop - one.start for one in box), rank)
        for region, rank in zip(regions, numbers, strict=True)
        for box, _ in region.boxes()
    ]
    shards.parts = [(tuple(one.start for one in box), local[piece], own) for box, piece in mine.boxes()]
    return shards


@dataclass(frozen=True)
class RankFile:
    """One rank's file."""

    path: Path  # of the file
    rank: int  # its number among the files, which are in rank order
    leaves: dict[LeafPath, Any]  # its contents, by path


def read_rank_files(paths: Iterable[Path], left_out: LeftOut) -> list[RankFile]:
    """Opens the files, without the left out entries, and determines the rank of each. In a hybrid run, whose shard
    groups hold the same, the files of the first group are used. Raises CheckpointError for two files of one rank, a
    missing rank, or files of different steps.
    """
    files = [_open(path, number, left_out) for number, path in enumerate(sorted(paths, key=_natural))]
    by_rank: dict[int, RankFile] = {}
    for file in files:
        if file.rank in by_rank:
            raise CheckpointError(f"{by_rank[file.rank].path} and {file.path} are both of rank {file.rank}; remove one")
        by_rank[file.rank] = file
    _check_same_step(files)
    in_order = [file for _, file in sorted(by_rank.items())]
    found = _shard_groups(in_order) or [frozenset()]
    group, members = found[0], in_order
    if len(found) > 1:  # with one group, ranks that hold nothing belong to it too
        members = [file for file in in_order if _ranks_beside(file) & group]
    missing = sorted(group - {file.rank for file in members})
    if missing:
        raise CheckpointError(
            f"the checkpoint was written by ranks {sorted(group)}, but there is no file of rank "
            f"{', '.join(map(str, missing))} among {[str(file.path) for file in files]}; "
            "add it"
        )
    return [RankFile(file.path, number, file.leaves) for number, file in enumerate(members)]


def _shard_groups(files: list[RankFile]) -> list[frozenset[int]]:
    """Ranks that share tensors, in order of the first files. Data and tensor parallelism share some tensors over one
    axis of their mesh and others over both.
    """
    groups: list[frozenset[int]] = []
    for file in files:
        ranks = _ranks_beside(file)
        near = [group for group in groups if group & ranks]
        if ranks:
            joined_group = ranks.union(*near)
            at = groups.index(near[0]) if near else len(groups)
            groups = [group for group in groups if group not in near]
            groups.insert(at, joined_group)
    nested = any(getattr(value, "nested", False) for file in files for value in file.leaves.values())
    return [frozenset().union(*groups)] if nested else groups


def _ranks_beside(file: RankFile) -> frozenset[int]:
    """The ranks that hold parts of the tensors of which the file has a part."""
    shards = (value for value in file.leaves.values() if isinstance(value, StoredShards))
    return frozenset(rank for value in shards for _, _, rank in value.boxes)


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def leaves_of_file(path: Path) -> dict[LeafPath, Any]:
    """The contents of a torch.save file, by path, with mapped tensors. Raises CheckpointError unless it is a dict that
    is not empty.
    """
    value = load_torch_file(path, ALLOWED)
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}: {value!r:.40}; give a file that holds a state dict"
        )
    with damage_of(str(path), "holds DTensors that are damaged", passing=()):
        found = {
            key: without_mesh(name_of(key), leaf, path) if isinstance(leaf, DTensor) else leaf
            for key, leaf in paths_of(dict(value))
        }
    for key, leaf in found.items():
        if isinstance(leaf, StoredShards):
            parts = getattr(leaf, "parts", None)  # a stand-in may lack its values
            if parts is None or any(
                len(offsets) != tensor.dim() or len(offsets) != len(leaf.whole) for offsets, tensor, _ in parts
            ):
                raise DamagedCheckpointError(
                    f"'{name_of(key)}' in {path} is a ShardedTensor whose parts do not describe a tensor"
                )
    return found


def _open(path: Path, number: int, left_out: LeftOut) -> RankFile:
    leaves = dict(left_out.rest(leaves_of_file(path)))
    own = {rank for leaf in leaves.values() if isinstance(leaf, StoredShards) for _, _, rank in leaf.parts}
    if len(own) > 1:
        raise CheckpointError(
            f"{path} holds parts of the ranks {sorted(own)}, expected those of one rank; give one file for each rank"
        )
    numbers = re.findall(r"\d+", path.stem)
    return RankFile(path, own.pop() if own else int(numbers[-1]) if numbers else number, leaves)


def _check_same_step(files: list[RankFile]) -> None:
    """Files of different steps are told apart by an optimizer's step counters, which every rank has."""
    for path, value in files[0].leaves.items():
        if path[-1] != "step" or not _is_number(value):
            continue
        for file in files[1:]:
            other = file.leaves.get(path)
            if _is_number(other) and float(other) != float(value):
                raise CheckpointError(
                    f"'{name_of(path)}' is {float(value):g} in {files[0].path} and {float(other):g} in {file.path}: "
                    "the files are of different steps; pass those of one"
                )


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta
    return isinstance(value, int | float)


def stored_shards(files: list[RankFile], path: LeafPath, notes: list[str] | None = None) -> StoredTensor:
    """A tensor whose boxes, or flat parts, lie in the files. If ranks of several groups that share nothing else of the
    tensor have a box, the first one's is used; if others differ, a note is added. Raises CheckpointError if files
    describe different tensors, or the parts do not form one.
    """
    name, found = name_of(path), [one for file in files if isinstance(one := file.leaves.get(path), StoredShards)]
    if not found:
        raise CheckpointError(
            f"'{name}' is not a ShardedTensor in {files[0].path} or another file; give all files of the save"
        )
    first = found[0]
    dtypes: dict[torch.dtype, Path] = {}  # and the first file that has it
    boxes: list[Box] = []
    holders: dict[tuple[tuple[int, ...], torch.Size], tuple[frozenset[int], Box]] = {}
    for file in files:
        value = file.leaves.get(path)
        if not isinstance(value, StoredShards):
            raise CheckpointError(
                f"'{name}' is {'missing' if value is None else type(value).__name__} in {file.path}, but a "
                f"ShardedTensor of shape {first.whole} in another file; pass the files of one checkpoint"
            )
        if value.whole != first.whole:
            raise CheckpointError(
                f"'{name}' has shape {value.whole} in {file.path} and {first.whole} in {files[0].path}; are these "
                "files of one checkpoint?"
            )
        group = frozenset(rank for _, _, rank in value.boxes)
        for offsets, tensor, _ in value.parts:
            # Nobody reads a box without elements, so its dtype does not matter.
            if tensor.numel():
                dtypes.setdefault(tensor.dtype, file.path)
            read = mapped_reader(name, tensor if tensor.numel() else torch.empty(0), str(file.path))
            box = Box(offsets, tuple(tensor.shape), read, str(file.path))
            known, other = holders.setdefault((offsets, tensor.shape), (group, box))
            if other is box or known & group:
                boxes.append(box)
            elif notes is not None and not _alone(box, tensor.dtype).same_values(_alone(other, tensor.dtype)):
                notes.append(f"'{name}' differs between {other.file} and {box.file}; taken from the first")
    return from_boxes(path, one_dtype(name, dtypes) if dtypes else first.dtype, first.whole, boxes)


def one_dtype(name: str, dtypes: Mapping[torch.dtype, Path]) -> torch.dtype:
    """The dtype of all parts; `dtypes` has a file for each. Raises CheckpointError if there are several."""
    if len(dtypes) > 1:
        described = " and ".join(f"{dtype} in {file}" for dtype, file in dtypes.items())
        raise CheckpointError(f"'{name}' is of {described}; are these files of one checkpoint?")
    return next(iter(dtypes))


def _alone(box: Box, dtype: torch.dtype) -> StoredTensor:
    """A box as a separate tensor."""
    return from_boxes((box.file,), dtype, box.sizes, [replace(box, offsets=(0,) * len(box.sizes))])


def sharded_checkpoint(files: list[RankFile]) -> Checkpoint:
    """A SHARDED checkpoint of one file for each rank. Raises CheckpointError as `stored_shards`, if plain tensors
    differ, or if the files do not belong to ranks.
    """
    if not any(isinstance(leaf, StoredShards) for file in files for leaf in file.leaves.values()):
        # Files without sharded tensors come from ranks that hold everything, or are weights and optimizer in two files.
        for other in files[1:]:
            odd = [name_of(path) for path in files[0].leaves.keys() ^ other.leaves.keys()]
            if odd:
                raise CheckpointError(
                    f"{files[0].path} and {other.path} hold no ShardedTensors or DTensors, and {len(odd)} keys, such "
                    f"as '{odd[0]}', are in one of them only, so they are not files of ranks. Convert each by itself"
                )
    checkpoint = Checkpoint("SHARDED", [str(file.path) for file in files], len(files))
    for path in dict.fromkeys(path for file in files for path in file.leaves):
        add_leaf(checkpoint, files, path)
    return checkpoint


def add_leaf(checkpoint: Checkpoint, files: list[RankFile], path: LeafPath) -> None:
    """Adds the value at `path` of the files to the checkpoint. Raises CheckpointError if a value is not cut, but
    differs between ranks. For buffers the first rank's value is used, as in FSDP1's own FULL state dicts, and a note is
    added.
    """
    if any(isinstance(file.leaves.get(path), StoredShards) for file in files):
        checkpoint.tensors[path] = stored_shards(files, path, checkpoint.notes)
        return
    holder = next(file for file in files if path in file.leaves)
    value = holder.leaves[path]
    try:
        same_everywhere(files, path)
    except CheckpointError:
        if not _is_buffer(files, path):
            raise
        checkpoint.notes.append(f"'{name_of(path)}' differs from rank to rank; taken from {holder.path}")
    checkpoint.add(path, value, holder.path)


def same_everywhere(files: list[RankFile], path: LeafPath) -> None:
    """Compares the values at `path` of all files, to the last byte. Raises CheckpointError if two differ."""
    first, *others = [file for file in files if path in file.leaves]
    for other in others:
        mine, theirs = first.leaves[path], other.leaves[path]
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            left, right = whole(path, mine, str(first.path)), whole(path, theirs, str(other.path))
            same = left.same_values(right)
        else:
            same = type(mine) is type(theirs) and repr(mine) == repr(theirs)
        if not same:
            raise CheckpointError(
                f"'{name_of(path)}' is not a ShardedTensor, and differs between {first.path} and {other.path}; one of "
                "them would be lost. Optimizer state must be saved with FSDP.optim_state_dict, not "
                "optimizer.state_dict(); leave out what belongs to a rank (random "
                "states, positions of data loaders) with --without KEY"
            )


def _is_buffer(files: list[RankFile], path: LeafPath) -> bool:
    """Whether a plain tensor lies beside sharded ones, has one shape on all ranks, and is outside an optimizer."""
    found = [file.leaves[path] for file in files if path in file.leaves]
    if not all(isinstance(one, torch.Tensor) and one.shape == found[0].shape for one in found):
        return False
    beside = any(
        isinstance(value, StoredShards) and one[:-1] == path[:-1]
        for file in files
        for one, value in file.leaves.items()
    )
    optimizers = {one[: one.index("param_groups")] for file in files for one in file.leaves if "param_groups" in one}
    return beside and not any(path[: len(base)] == base for base in optimizers)
