"""Where each item lies in a row of bytes: what one rank sends, or what is sent to one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardkit.core.runtime.compressed.wire import AsDtype, Int8Blocks, WireFormat
from shardkit.core.sharding import ChunkLayout

__all__ = ["Row", "format_of", "rows_of"]

# Every item starts at a multiple of this, so that its bytes can be viewed as any dtype.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Row:
    """One rank's chunk of every item, one behind the other.

    `chunks` are (item, first byte, bytes, elements) of the chunks that are not empty.
    """

    chunks: tuple[tuple[int, int, int, int], ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the row; a multiple of 16, so that rows can lie one behind the other."""
        return _aligned(self.chunks[-1][1] + self.chunks[-1][2]) if self.chunks else 0


def rows_of(layouts: Sequence[ChunkLayout], formats: Sequence[WireFormat], world_size: int) -> tuple[Row, ...]:
    """The row of each rank's chunks."""
    rows = []
    for rank in range(world_size):
        chunks, offset = [], 0
        for item, (layout, form) in enumerate(zip(layouts, formats, strict=True)):
            numel = layout.local_numel(rank)
            if numel:
                nbytes = form.nbytes(numel)
                chunks.append((item, offset, nbytes, numel))
                offset = _aligned(offset + nbytes)
        rows.append(Row(tuple(chunks)))
    return tuple(rows)


def format_of(kind: str | None, block: int, layout: ChunkLayout, dtype: torch.dtype) -> WireFormat:
    """The format of an item that would travel in `dtype` without compression; `kind` is "int8", "bf16" or None.

    Vectors stay as they are: norms and biases are few bytes and much of the result. So does what is no wider than the
    compressed form, and what is not floating-point.
    """
    compressed: WireFormat = Int8Blocks(block) if kind == "int8" else AsDtype(torch.bfloat16, lossless=False)
    itemsize = 1 if kind == "int8" else 2
    if kind is None or len(layout.shape) < 2 or not dtype.is_floating_point or dtype.itemsize <= itemsize:
        return AsDtype(dtype, lossless=True)
    return compressed


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
