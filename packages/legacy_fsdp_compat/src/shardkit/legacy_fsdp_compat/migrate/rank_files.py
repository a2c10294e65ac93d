"""Files that each rank wrote for itself: SHARDED (rows of every tensor) and LOCAL (parts of flat tensors)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, LeftOut, name_of
from shardkit.core.checkpoint.stored import Checkpoint, Part, StoredTensor, mapped_reader, paths_of, whole
from shardkit.core.checkpoint.torch_files import load_torch_file
from shardkit.legacy_fsdp_compat.migrate.shards import ALLOWED, Box, StoredShards, parts_of, without_mesh


@dataclass(frozen=True)
class RankFile:
    """One rank's file."""

    path: Path  # of the file
    rank: int  # its number among the files, which are in rank order
    leaves: dict[LeafPath, Any]  # what it holds, by path


def read_rank_files(paths: Iterable[Path], left_out: LeftOut) -> list[RankFile]:
    """Opens the files, without what is left out, and finds out which rank wrote which. Of a hybrid run, whose shard
    groups hold the same, those of the first group count. Raises CheckpointError for two files of one rank, a missing
    rank, or files of different steps.
    """
    files = [_open(path, number, left_out) for number, path in enumerate(sorted(paths, key=_natural))]
    by_rank: dict[int, RankFile] = {}
    for file in files:
        if file.rank in by_rank:
            raise CheckpointError(f"{by_rank[file.rank].path} and {file.path} are both of rank {file.rank}")
        by_rank[file.rank] = file
    _check_same_step(files)
    in_order = [file for _, file in sorted(by_rank.items())]
    found = _shard_groups(in_order) or [frozenset()]
    group, members = found[0], in_order
    if len(found) > 1:  # of one group alone also ranks that hold nothing
        members = [file for file in in_order if _ranks_beside(file) & group]
    missing = sorted(group - {file.rank for file in members})
    if missing:
        raise CheckpointError(
            f"the checkpoint was written by ranks {sorted(group)}, but there is no file of rank "
            f"{', '.join(map(str, missing))} among {[str(file.path) for file in files]}"
        )
    return [RankFile(file.path, number, file.leaves) for number, file in enumerate(members)]


def _shard_groups(files: list[RankFile]) -> list[frozenset[int]]:
    """Ranks that share tensors, in order of the first files. Data and tensor parallelism share some over one axis of
    their mesh and others over both.
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
    """The ranks that hold something of what the file has a part of."""
    shards = (value for value in file.leaves.values() if isinstance(value, StoredShards))
    return frozenset(rank for value in shards for _, _, rank in value.boxes)


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def leaves_of_file(path: Path) -> dict[LeafPath, Any]:
    """What a file of torch.save holds, by path; its tensors are mapped. Raises CheckpointError for anything but a dict
    with something in it.
    """
    value = load_torch_file(path, ALLOWED)
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{path} holds a {type(value).__name__}: {value!r:.40}; expected a dict with something")
    try:
        found = {
            key: without_mesh(name_of(key), leaf, path) if isinstance(leaf, DTensor) else leaf
            for key, leaf in paths_of(dict(value))
        }
    except CheckpointError:
        raise
    except Exception as error:  # DTensors that were put together by hand fail in any way
        raise DamagedCheckpointError(f"{path} holds DTensors that are damaged: {error}") from error
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
        raise CheckpointError(f"{path} holds parts of the ranks {sorted(own)}, expected those of one rank")
    numbers = re.findall(r"\d+", path.stem)
    return RankFile(path, own.pop() if own else int(numbers[-1]) if numbers else number, leaves)


def _check_same_step(files: list[RankFile]) -> None:
    """An optimizer's step counters, which every rank has, tell files of different steps apart."""
    for path, value in files[0].leaves.items():
        if path[-1] != "step" or not _is_number(value):
            continue
        for file in files[1:]:
            other = file.leaves.get(path)
            if _is_number(other) and float(other) != float(value):
                raise CheckpointError(
                    f"'{name_of(path)}' is {float(value):g} in {files[0].path} and {float(other):g} in {file.path}: "
                    "the files are of different steps"
                )


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta
    return isinstance(value, int | float)


def stored_shards(name: str, files: list[RankFile], path: LeafPath, notes: list[str] | None = None) -> StoredTensor:
    """A tensor whose boxes, or flat parts, lie in the files. A box that ranks of several groups have, which share
    nothing else of the tensor, is taken from the first of them; where others differ, that is added to the notes. Raises
    CheckpointError for files that describe different tensors, or parts that do not make up one.
    """
    found = [value for file in files if isinstance(value := file.leaves.get(path), StoredShards)]
    if not found:
        raise CheckpointError(f"'{name}' is not a ShardedTensor in {files[0].path} or another file; expected its parts")
    first = found[0]
    dtype = first.dtype
    boxes: list[Box] = []
    holders: dict[tuple[tuple[int, ...], torch.Size], tuple[frozenset[int], Box]] = {}
    for file in files:
        value = file.leaves.get(path)
        if not isinstance(value, StoredShards):
            raise CheckpointError(
                f"'{name}' is {'missing' if value is None else type(value).__name__} in {file.path}, but a "
                f"ShardedTensor of shape {first.whole} in another file"
            )
        if value.whole != first.whole:
            raise CheckpointError(
                f"'{name}' has shape {value.whole} in {file.path} and {first.whole} in {files[0].path}; are these "
                "files of one checkpoint?"
            )
        group = frozenset(rank for _, _, rank in value.boxes)
        for offsets, tensor, _ in value.parts:
            dtype = tensor.dtype
            box = Box(offsets, tuple(tensor.shape), mapped_reader(name, tensor, 0, str(file.path)), str(file.path))
            known, other = holders.setdefault((offsets, tensor.shape), (group, box))
            if other is box or known & group:
                boxes.append(box)
            elif notes is not None and not _alone(box, dtype).same_values(_alone(other, dtype)):
                notes.append(f"'{name}' differs between {other.file} and {box.file}; taken from the first")
    return StoredTensor(path, dtype, first.whole, parts_of(name, first.whole, boxes))


def _alone(box: Box, dtype: torch.dtype) -> StoredTensor:
    """A box as a tensor of its own."""
    numel = math.prod(box.sizes)
    return StoredTensor((box.file,), dtype, box.sizes, (Part(0, numel, box.read, box.file),) if numel else ())


def sharded_checkpoint(files: list[RankFile]) -> Checkpoint:
    """A SHARDED checkpoint of one file a rank. Raises CheckpointError as `stored_shards`, for plain tensors that
    differ, and for files that are of no ranks.
    """
    if not any(isinstance(leaf, StoredShards) for file in files for leaf in file.leaves.values()):
        # Files without sharded tensors are of ranks that have everything, or of no ranks: weights and optimizer apart.
        for other in files[1:]:
            odd = [name_of(path) for path in files[0].leaves.keys() ^ other.leaves.keys()]
            if odd:
                raise CheckpointError(
                    f"{files[0].path} and {other.path} hold no ShardedTensors or DTensors, and {len(odd)} keys, such "
                    f"as '{odd[0]}', are in one of them only: they are no files of ranks. Convert each by itself"
                )
    checkpoint = Checkpoint("SHARDED", [str(file.path) for file in files], len(files))
    for path in dict.fromkeys(path for file in files for path in file.leaves):
        add_leaf(checkpoint, files, path)
    return checkpoint


def add_leaf(checkpoint: Checkpoint, files: list[RankFile], path: LeafPath) -> None:
    """Puts what the files have at `path` into the checkpoint. Raises CheckpointError for a value that is not cut, and
    differs from rank to rank. Of buffers the first rank's counts then, as in FSDP1's own FULL state dicts, and a note
    says so.
    """
    if any(isinstance(file.leaves.get(path), StoredShards) for file in files):
        checkpoint.tensors[path] = stored_shards(name_of(path), files, path, checkpoint.notes)
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
    """Compares what the files have at `path`, to the last byte. Raises CheckpointError if two of them differ."""
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
    """Whether a plain tensor stands beside sharded ones, all ranks' of one shape, and outside of an optimizer."""
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
