"""The contents of a checkpoint: tensors as chunks in files, objects, and files with the checksums of their blocks.

An `Index` is built when a checkpoint is committed, or read from `manifest.json` or from stock's `.metadata`. It is
checked when built: the chunks cover each element of their tensors once, and lie inside files of the directory.

The manifest is written last, so its presence means that all other files exist. Its text is one JSON object that ends
with `,"seal":"<sha256 of all bytes before>"}`. It contains no pickle.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
from shardkit.core.checkpoint.leaves import LeafPath, LeftOut, decode_path, encode_path, name_of

BLOCK_BYTES = 2**20
"""Checksum block size; verifying one byte reads its whole block."""

_MAX_NUMEL = 2**56  # torch counts bytes and strides in 63 bits, also for shapes with a 0 in them
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class File:
    """A file of a checkpoint; `blocks` has the checksum of each BLOCK_BYTES of it, None if they are not known."""

    name: str
    nbytes: int
    blocks: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name) or self.name in (".", ".."):
            raise DamagedCheckpointError(f"file name {self.name!r}: expected a plain name inside the checkpoint")
        if self.nbytes < 0 or (self.blocks is not None and len(self.blocks) != -(-self.nbytes // BLOCK_BYTES)):
            raise DamagedCheckpointError(f"{self.name}: {self.nbytes} bytes do not match its number of checksums")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its archive is bytes [offset, offset + length) of a file, its values begin at `values`.

    `values` is None if it has to be looked up in the archive, as in stock's checkpoints.
    """

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as a whole."""

    path: LeafPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectEntry:
    """A value that is not a tensor: bytes of torch.save in a file."""

    path: LeafPath
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint; `order` lists leaves of user and per-rank state whose order is not tensors first.
    Raises DamagedCheckpointError when built from entries that contradict each other.
    """

    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    files: dict[str, File]
    empties: tuple[LeafPath, ...] = ()
    step: int | None = None
    world_size: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
    order: tuple[LeafPath, ...] = ()

    def __post_init__(self) -> None:
        claimed = dict.fromkeys(self.files, 0)
        for name, entry in self.tensors.items():
            if math.prod(max(1, size) for size in entry.shape) > _MAX_NUMEL:
                raise DamagedCheckpointError(f"{name}: no tensor has the shape {entry.shape}")
            for chunk in entry.chunks:
                self._check_range(name, chunk.file, chunk.offset, chunk.length)
                claimed[chunk.file] += chunk.length
                nbytes = chunk.numel * entry.dtype.itemsize
                start = chunk.offset if chunk.values is None else chunk.values
                if start < chunk.offset or start + nbytes > chunk.offset + chunk.length:
                    raise DamagedCheckpointError(
                        f"{name}: the index places a chunk of {nbytes} bytes at {chunk.offsets} in {chunk.length} "
                        f"bytes of {chunk.file}"
                    )
            if problem := coverage_problem(entry.shape, entry.chunks):
                raise DamagedCheckpointError(f"{name}: the chunks of shape {entry.shape} {problem}")
        for name, one in self.objects.items():
            self._check_range(name, one.file, one.offset, one.length)
            claimed[one.file] += one.length
        for name, length in claimed.items():  # otherwise a small file could claim to hold any number of large tensors
            if length > self.files[name].nbytes:
                raise DamagedCheckpointError(
                    f"{name}: the index places {length} bytes in it, but it has {self.files[name].nbytes}"
                )
        both = self.tensors.keys() & self.objects.keys()
        if both:
            raise DamagedCheckpointError(f"{min(both)}: both a tensor and an object")

    def _check_range(self, name: str, file: str, offset: int, length: int) -> None:
        known = self.files.get(file)
        if known is None or offset < 0 or length < 0 or offset + length > known.nbytes:
            size = "is not among the files" if known is None else f"has {known.nbytes} bytes"
            raise DamagedCheckpointError(
                f"{name}: the index places it at bytes {offset} to {offset + length} of {file}, which {size}"
            )

    @functools.cached_property
    def paths(self) -> dict[str, LeafPath]:
        """The path of every entry, by name."""
        tensors = {name: entry.path for name, entry in self.tensors.items()}
        return tensors | {name: one.path for name, one in self.objects.items()}

    def in_order(self, values: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
        """Values by path, in the order in which they were saved if that is known; empty mappings come last."""
        place = dict.fromkeys(self.empties, len(self.order))
        for number, path in enumerate(self.order):
            for end in range(1, len(path) + 1):
                place.setdefault(path[:end], number)
        return dict(sorted(values.items(), key=lambda item: place.get(item[0], -1)))

    def without(self, left_out: LeftOut) -> Index:
        """The index without the entries in `left_out`."""
        if not left_out.keys:
            return self
        return replace(
            self,
            tensors={name: one for name, one in self.tensors.items() if not left_out.has(one.path)},
            objects={name: one for name, one in self.objects.items() if not left_out.has(one.path)},
            empties=tuple(path for path in self.empties if not left_out.has(path)),
            order=tuple(path for path in self.order if not left_out.has(path)),
        )

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


MANIFEST = "manifest.json"

SAVE_ID = "shardkit-checkpoint"
"""In stock's metadata beside it: marks a directory as one of ours even if its manifest is missing."""

_FORMAT, _VERSION = "shardkit-checkpoint", 1
_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}\n')
_SEAL_LENGTH = 76


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    dtype_name(one): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and not re.fullmatch(r"qu?int.*|u?int[1-7]", dtype_name(one))
}
"""Every dtype of torch by name, but for quantized ones, whose scale lies elsewhere, and those of some bits, which torch
2.15 does not copy.
"""


def seal(document: dict[str, Any]) -> bytes:
    """A JSON object with its seal."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=True).encode()[:-1]
    return text + b',"seal":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def sealed_as(end: bytes) -> str | None:
    """The seal at the end of a manifest, None if there is none. Does not verify it."""
    found = _SEAL.fullmatch(end[-_SEAL_LENGTH:])
    return found[1].decode() if found else None


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object. Raises DamagedCheckpointError if any byte differs from the sealed ones."""
    sealed = sealed_as(data)
    if sealed is None:
        raise DamagedCheckpointError(f"{name} ({len(data)} bytes) does not end with a seal: it is truncated or damaged")
    text = data[:-_SEAL_LENGTH]
    if hashlib.sha256(text).hexdigest() != sealed:
        raise DamagedCheckpointError(f"{name} is damaged: its seal does not fit its {len(text)} bytes")
    with damage_of(name, "is not JSON"):
        document = json.loads(text + b"}")
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{name} holds a {type(document).__name__}, expected an object")
    return document


def pack(index: Index, created: str, *beside: File) -> bytes:
    """The manifest of a checkpoint; `beside` lists files that the index does not use."""
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
    """The index in a manifest. Raises DamagedCheckpointError if it is damaged or contradicts itself, CheckpointError if
    this code does not know its version.
    """
    document = unseal(data, name)
    if document.get("format") != _FORMAT:
        raise DamagedCheckpointError(f"{name} is of format {document.get('format')!r}, expected {_FORMAT!r}")
    if document.get("version") != _VERSION or document.get("block_bytes") != BLOCK_BYTES:
        raise CheckpointError(
            f"{name} is of version {document.get('version')!r}, this code reads {_VERSION}; use the newer shardkit"
        )
    with damage_of(name, "is not put together as a manifest"):
        return _index(document)


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
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number should be")
    return value


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
