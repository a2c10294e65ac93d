"""Where each item lies in a row of bytes: what one rank sends, or what is sent to one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shardkit.core.runtime.compressed.wire import AsDtype, Int8Blocks, WireFormat
from shardkit.core.sharding import ChunkLayout, runs_together

__all__ = ["Row", "RowRun", "chunks_of", "format_of", "rows_of"]

# Every item starts at a multiple of this, so that its bytes can be viewed as any dtype.
_ALIGNMENT = 16

# Elements that are rounded in one go. More make fewer calls, and larger temporaries: 4 bytes for each of them.
_AT_ONCE = 1 << 20


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


class RowRun(NamedTuple):
    """`ranks` consecutive ranks, beginning with `first`, whose rows are alike."""

    first: int
    ranks: int
    row: Row

    def batches(self, numel: int) -> Iterator[tuple[int, int]]:
        """(first, ranks) of parts that are rounded at once: as many chunks of `numel` as `_AT_ONCE` allows, or one."""
        step = max(1, _AT_ONCE // numel)
        for begin in range(self.first, self.first + self.ranks, step):
            yield begin, min(step, self.first + self.ranks - begin)


def rows_of(layouts: Sequence[ChunkLayout], formats: Sequence[WireFormat]) -> tuple[RowRun, ...]:
    """The rows of all ranks."""
    runs = []
    for first, ranks in runs_together(layouts):
        chunks, offset = [], 0
        for item, (layout, form) in enumerate(zip(layouts, formats, strict=True)):
            numel = layout.local_numel(first)
            if numel:
                nbytes = form.nbytes(numel)
                chunks.append((item, offset, nbytes, numel))
                offset = _aligned(offset + nbytes)
        runs.append(RowRun(first, ranks, Row(tuple(chunks))))
    return tuple(runs)


def chunks_of(whole: torch.Tensor, layout: ChunkLayout, first: int, ranks: int) -> torch.Tensor:
    """The chunks of `ranks` consecutive ranks, alike in shape: a view `(ranks, *shape)` of the whole tensor."""
    dim, length = layout.dim, layout.length(first)
    part = whole.narrow(dim, layout.offset(first), ranks * length)
    chunks: torch.Tensor = part.unflatten(dim, (ranks, length)).movedim(dim, 0)
    return chunks


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
