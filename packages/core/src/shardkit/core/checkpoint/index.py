"""What a checkpoint holds and where: tensors as chunks in files, objects, files with the checksums of their blocks.

An `Index` is built when a checkpoint is committed, or read from one: from our manifest, or from stock's `.metadata`. It
has been checked: chunks make up their tensors, each element once, and lie inside files of the directory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.core.checkpoint.errors import DamagedCheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of

__all__ = ["BLOCK_BYTES", "Chunk", "File", "Index", "ObjectEntry", "TensorEntry", "check_coverage"]

BLOCK_BYTES = 2**20
"""The unit of checksums: what has to be read to verify any byte of it."""

_MAX_NUMEL = 2**56  # torch counts bytes and strides in 63 bits, also for shapes with a 0 in them
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class File:
    """A file of a checkpoint; `blocks` has the checksum of each BLOCK_BYTES of it, None if nobody knows them."""

    name: str
    nbytes: int
    blocks: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name) or self.name in (".", ".."):
            raise DamagedCheckpointError(f"file name {self.name!r}: expected a plain name inside the checkpoint")
        if self.nbytes < 0 or (self.blocks is not None and len(self.blocks) != -(-self.nbytes // BLOCK_BYTES)):
            raise DamagedCheckpointError(f"{self.name}: {self.nbytes} bytes do not go with its checksums")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its archive is bytes [offset, offset + length) of a file, its values begin at `values`.

    `values` is None where that has to be looked up in the archive, as in stock's checkpoints.
    """

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: int | None

    @property
    def numel(self) -> int:
        """Elements of the box."""
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
        """Its flat name."""
        return name_of(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectEntry:
    """A value that is no tensor: bytes of torch.save in a file."""

    path: LeafPath
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """Everything in a checkpoint; `order` has leaves of user and per-rank state that do not come tensors first.

    Raises:
        DamagedCheckpointError: when it is built, for entries that contradict each other.
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
                        f"{name}: a chunk of {nbytes} bytes at {chunk.offsets} is said to lie in {chunk.length} bytes "
                        f"of {chunk.file}"
                    )
            check_coverage(name, entry.shape, entry.chunks)
        for name, one in self.objects.items():
            self._check_range(name, one.file, one.offset, one.length)
            claimed[one.file] += one.length
        for name, length in claimed.items():  # or a small file could be said to hold any number of large tensors
            if length > self.files[name].nbytes:
                raise DamagedCheckpointError(
                    f"{name}: {length} bytes are said to lie in it, it has {self.files[name].nbytes}"
                )
        both = self.tensors.keys() & self.objects.keys()
        if both:
            raise DamagedCheckpointError(f"{min(both)}: both a tensor and an object")

    def _check_range(self, name: str, file: str, offset: int, length: int) -> None:
        known = self.files.get(file)
        if known is None or offset < 0 or length < 0 or offset + length > known.nbytes:
            size = "not among the files" if known is None else f"{known.nbytes} bytes long"
            raise DamagedCheckpointError(
                f"{name}: is said to lie in bytes {offset} to {offset + length} of {file}, which is {size}"
            )

    @functools.cached_property
    def paths(self) -> dict[str, LeafPath]:
        """The path of every entry, by name."""
        tensors = {name: entry.path for name, entry in self.tensors.items()}
        return tensors | {name: one.path for name, one in self.objects.items()}

    def in_order(self, values: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
        """Values by path in the order in which they were saved, where that is known; empty mappings come last."""
        place = dict.fromkeys(self.empties, len(self.order))
        for number, path in enumerate(self.order):
            for end in range(1, len(path) + 1):
                place.setdefault(path[:end], number)
        return dict(sorted(values.items(), key=lambda item: place.get(item[0], -1)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


def check_coverage(name: str, shape: Sequence[int], chunks: Sequence[Chunk]) -> None:
    """Raises DamagedCheckpointError unless the chunks make up a tensor of `shape`, each element once."""
    for chunk in chunks:
        if not _is_inside(chunk, shape):
            raise DamagedCheckpointError(
                f"{name}: a chunk of {chunk.sizes} at {chunk.offsets} sticks out of its shape {tuple(shape)}"
            )
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    # Along the dim that is cut most often, few chunks begin before another one ends.
    dim = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}), default=0)
    if shape:
        filled.sort(key=lambda chunk: chunk.offsets[dim])
    covered, whole = sum(math.prod(chunk.sizes) for chunk in filled), math.prod(shape)
    if covered < whole:
        raise DamagedCheckpointError(f"{name}: chunks hold {covered} of its {whole} elements")
    for number, chunk in enumerate(filled):
        end = chunk.offsets[dim] + chunk.sizes[dim] if shape else 0
        for later in range(number + 1, len(filled)):
            other = filled[later]
            if shape and other.offsets[dim] >= end:
                break  # sorted: all that follow begin behind this one
            if _overlap(chunk, other):
                raise DamagedCheckpointError(
                    f"{name}: chunks of {chunk.sizes} at {chunk.offsets} and {other.sizes} at {other.offsets} overlap"
                )


def _is_inside(chunk: Chunk, shape: Sequence[int]) -> bool:
    if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
        return False
    for low, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True):  # a loop, as there may be many chunks
        if low < 0 or size < 0 or low + size > whole:
            return False
    return True


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        max(a, b) < min(a + a_size, b + b_size)
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
