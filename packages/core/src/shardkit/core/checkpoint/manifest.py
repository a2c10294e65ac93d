"""`manifest.json`: what a checkpoint holds, sealed. It is written last, so its presence says that all else is there.

The text is one JSON object that ends with `,"seal":"<sha256 of all bytes before>"}`. There is no pickle in it, and
every number in it is checked against the files (`index.py`) before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES, Chunk, File, Index, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import At, LeafPath, name_of

__all__ = [
    "DTYPES",
    "MANIFEST",
    "SAVE_ID",
    "decode_path",
    "dtype_name",
    "encode_path",
    "pack",
    "seal",
    "sealed_as",
    "unpack",
    "unseal",
]

MANIFEST = "manifest.json"

SAVE_ID = "shardkit-checkpoint"
"""In stock's metadata beside it: says of a directory that it has a manifest, or has lost it."""

_FORMAT, _VERSION = "shardkit-checkpoint", 1
_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}\n')
_SEAL_LENGTH = 100

DTYPES: dict[str, torch.dtype] = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}
"""Every dtype of torch by name."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def encode_path(path: LeafPath) -> list[Any]:
    """A path as JSON: a key is a string, a place in a list a number, a key that is a number a list of it."""
    return [part.at if isinstance(part, At) else [part] if isinstance(part, int) else part for part in path]


def decode_path(value: Any) -> LeafPath:
    """The path that `encode_path` encoded. Raises ValueError for anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"path {value!r}")
    return tuple(_decode_part(part) for part in value)


def _decode_part(part: Any) -> str | int | At:
    if isinstance(part, str):
        return part
    if _is_number(part):
        return At(part)
    if isinstance(part, list) and len(part) == 1 and type(part[0]) is int:
        return int(part[0])
    raise ValueError(f"part {part!r} of a path")


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def seal(document: dict[str, Any]) -> bytes:
    """A JSON object with its seal."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=True).encode()[:-1]
    return text + b',"seal":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def sealed_as(end: bytes) -> str | None:
    """The seal that a manifest ends with, None if it ends with none; nothing is verified."""
    found = _SEAL.search(end, max(0, len(end) - _SEAL_LENGTH))
    return found[1].decode() if found and found.end() == len(end) else None


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object.

    Raises:
        DamagedCheckpointError: if a byte of it is not what was sealed.
    """
    found = _SEAL.search(data, max(0, len(data) - _SEAL_LENGTH))
    if found is None or found.end() != len(data):
        raise DamagedCheckpointError(f"{name} ({len(data)} bytes) does not end with a seal: it is truncated or damaged")
    text = data[: found.start()]
    if hashlib.sha256(text).hexdigest().encode() != found[1]:
        raise DamagedCheckpointError(f"{name} is damaged: its seal does not fit its {len(text)} bytes")
    try:
        document = json.loads(text + b"}")
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{name} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{name} holds a {type(document).__name__}, expected an object")
    return document


def pack(index: Index, created: str, *beside: File) -> bytes:
    """The manifest of a checkpoint; `beside` are files that nothing in the index lies in."""
    numbers = {name: number for number, name in enumerate(index.files)}
    tensors = [
        [
            encode_path(entry.path),
            dtype_name(entry.dtype),
            entry.shape,
            [[numbers[c.file], c.offset, c.length, c.values, c.offsets, c.sizes] for c in entry.chunks],
        ]
        for entry in index.tensors.values()
    ]
    objects = [[encode_path(one.path), numbers[one.file], one.offset, one.length] for one in index.objects.values()]
    return seal(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": index.step,
            "world_size": index.world_size,
            "created": created,
            "torch": torch.__version__,
            "info": index.info,
            "block_bytes": BLOCK_BYTES,
            "files": [[file.name, file.nbytes, file.blocks] for file in (*index.files.values(), *beside)],
            "tensors": tensors,
            "objects": objects,
            "empties": [encode_path(path) for path in index.empties],
            "order": [encode_path(path) for path in index.order],
        }
    )


def unpack(data: bytes, name: str) -> Index:
    """The index in a manifest.

    Raises:
        DamagedCheckpointError: if it is damaged, or contradicts itself.
        CheckpointError: if it is of a version that this code does not know.
    """
    document = unseal(data, name)
    if document.get("format") != _FORMAT:
        raise DamagedCheckpointError(f"{name} is of format {document.get('format')!r}, expected {_FORMAT!r}")
    if document.get("version") != _VERSION or document.get("block_bytes") != BLOCK_BYTES:
        raise CheckpointError(
            f"{name} is of version {document.get('version')!r}, this code reads {_VERSION}; use the newer shardkit"
        )
    try:
        return _index(document)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{name}: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise DamagedCheckpointError(f"{name} is not put together as a manifest: {error!r}") from error


def _index(document: dict[str, Any]) -> Index:
    files = [
        File(str(name), _whole(nbytes), None if blocks is None else tuple(map(str, blocks)))
        for name, nbytes, blocks in document["files"]
    ]
    names = [file.name for file in files]
    step, world_size, info = document["step"], document["world_size"], document["info"]
    if not isinstance(info, dict):
        raise ValueError(f"info {info!r}")
    tensors = [
        TensorEntry(
            decode_path(path),
            DTYPES[dtype],
            _sizes(shape),
            tuple(
                Chunk(
                    names[_whole(file)],
                    _whole(offset),
                    _whole(length),
                    _sizes(offsets),
                    _sizes(sizes),
                    None if values is None else _whole(values),
                )
                for file, offset, length, values, offsets, sizes in chunks
            ),
        )
        for path, dtype, shape, chunks in document["tensors"]
    ]
    objects = [
        ObjectEntry(decode_path(path), names[_whole(file)], _whole(offset), _whole(length))
        for path, file, offset, length in document["objects"]
    ]
    return Index(
        _by_name((entry.name, entry) for entry in tensors),
        _by_name((name_of(one.path), one) for one in objects),
        _by_name((file.name, file) for file in files),
        tuple(decode_path(path) for path in document["empties"]),
        None if step is None else _whole(step),
        None if world_size is None else _whole(world_size),
        info,
        tuple(decode_path(path) for path in document.get("order", [])),
    )


def _whole(value: Any) -> int:
    if not _is_number(value):
        raise ValueError(f"{value!r} where a whole number should be")
    return int(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise ValueError(f"{value!r} where sizes should be")
    return tuple(map(_whole, value))


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found
