"""Safetensors files: read with the library, written tensor by tensor into places that are known before any value is."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import At, LeafPath, LeftOut, decode_path, encode_path, name_of
from shardkit.core.checkpoint.stored import Checkpoint, Slab, StoredTensor, memory_of, whole

__all__ = ["HF_INDEX", "SAFETENSORS_DTYPES", "SafetensorsWriter", "mapped_safetensors", "read_safetensors"]

HF_INDEX = "model.safetensors.index.json"

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_DTYPES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_PATHS, _OBJECTS = "shardkit.leaves", "shardkit.values"


def mapped_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, mapped, and the texts in its metadata.

    Raises:
        ImportError: without `safetensors`.
        ValueError: for a dtype that torch has not.
        DamagedCheckpointError: for a file whose header is damaged, or does not fit it.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package safetensors; run: pip install 'shardkit-core[safetensors]'"
        ) from error
    try:
        # Any: the package is not annotated.
        opened: Any = safe_open(str(path), framework="pt")
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            kind = opened.get_slice(name).get_dtype()
            if kind not in SAFETENSORS_DTYPES:
                raise ValueError(f"{name}: dtype {kind} in {path}, expected one of {', '.join(SAFETENSORS_DTYPES)}")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path} ({path.stat().st_size} bytes) is damaged: {error}") from error
    return tensors, opened.metadata() or {}


def read_safetensors(path: Path, left_out: LeftOut) -> Checkpoint:
    """A safetensors file, without what is left out; one that was written here has paths and objects too.

    Raises:
        CheckpointError: for a file that is none, is truncated, or has an unknown dtype.
    """
    try:
        tensors, notes = mapped_safetensors(path)
        paths = {name: decode_path(found) for name, found in json.loads(notes.get(_PATHS, "{}")).items()}
        objects = {decode_path(found): value for found, value in json.loads(notes.get(_OBJECTS, "[]"))}
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


class SafetensorsWriter:
    """`model.safetensors`, or `model-00001-of-0000N.safetensors` with an index as Hugging Face has it.

    Paths and objects, where there are some, are JSON in the metadata of the first file.

    Args:
        directory: gets the files.
        checkpoint: what they hold.
        file_bytes: values in a file at most, but for a tensor that is larger by itself; None for one file.

    Raises:
        CheckpointError: for dtypes that safetensors has not, and objects that JSON has no place for.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, file_bytes: int | None = None) -> None:
        for path, one in checkpoint.tensors.items():
            if one.dtype not in _DTYPES:
                raise CheckpointError(
                    f"'{name_of(path)}' has dtype {one.dtype}, which safetensors has not; write a file of torch.save"
                )
        groups = _shared_out(checkpoint, file_bytes)
        count = len(groups)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = [directory / name for name in (names if count > 1 else ["model.safetensors"])]
        self.file = files[0]
        self._heads: dict[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for file, group in zip(files, groups, strict=True):
            self._lay_out(file, group, _notes(checkpoint) if file == self.file else {"format": "pt"})

    def _lay_out(self, file: Path, group: dict[str, StoredTensor], notes: dict[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": notes}
        at = 0
        for name, one in group.items():
            end = at + one.nbytes
            header[name] = {"dtype": _DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [at, end]}
            self._places[name] = (file, at)
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._heads[file] = struct.pack("<Q", len(text)) + text
        self._sizes[file] = at

    def begin(self, records: dict[str, Any]) -> None:
        """Makes the files, unless there are some with records in them."""
        for file, head in (
            reversed(self._heads.items()) if not records else ()
        ):  # the first one last: then all are there
            with file.open("wb") as opened:
                opened.write(head)
                opened.truncate(len(head) + self._sizes[file])

    def write(self, path: LeafPath, slabs: Iterator[Slab]) -> dict[str, Any]:
        """Writes one tensor; its place stays written."""
        file, start = self._places[name_of(path)]
        with file.open("r+b") as opened:
            opened.seek(len(self._heads[file]) + start)
            for _, _, values in slabs:
                opened.write(memory_of(values))
        return {}

    def finish(self) -> None:
        """Writes the index, if there are several files."""
        if len(self._heads) > 1:
            names = {name: file.name for name, (file, _) in self._places.items()}
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": names}
            (self.file.parent / HF_INDEX).write_text(json.dumps(index, indent=2))

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return _as_json(value)


def _shared_out(checkpoint: Checkpoint, file_bytes: int | None) -> list[dict[str, StoredTensor]]:
    groups: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for path, one in checkpoint.tensors.items():
        if file_bytes is not None and groups[-1] and filled + one.nbytes > file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name_of(path)] = one
        filled += one.nbytes
    return groups


def _notes(checkpoint: Checkpoint) -> dict[str, str]:
    notes = {"format": "pt"}
    for path in (*checkpoint.tensors, *checkpoint.objects):
        odd = [part for part in path if type(part) not in (str, int, At)]
        if odd:
            raise CheckpointError(f"'{name_of(path)}' lies below the key {odd[0]!r}, which JSON has no place for")
    if any(len(path) > 1 or path[0] != name_of(path) for path in checkpoint.tensors):
        notes[_PATHS] = json.dumps({name_of(path): encode_path(path) for path in checkpoint.tensors})
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
        notes[_OBJECTS] = json.dumps([[encode_path(path), value] for path, value in checkpoint.objects.items()])
    return notes


def _as_json(value: Any) -> Any:
    """With lists for tuples, which JSON has not."""
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return {key: _as_json(one) for key, one in value.items()} if isinstance(value, dict) else value
