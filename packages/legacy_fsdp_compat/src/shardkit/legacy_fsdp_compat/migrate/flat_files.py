"""Single files whose layout is known before any value is: safetensors, and torch.save's archive."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.archive import storages_in
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import At, name_of, unflatten
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.memory import memory_of
from shardkit.core.checkpoint.sources import SAFETENSORS_DTYPES, mapped_safetensors
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.core.checkpoint.strided import whole
from shardkit.legacy_fsdp_compat.migrate.left_out import LeftOut
from shardkit.legacy_fsdp_compat.migrate.trees import places_of

__all__ = ["SafetensorsWriter", "TorchFileWriter", "read_safetensors"]

_DTYPES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_PATHS, _OBJECTS = "shardkit.paths", "shardkit.objects"


def read_safetensors(path: Path, left_out: LeftOut) -> Checkpoint:
    """A safetensors file, without what is left out; one that was written here has paths and objects too.

    Raises:
        CheckpointError: for a file that is none, is truncated, or has an unknown dtype.
    """
    try:
        tensors, notes = mapped_safetensors(path)
        paths = {name: _decoded(found) for name, found in json.loads(notes.get(_PATHS, "{}")).items()}
        objects = {_decoded(found): value for found, value in json.loads(notes.get(_OBJECTS, "[]"))}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    checkpoint = Checkpoint("safetensors", [str(path)], objects=dict(left_out.rest(objects)))
    for name, tensor in tensors.items():
        place = paths.get(name, (name,))
        if not left_out.has(place):
            checkpoint.tensors[place] = whole(place, tensor, str(path))
    return checkpoint


def _encoded(path: LeafPath) -> list[Any]:
    return [{part.of: part.at} if isinstance(part, At) else part for part in path]


def _decoded(path: Any) -> LeafPath:
    """The path that `_encoded` encoded; raises ValueError for anything else."""
    if not isinstance(path, list) or not path:
        raise ValueError(f"path {path!r}")
    return tuple(_decoded_part(part) for part in path)


def _decoded_part(part: Any) -> str | int | At:
    if type(part) in (str, int):
        return part  # type: ignore[no-any-return]
    ((of, at),) = part.items()
    if of not in ("list", "tuple") or type(at) is not int or at < 0:
        raise ValueError(f"part {part!r} of a path")
    return At(at, of)


class _RegionWriter:
    """Writes each tensor where the layout has its place; a place that was written stays written."""

    file: Path
    _offsets: dict[str, int]

    def begin(self, records: dict[str, Any]) -> None:
        """Lays the file out, unless there is one with records in it."""
        if not records or not self.file.exists():
            self._lay_out()
        self._offsets = self._find_offsets()

    def _lay_out(self) -> None:
        raise NotImplementedError

    def _find_offsets(self) -> dict[str, int]:
        raise NotImplementedError

    def write(self, path: LeafPath, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]:
        """Writes one tensor; returns its record."""
        offset = self._offsets[name_of(path)]
        with self.file.open("r+b") as file:
            for low, _, values in slabs:
                file.seek(offset + low * values.element_size())
                file.write(memory_of(values))
        return {"offset": offset}

    def finish(self) -> None:
        """The file is complete once every tensor is written."""


class SafetensorsWriter(_RegionWriter):
    """`model.safetensors`, with paths and objects as JSON in its metadata.

    Raises:
        CheckpointError: for objects that JSON has no place for.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint) -> None:
        self.file = directory / "model.safetensors"
        header: dict[str, Any] = {"__metadata__": _notes(checkpoint)}
        at = 0
        self._starts: dict[str, int] = {}
        for path, stored in checkpoint.tensors.items():
            if stored.dtype not in _DTYPES:
                raise CheckpointError(f"'{name_of(path)}' has dtype {stored.dtype}, which safetensors has not")
            self._starts[name_of(path)] = at
            header[name_of(path)] = {
                "dtype": _DTYPES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [at, at + stored.nbytes],
            }
            at += stored.nbytes
        text = json.dumps(header).encode()
        self._head = struct.pack("<Q", -(-len(text) // 8) * 8) + text.ljust(-(-len(text) // 8) * 8)
        self._size = len(self._head) + at

    def _lay_out(self) -> None:
        with self.file.open("wb") as file:
            file.write(self._head)
            file.truncate(self._size)

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return _as_json(value)

    def _find_offsets(self) -> dict[str, int]:
        return {name: len(self._head) + start for name, start in self._starts.items()}


def _notes(checkpoint: Checkpoint) -> dict[str, str]:
    notes = {"format": "pt"}
    for path in (*checkpoint.tensors, *checkpoint.objects):
        odd = [part for part in path if type(part) not in (str, int, At)]
        if odd:
            raise CheckpointError(f"'{name_of(path)}' lies below the key {odd[0]!r}, which JSON has no place for")
    if any(len(path) > 1 or path[0] != name_of(path) for path in checkpoint.tensors):
        notes[_PATHS] = json.dumps({name_of(path): _encoded(path) for path in checkpoint.tensors})
    for path, value in checkpoint.objects.items():
        try:
            kept = repr(json.loads(json.dumps(value))) == repr(_as_json(value))
        except (TypeError, ValueError):
            kept = False
        if not kept:
            raise CheckpointError(
                f"'{name_of(path)}' is {value!r:.60}, and safetensors holds no objects but what JSON has; convert "
                "to dcp or full"
            )
    if checkpoint.objects:
        notes[_OBJECTS] = json.dumps([[_encoded(path), value] for path, value in checkpoint.objects.items()])
    return notes


def _as_json(value: Any) -> Any:
    """With lists for tuples, which JSON has not."""
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return {key: _as_json(one) for key, one in value.items()} if isinstance(value, dict) else value


class TorchFileWriter(_RegionWriter):
    """`checkpoint.pt`: what torch.save writes for the whole checkpoint, filled in piece by piece."""

    def __init__(self, directory: Path, checkpoint: Checkpoint) -> None:
        self.file = directory / "checkpoint.pt"
        self._checkpoint = checkpoint

    def _lay_out(self) -> None:
        # Memory that is never touched is never there: these tensors only have sizes, and skip_data writes no values.
        empty = {path: torch.empty(one.shape, dtype=one.dtype) for path, one in self._checkpoint.tensors.items()}
        with torch.serialization.skip_data():
            torch.save(unflatten({**empty, **self._checkpoint.objects}), self.file)

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return value

    def _find_offsets(self) -> dict[str, int]:
        found = _storages(self.file)
        # torch.save numbers storages in the order in which it meets them.
        return {name_of(path): found[str(number)][0] for number, path in enumerate(places_of(self._checkpoint))}


def _storages(file: Path) -> dict[str, tuple[int, int]]:
    with file.open("rb") as opened:
        return storages_in(opened, 0, file.stat().st_size, str(file))
