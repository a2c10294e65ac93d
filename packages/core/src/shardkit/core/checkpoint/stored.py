"""Tensors that lie in files, whole or in parts, and are read by ranges: nothing here holds a whole tensor.

Every offline conversion streams from these, whatever format they come from.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import LeafPath, name_of, unflatten, walk

__all__ = ["CHUNK_BYTES", "Checkpoint", "Part", "Read", "Slab", "StoredTensor", "paths_of"]

CHUNK_BYTES = 32 * 2**20
"""How much of a tensor is in memory at a time; a row that is longer is read whole."""

Read = Callable[[int, int], torch.Tensor]

Slab = tuple[int, int, torch.Tensor]
"""First and last element of a range of a tensor, and its values."""


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a tensor in row-major order.

    `read(low, high)` gives elements low to high of the *tensor*, a 1-D copy; both lie within the part. They come from
    `file`, and from `others` where several hold them beside each other.
    """

    start: int
    stop: int
    read: Read
    file: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, put together from parts.

    Raises:
        CheckpointError: if the parts do not make up the tensor, each element once.
    """

    path: LeafPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        at = 0
        for part in self.parts:
            if part.start != at:
                what = "lacks" if part.start > at else "has twice"
                low, high = sorted((at, part.start))
                raise CheckpointError(
                    f"'{self.name}' of shape {self.shape}: the checkpoint {what} elements {low} to {high} (next to "
                    f"{part.file}); is a rank's file missing, or are there files of several checkpoints?"
                )
            at = part.stop
        if at != self.numel:
            files = sorted({part.file for part in self.parts})
            raise CheckpointError(
                f"'{self.name}' of shape {self.shape} has {self.numel} elements, the files {files} hold {at} of them; "
                "is the last ranks' file missing?"
            )

    @property
    def name(self) -> str:
        """Its flat name."""
        return name_of(self.path)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Elements of one index of dim 0; all of a 0-dim tensor."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows of dim 0; a 0-dim tensor is one."""
        return self.shape[0] if self.shape else 1

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high), 1-D."""
        pieces = [
            part.read(max(low, part.start), min(high, part.stop))
            for part in self.parts
            if max(low, part.start) < min(high, part.stop)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)

    def same_values(self, other: StoredTensor) -> bool:
        """Whether both have one shape, one dtype, and the same bytes."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        return all(
            torch.equal(self.read(low, high).view(torch.uint8), other.read(low, high).view(torch.uint8))
            for low, high in self.ranges()
        )

    def ranges(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of elements that make up rows [first, stop), all by default: whole rows, each of about CHUNK_BYTES."""
        row = self.row
        step = row * max(1, CHUNK_BYTES // max(1, row * self.dtype.itemsize))
        end = (self.rows if stop is None else stop) * row
        for low in range(first * row, end, max(1, step)):
            yield low, min(low + step, end)

    def slabs(self, first: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """The values of rows [first, stop), in 1-D tensors of the same sizes."""
        for low, high in self.ranges(first, stop):
            yield self.read(low, high)


def paths_of(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """The leaves of a state that is converted: tensors, empty dicts, and everything that holds no tensors and
    is no plain dict: a Counter stays a Counter.
    """
    return walk(value, _is_taken_apart, path)


def _is_taken_apart(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return bool(value)
    return (isinstance(value, Mapping) or type(value) in (list, tuple)) and _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor | StoredTensor)


@dataclass
class Checkpoint:
    """What a source holds.

    Attributes:
        kind: "FULL", "SHARDED", "LOCAL", "DCP" or "safetensors".
        files: what it was read from.
        world_size: ranks that wrote it; 1 for one file.
        tensors: by path, the keys that lead to it: ("model", "0.weight"), ("optim", "state", "0.weight", "exp_avg").
        objects: everything else, by path.
        notes: what the user should know about how it was read.
        config: of LOCAL files how the model is wrapped, as `--config` takes it.
        about: of a directory its step, world size, info, empty mappings and order.
    """

    kind: str
    files: list[str]
    world_size: int = 1
    tensors: dict[LeafPath, StoredTensor] = field(default_factory=dict)
    objects: dict[LeafPath, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    about: Index = field(default_factory=lambda: Index({}, {}, {}))

    def add(self, path: LeafPath, value: Any) -> None:
        """Puts a leaf in: a stored tensor, or an object."""
        if isinstance(value, StoredTensor):
            self.tensors[path] = value
        else:
            self.objects[path] = value

    def nested(self, leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
        """Values by path as the state that they are leaves of."""
        state: dict[str, Any] = unflatten(self.about.in_order(leaves))
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bound_bytes(self) -> int:
        """Most bytes of tensors in memory at a time while this is converted: a slab, read, hashed and written."""
        largest = max(
            (min(t.nbytes, max(CHUNK_BYTES, t.row * t.dtype.itemsize)) for t in self.tensors.values()), default=0
        )
        return 4 * largest + 4096 * len(self.tensors)
