"""Weights for others: safetensors in the layout of Hugging Face, or one file of torch.save. Streamed, offline."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.archive import storages_in
from shardkit.core.checkpoint.directory import sync_directory
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import unflatten
from shardkit.core.checkpoint.memory import memory_of
from shardkit.core.checkpoint.rewriting import FileWriter
from shardkit.core.checkpoint.sources import HF_INDEX, SAFETENSORS_DTYPES
from shardkit.core.checkpoint.stored import StoredTensor

__all__ = ["export_safetensors", "export_torch", "renamed"]

_SAFETENSORS = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def export_safetensors(target: Path, tensors: Sequence[StoredTensor], file_bytes: int) -> None:
    """Writes a directory: `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index.

    At most 32 MiB of a tensor, or one row of it, are in memory. The target appears when everything is on disk.

    Args:
        target: must not exist.
        tensors: under the names that they get there.
        file_bytes: values in a file at most, but for a tensor that is larger by itself.

    Raises:
        CheckpointError: if the target exists, or for a dtype that safetensors has not.
    """
    for one in tensors:
        if one.dtype not in _SAFETENSORS:
            raise CheckpointError(f"{one.name} has dtype {one.dtype}, which safetensors has not; export to torch")
    groups: list[list[StoredTensor]] = [[]]
    for one in tensors:
        if groups[-1] and sum(other.nbytes for other in groups[-1]) + one.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(one)

    def write(directory: Path) -> None:
        if len(groups) == 1:
            _write_safetensors(directory / "model.safetensors", groups[0])
            return
        weight_map = {}
        for number, group in enumerate(groups, start=1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            _write_safetensors(directory / name, group)
            weight_map.update(dict.fromkeys((one.name for one in group), name))
        total = sum(one.nbytes for one in tensors)
        with FileWriter(directory / HF_INDEX) as file:
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            file.write(text.encode())

    _appear(target, write, directory=True)


def _write_safetensors(path: Path, tensors: Sequence[StoredTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in tensors:
        header[one.name] = {
            "dtype": _SAFETENSORS[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.nbytes],
        }
        at += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with FileWriter(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors:
            for slab in one.slabs():
                file.write(memory_of(slab))


def export_torch(target: Path, tensors: Sequence[StoredTensor], objects: Mapping[LeafPath, Any], about: Index) -> None:
    """Writes what torch.save would write for the nested state: one file, filled in slab by slab.

    Args:
        target: must not exist.
        tensors: by slabs.
        objects: other values, by path.
        about: whose order and empty mappings to take.

    Raises:
        CheckpointError: if the target exists.
    """

    def write(path: Path) -> None:
        # Memory that is never touched is never there: these tensors only have sizes.
        empty = {one.path: torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in tensors}
        state = unflatten(about.in_order({**empty, **objects}), about.empties)
        path.open("xb").close()  # a file or link that is there already belongs to someone else
        with torch.serialization.skip_data():
            torch.save(state, path)
        with path.open("r+b") as file:
            places = storages_in(file, 0, path.stat().st_size, str(path))
            stored = {id(empty[one.path]): one for one in tensors}
            # torch.save numbers storages in the order in which it meets them.
            for number, tensor in enumerate(_tensors_in(state)):
                if id(tensor) not in stored:
                    raise CheckpointError("an object of the checkpoint holds tensors; they go into no single file")
                file.seek(places[str(number)][0])
                for slab in stored[id(tensor)].slabs():
                    file.write(memory_of(slab))
            file.flush()
            os.fsync(file.fileno())

    _appear(target, write, directory=False)


def _tensors_in(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    below = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for one in below for tensor in _tensors_in(one)]


def _appear(target: Path, write: Callable[[Path], None], *, directory: bool) -> None:
    """Has `write` fill a path beside the target, and renames that when it is complete."""
    if target.exists():
        raise CheckpointError(f"{target} exists; it would be overwritten: remove it, or choose another place")
    partial = target.with_name(f".{target.name}.{os.getpid()}.incomplete")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        if directory:
            partial.mkdir()
        write(partial)
        if directory:
            sync_directory(partial)
        partial.rename(target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise


def renamed(tensors: Sequence[StoredTensor], prefix: str) -> list[StoredTensor]:
    """The tensors whose names begin with `prefix`, without it and under flat names."""
    return [replace(one, path=(one.name.removeprefix(prefix),)) for one in tensors if one.name.startswith(prefix)]
