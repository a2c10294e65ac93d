"""Checkpoints of torch.distributed.checkpoint: read and written piece by piece, without a process group."""

from __future__ import annotations

import io
import math
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

from shardkit.core.checkpoint.stock_metadata import unpickle_metadata
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME
from shardkit.legacy_fsdp_compat.migrate.boxes import Box, parts_of
from shardkit.legacy_fsdp_compat.migrate.left_out import LeftOut
from shardkit.legacy_fsdp_compat.migrate.raw_bytes import archived_tensor
from shardkit.legacy_fsdp_compat.migrate.reading import region_reader
from shardkit.legacy_fsdp_compat.migrate.stored import Checkpoint, CheckpointError, StoredTensor
from shardkit.legacy_fsdp_compat.migrate.torch_files import ALLOWED
from shardkit.legacy_fsdp_compat.migrate.trees import Item, Path_, fill, joined, paths_of, tree_of
from shardkit.legacy_fsdp_compat.torch_compat import StorageInfo, flatten_for_checkpoint

__all__ = ["METADATA", "DcpWriter", "read_dcp"]

METADATA = ".metadata"
_DATA = "__0_0.distcp"


def read_dcp(directory: Path, left_out: LeftOut) -> Checkpoint:
    """A checkpoint directory of torch.distributed.checkpoint; of what is left out nothing is read.

    Raises:
        CheckpointError: for metadata that cannot be read, missing or truncated files, and flat parameters.
    """
    metadata = _read_metadata(directory / METADATA)
    checkpoint = Checkpoint("DCP", [str(directory)])
    paths = metadata.planner_data or {}
    stored: dict[str, list[tuple[MetadataIndex, Any]]] = {}
    for index, info in (metadata.storage_data or {}).items():
        stored.setdefault(index.fqn, []).append((index, info))
    ranks = {info.relative_path for found in stored.values() for _, info in found}
    checkpoint.world_size = max(1, len(ranks))
    leaves: dict[Path_, Any] = {}
    for key, described in metadata.state_dict_metadata.items():
        path = tuple(Item(part) if isinstance(part, int) else part for part in paths.get(key, (key,)))
        if left_out.has(path):
            continue
        if key.rpartition(".")[2] == FLAT_NAME:
            raise CheckpointError(
                f"'{key}' in {directory} is a flat parameter of LOCAL_STATE_DICT, whose padding and order the files of "
                "ranks tell and a torch.distributed.checkpoint does not; load it where it was saved, and save it as "
                "SHARDED_STATE_DICT"
            )
        if isinstance(described, TensorStorageMetadata):
            leaves[path] = _tensor(directory, key, described, stored.get(key, []))
        else:
            leaves[path] = _object(directory, key, stored.get(key, []))
    # Lists without tensors, which the planner has taken apart, become whole again.
    return fill(checkpoint, paths_of(tree_of(leaves)))


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = unpickle_metadata(file.read())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: this is no checkpoint of torch.distributed.checkpoint"
        ) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(f"{path} ({path.stat().st_size} bytes) cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, expected Metadata")
    return metadata


def _tensor(
    directory: Path, key: str, described: TensorStorageMetadata, stored: list[tuple[MetadataIndex, Any]]
) -> StoredTensor:
    shape, dtype = tuple(described.size), described.properties.dtype
    info_at = {tuple(index.offset or ()): info for index, info in stored}
    boxes = []
    for chunk in described.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if not math.prod(sizes):
            continue
        info = info_at.get(offsets)
        if info is None:
            raise CheckpointError(f"'{key}': the metadata lists a part at {offsets} and no file that holds it")
        boxes.append(_box(directory, key, info, offsets, sizes, dtype))
    return StoredTensor(key, dtype, shape, parts_of(key, shape, boxes))


def _box(
    directory: Path, key: str, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> Box:
    path = _data_file(directory, key, info)
    if not path.is_file():
        raise CheckpointError(f"'{key}': its file {path} is missing")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"'{key}': {path} is transformed by {info.transform_descriptors}, which is not supported")
    region = archived_tensor(path, info.offset, info.length)
    if (region.dtype, region.shape) != (dtype, sizes):
        raise CheckpointError(
            f"'{key}': bytes {info.offset} to {info.offset + info.length} of {path} hold a tensor of shape "
            f"{region.shape} and {region.dtype}; the metadata says {sizes} and {dtype}"
        )
    return Box(offsets, sizes, region_reader(path, 0, region), str(path))


def _data_file(directory: Path, key: str, info: Any) -> Path:
    """The file that the metadata names, which must lie in the checkpoint."""
    relative = Path(info.relative_path)
    if relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"'{key}': the metadata names the file {relative}, which lies outside of {directory}")
    return directory / relative


def _object(directory: Path, key: str, stored: list[tuple[MetadataIndex, Any]]) -> Any:
    if not stored:
        raise CheckpointError(f"'{key}': the metadata lists it and no file that holds it")
    info = stored[0][1]
    path = _data_file(directory, key, info)
    with path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"'{key}' in {path} cannot be read: {error}") from error


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
        flat, self._paths = flatten_for_checkpoint(tree_of({**stand_ins, **split}))
        path_of = {id(tensor): path for path, tensor in stand_ins.items()}
        self._key_of = {path_of[id(value)]: key for key, value in flat.items() if id(value) in path_of}
        self._objects = {key: value for key, value in flat.items() if id(value) not in path_of}
        for path, value in whole_objects.items():
            self._objects[joined(path)] = value
            self._paths[joined(path)] = tuple(part.number if isinstance(part, Item) else part for part in path)
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

    def write(self, path: Path_, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]:
        """Writes one tensor; returns its record. Each slab: first and last element, values."""
        stored, name = self._tensors[path], joined(path)
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
            key, chunks = self._key_of[path], self._chunks[joined(path)]
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
            what = "in a tuple" if isinstance(odd[0], Item) else f"below the key {odd[0]!r}, which is no string"
            raise CheckpointError(
                f"'{joined(path)}' is a tensor {what}: a torch.distributed.checkpoint cannot hold it. Convert with "
                "--to full; for optimizer state save names, by FSDP.optim_state_dict"
            )


def _whole_objects(objects: dict[Path_, Any]) -> dict[Path_, Any]:
    """Objects that torch would change by taking them apart (keys that are no strings, empty dicts), as they are."""
    found: dict[Path_, Any] = {}
    below: dict[Path_, dict[Path_, Any]] = {}
    for path, value in objects.items():
        odd = next((number for number, part in enumerate(path) if not isinstance(part, str | Item)), None)
        if odd is not None:
            below.setdefault(path[:odd], {})[path[odd:]] = value
        elif not _survives(value):
            found[path] = value
    return found | {path: tree_of(leaves) for path, leaves in below.items()}


def _survives(value: Any) -> bool:
    if isinstance(value, Mapping):
        keys = all(isinstance(key, str) for key in value)
        return type(value) is dict and bool(value) and keys and all(map(_survives, value.values()))
    return all(map(_survives, value)) if isinstance(value, list) else True


def _lies_in(path: Path_, roots: dict[Path_, Any]) -> bool:
    return any(path[: len(root)] == root for root in roots)
