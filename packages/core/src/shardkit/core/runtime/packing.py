"""The packed buffer: one row for each rank, holding that rank's chunk of every packed item."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardkit.core.runtime.slots import Slots
from shardkit.core.sharding import ChunkLayout

# Items of a buffer of bytes start at multiples of this, so that each can be viewed as its own dtype; 16 is what the
# widest dtype (complex128) and vectorized copies want.
_ALIGNMENT = 16


class Piece(NamedTuple):
    """One rank's chunk of one item: the item's index, its place in the split buffer, the chunk's shape."""

    item: int
    at: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Where each chunk lies in the packed buffer.

    ::

        row of rank 0                  row of rank 1
        | a0 a0 a0 . | b0 b0 b0 b0 |   | a1 a1 . . | b1 b1 . . |    '.': padding (collectives) or alignment (bytes)

    `items` are the indices of the packed items. `sizes` splits the buffer into pieces and gaps; `rows[r]` lists the
    non-empty pieces of rank `r`; `gaps` are the places of the others. Sizes count elements of the buffer's dtype.
    """

    items: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[tuple[Piece, ...], ...]
    gaps: tuple[int, ...]
    slots: Slots

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.slots.numels)

    def split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All pieces and gaps of a 1-D buffer, as 1-D views."""
        return buffer.split_with_sizes(self.sizes)


def pack(
    layouts: Sequence[ChunkLayout], items: Sequence[int], widths: Sequence[int], *, padded: bool, aligned: bool
) -> Packing | None:
    """The packing of `items` (indices into `layouts`), or None when they have no elements.

    `widths[i]` is how many elements of the buffer make one element of item `i` (its bytes, in a buffer of bytes).
    `padded` gives all rows one size; `aligned` starts every piece at a multiple of 16. Groups that are alike, such as a
    model's layers, get the same object: on thousands of ranks a packing has as many thousand pieces.
    """
    return _pack(tuple(layouts), tuple(items), tuple(widths), padded, aligned)


@functools.lru_cache(maxsize=64)
def _pack(
    layouts: tuple[ChunkLayout, ...], items: tuple[int, ...], widths: tuple[int, ...], padded: bool, aligned: bool
) -> Packing | None:
    if not any(layouts[item].numel for item in items):
        return None
    sizes: list[int] = []
    gaps: list[int] = []
    rows: list[tuple[Piece, ...]] = []
    row_sizes: list[int] = []
    for rank in range(layouts[items[0]].world_size):
        first = len(sizes)
        row: list[Piece] = []
        for item in items:
            layout = layouts[item]
            used = layout.local_numel(rank) * widths[item]
            room = layout.padded_local_numel * widths[item] if padded else used
            if aligned:
                room = -(-room // _ALIGNMENT) * _ALIGNMENT
            if used:
                row.append(Piece(item, len(sizes), layout.local_shape(rank)))
                sizes.append(used)
            if room > used:
                gaps.append(len(sizes))
                sizes.append(room - used)
        rows.append(tuple(row))
        row_sizes.append(sum(sizes[first:]))
    return Packing(items, tuple(sizes), tuple(rows), tuple(gaps), Slots(tuple(row_sizes)))
