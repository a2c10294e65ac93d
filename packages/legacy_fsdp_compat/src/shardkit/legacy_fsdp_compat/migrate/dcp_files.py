"""Checkpoints of torch.distributed.checkpoint: read and written piece by piece, without a process group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import At, name_of, unflatten
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.opening import open_index
from shardkit.core.checkpoint.reading import read_objects, stored_tensors
from shardkit.core.checkpoint.stock_metadata import METADATA
from shardkit.core.checkpoint.stored import Checkpoint, paths_of
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME
from shardkit.legacy_fsdp_compat.migrate.left_out import LeftOut
from shardkit.legacy_fsdp_compat.migrate.trees import fill
from shardkit.legacy_fsdp_compat.torch_compat import StorageInfo, flatten_for_checkpoint

__all__ = ["METADATA", "DcpWriter", "read_dcp"]

_DATA = "__0_0.distcp"


def read_dcp(directory: Path, left_out: LeftOut) -> Checkpoint:
    """A checkpoint directory of torch.distributed.checkpoint, or of core; of what is left out nothing is read.

    Raises:
        CheckpointError: for metadata that cannot be read, missing or truncated files, and flat parameters.
    """
    index = open_index(directory, left_out.has)
    for name in index.tensors:
        if name.rpartition(".")[2] == FLAT_NAME and not left_out.has(index.paths[name]):
            raise CheckpointError(
                f"'{name}' in {directory} is a flat parameter of LOCAL_STATE_DICT, whose padding and order the files "
                "of ranks tell and a torch.distributed.checkpoint does not; load it where it was saved, and save it "
                "as SHARDED_STATE_DICT"
            )
    objects = read_objects(directory, index, [name for name in index.objects if not left_out.has(index.paths[name])])
    found = {one.path: one for one in stored_tensors(directory, index) if not left_out.has(one.path)}
    leaves = {
        path: found[path] if path in found else objects[path]
        for path in index.paths.values()
        if path in found or path in objects
    }
    checkpoint = Checkpoint("DCP", [str(directory)], index.world_size or max(1, len(index.files)))
    # Lists without tensors, which the planner has taken apart, become whole again.
    return fill(checkpoint, paths_of(unflatten({**leaves, **{path: {} for path in index.empties}})))


class DcpWriter:
    """Writes slabs of tensors one behind the other into one data file, and the metadata at the end.

    What was written before an interruption stays: a tensor is taken up again by its `Written` record.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint) -> None:
        self._directory = directory
        _check_keys(checkpoint)
        stand_ins = {path: torch.empty(0, device="meta") for path in checkpoint.tensors}
        whole_objects = _whole_objects(checkpoint.objects)
        split = {path: value for path, value in checkpoint.objects.items() if not _lies_in(path, whole_objects)}
        flat, self._paths = flatten_for_checkpoint(unflatten({**stand_ins, **split}))
        path_of = {id(tensor): path for path, tensor in stand_ins.items()}
        self._key_of = {path_of[id(value)]: key for key, value in flat.items() if id(value) in path_of}
        self._objects = {key: value for key, value in flat.items() if id(value) not in path_of}
        for path, value in whole_objects.items():
            self._objects[name_of(path)] = value
            self._paths[name_of(path)] = tuple(part.at if isinstance(part, At) else part for part in path)
        self._chunks: dict[str, list[tuple[list[int], list[int], int, int]]] = {}
        self._tensors = checkpoint.tensors
        self.file = directory / _DATA

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return value

    def begin(self, records: dict[str, Any]) -> None:
        """Takes up what is recorded as written; what lies behind it is dropped."""
        end = max((record["end"] for record in records.values()), default=0)
        with self.file.open("ab") as file:
            file.truncate(end)
        for name, record in records.items():
            self._chunks[name] = [tuple(chunk) for chunk in record["chunks"]]

    def write(self, path: LeafPath, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]:
        """Writes one tensor; returns its record. Each slab: first and last element, values."""
        stored, name = self._tensors[path], name_of(path)
        chunks: list[tuple[list[int], list[int], int, int]] = []
        with self.file.open("ab") as file:
            for low, high, values in slabs:
                first = low // stored.row if stored.numel else 0
                rows = (high - low) // stored.row if stored.numel else 0
                rest = list(stored.shape[1:])
                sizes = ([rows, *rest] if stored.numel else list(stored.shape)) if stored.shape else []
                offsets = [first, *[0] * len(rest)] if stored.shape else []
                start = file.tell()
                torch.save(values.view(sizes), file)
                chunks.append((offsets, sizes, start, file.tell() - start))
            end = file.tell()
        self._chunks[name] = chunks
        return {"end": end, "chunks": chunks}

    def finish(self) -> None:
        """Writes the objects and the metadata."""
        described: dict[str, Any] = {}
        storage: dict[MetadataIndex, Any] = {}
        for path, stored in self._tensors.items():
            key, chunks = self._key_of[path], self._chunks[name_of(path)]
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _, _ in chunks],
            )
            for number, (offsets, _, start, length) in enumerate(chunks):
                index = MetadataIndex(key, torch.Size(offsets), number)
                storage[index] = StorageInfo(_DATA, start, length)
        with self.file.open("ab") as file:
            for key, value in self._objects.items():
                start = file.tell()
                torch.save(value, file)
                described[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = StorageInfo(_DATA, start, file.tell() - start)
        metadata = Metadata(described, planner_data=self._paths, storage_data=storage)
        with (self._directory / METADATA).open("wb") as out:
            pickle.dump(metadata, out)


def _check_keys(checkpoint: Checkpoint) -> None:
    """torch.distributed.checkpoint makes strings of all keys, and tuples of tensors it does not take apart."""
    for path in checkpoint.tensors:
        odd = [part for part in path if not isinstance(part, str) and getattr(part, "of", None) != "list"]
        if odd:
            what = "in a tuple" if isinstance(odd[0], At) else f"below the key {odd[0]!r}, which is no string"
            raise CheckpointError(
                f"'{name_of(path)}' is a tensor {what}: a torch.distributed.checkpoint cannot hold it. Convert with "
                "--to full; for optimizer state save names, by FSDP.optim_state_dict"
            )


def _whole_objects(objects: dict[LeafPath, Any]) -> dict[LeafPath, Any]:
    """Objects that torch would change by taking them apart (keys that are no strings, empty dicts), as they are."""
    found: dict[LeafPath, Any] = {}
    below: dict[LeafPath, dict[LeafPath, Any]] = {}
    for path, value in objects.items():
        odd = next((number for number, part in enumerate(path) if not isinstance(part, str | At)), None)
        if odd is not None:
            below.setdefault(path[:odd], {})[path[odd:]] = value
        elif not _survives(value):
            found[path] = value
    return found | {path: unflatten(leaves) for path, leaves in below.items()}


def _survives(value: Any) -> bool:
    if isinstance(value, Mapping):
        keys = all(isinstance(key, str) for key in value)
        return type(value) is dict and bool(value) and keys and all(map(_survives, value.values()))
    return all(map(_survives, value)) if isinstance(value, list) else True


def _lies_in(path: LeafPath, roots: dict[LeafPath, Any]) -> bool:
    return any(path[: len(root)] == root for root in roots)
