"""A tensor that lies in files, whole or in parts, and is read by ranges: nothing here holds a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CHUNK_BYTES", "Checkpoint", "CheckpointError", "Part", "Read", "StoredTensor"]

CHUNK_BYTES = 32 * 2**20
"""How much of a tensor is in memory at a time; a row that is longer is read whole."""

Read = Callable[[int, int], torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: says which file, which tensor, and the numbers."""


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

    name: str
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
        return self.numel // self.shape[0] if self.shape and self.shape[0] else self.numel

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
            for low, high in self.slabs()
        )

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Ranges of elements that are whole rows, each about CHUNK_BYTES; one empty range for an empty tensor."""
        if not self.numel:
            yield (0, 0)
            return
        rows = max(1, CHUNK_BYTES // max(1, self.row * self.dtype.itemsize))
        for low in range(0, self.numel, rows * self.row):
            yield low, min(low + rows * self.row, self.numel)


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
    """

    kind: str
    files: list[str]
    world_size: int = 1
    tensors: dict[tuple[Any, ...], StoredTensor] = field(default_factory=dict)
    objects: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None

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
