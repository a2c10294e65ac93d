"""Files that each rank wrote for itself: SHARDED (rows of every tensor) and LOCAL (parts of flat tensors)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.legacy_fsdp_compat.migrate.stored import (
    Checkpoint,
    CheckpointError,
    Part,
    StoredTensor,
    joined,
    paths_of,
    range_reader,
    whole,
)
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards, load_torch_file, release_pages

__all__ = ["RankFile", "add_leaf", "read_rank_files", "sharded_checkpoint", "stored_shards"]

_NUMBER = re.compile(r"\d+")

Path_ = tuple[str, ...]


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its leaves by path."""

    path: Path
    rank: int
    leaves: dict[Path_, Any]


def read_rank_files(paths: Iterable[Path]) -> list[RankFile]:
    """Opens the files and finds out which rank wrote which.

    Raises:
        CheckpointError: two files of one rank, a missing rank, or files that list different ranks.
    """
    files = [_open(path, number) for number, path in enumerate(sorted(paths, key=_natural))]
    by_rank: dict[int, RankFile] = {}
    for file in files:
        if file.rank in by_rank:
            raise CheckpointError(f"{by_rank[file.rank].path} and {file.path} are both of rank {file.rank}")
        by_rank[file.rank] = file
    expected = {
        rank
        for file in files
        for value in file.leaves.values()
        if isinstance(value, StoredShards)
        for _, _, rank in value.boxes
    }
    missing = sorted(expected - set(by_rank))
    if missing:
        raise CheckpointError(
            f"the checkpoint was written by ranks {sorted(expected)}, but there is no file of rank "
            f"{', '.join(map(str, missing))} among {[str(file.path) for file in files]}"
        )
    _check_same_step(files)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _open(path: Path, number: int) -> RankFile:
    value = load_torch_file(path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a dict")
    leaves = dict(paths_of(dict(value)))
    own = {rank for leaf in leaves.values() if isinstance(leaf, StoredShards) for _, _, rank in leaf.parts}
    if len(own) > 1:
        raise CheckpointError(f"{path} holds parts of the ranks {sorted(own)}, expected those of one rank")
    numbers = _NUMBER.findall(path.stem)
    return RankFile(path, own.pop() if own else int(numbers[-1]) if numbers else number, leaves)


def _check_same_step(files: list[RankFile]) -> None:
    """An optimizer's step counters, which every rank has, tell files of different steps apart."""
    for path, value in files[0].leaves.items():
        if path[-1] != "step":
            continue
        for file in files[1:]:
            other = file.leaves.get(path)
            if other is not None and float(other) != float(value):
                raise CheckpointError(
                    f"'{joined(path)}' is {float(value):g} in {files[0].path} and {float(other):g} in {file.path}: the "
                    "files are of different steps"
                )


def stored_shards(name: str, files: list[RankFile], path: Path_) -> StoredTensor:
    """A tensor whose rows, or flat parts, lie in the files.

    Raises:
        CheckpointError: files that describe different tensors, or parts that are no whole rows.
    """
    parts, first = [], next(file.leaves[path] for file in files if path in file.leaves)
    dtype = first.dtype
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
        row = math.prod(value.whole[1:])
        for offsets, tensor, _ in value.parts:
            if any(offsets[1:]) or tuple(tensor.shape[1:]) != value.whole[1:]:
                raise CheckpointError(
                    f"'{name}' has a part of shape {tuple(tensor.shape)} at {offsets} in {file.path}; expected whole "
                    f"rows of {value.whole}"
                )
            start = offsets[0] * row
            dtype = tensor.dtype
            if tensor.numel():
                parts.append(
                    Part(start, start + tensor.numel(), range_reader(tensor, start, release_pages), str(file.path))
                )
    return StoredTensor(name, dtype, first.whole, tuple(sorted(parts, key=lambda part: part.start)))


def sharded_checkpoint(files: list[RankFile]) -> Checkpoint:
    """A SHARDED checkpoint of one file a rank.

    Raises:
        CheckpointError: as `stored_shards`, and for plain tensors that differ in shape.
    """
    checkpoint = Checkpoint("SHARDED", [str(file.path) for file in files], len(files))
    for path in dict.fromkeys(path for file in files for path in file.leaves):
        add_leaf(checkpoint, files, path)
    return checkpoint


def add_leaf(checkpoint: Checkpoint, files: list[RankFile], path: Path_) -> None:
    """Puts what the files have at `path` into the checkpoint; of what every rank has, the first file's counts."""
    holder = next(file for file in files if path in file.leaves)
    value = holder.leaves[path]
    if isinstance(value, StoredShards):
        checkpoint.tensors[path] = stored_shards(joined(path), files, path)
    elif isinstance(value, torch.Tensor):
        checkpoint.tensors[path] = whole(joined(path), value, str(holder.path), release_pages)
    else:
        checkpoint.objects[path] = value
