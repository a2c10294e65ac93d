"""The packed buffer with a row for each rank.

Note [Chunks as strides]: chunks of one shape on consecutive ranks lie at equal distances, both in the packed buffer and
in the whole tensor. So one strided view on each side covers all of them, and one copy moves them. A step takes a few
views for each item, whether 8 or 8,000 ranks take part.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardkit.core.runtime.sharding import ChunkLayout, dense_strides, runs_together
from shardkit.core.torch_compat import chunk_cat, foreach_copy_, foreach_zero_

# Items of a byte buffer start at multiples of this, so that each can be viewed as its own dtype. 16 suits the widest
# dtype (complex128) and vectorized copies.
_ALIGNMENT = 16

# On a CPU, a buffer of up to this many elements is filled faster by a concatenation and a cast of the whole than by a
# copy of each chunk, which casts: chunks of many ranks are short.
_SMALL = 1 << 18


class Block(NamedTuple):
    """The chunks of `item` on consecutive ranks from `first` on: equal in shape and not empty.

    `size` is (ranks, *shape of a chunk). In the buffer the first chunk starts at element `at`, with strides `stride`,
    in elements of the item's dtype. In the whole tensor it begins at index `begin` of dim `dim`; a dense one has the
    strides `dense`.
    """

    item: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    dense: tuple[int, ...]
    dim: int
    begin: int

    def of_whole(self, whole: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """The chunks in a whole tensor with strides `stride`, as a view of `size`."""
        step = stride[self.dim]
        return strided(whole, self.size, (self.size[1 + self.dim] * step, *stride), self.begin * step)


class Gap(NamedTuple):
    """Unused room in consecutive ranks' rows: a strided view of the buffer, in its own elements."""

    size: tuple[int, int]
    stride: tuple[int, int]
    at: int


class Place(NamedTuple):
    """A piece of one rank's row, of `numel` elements of the buffer: its chunk of `item`; None: nothing."""

    item: int | None
    numel: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packing:
    """The position of each chunk in the packed buffer; see Note [Chunks as strides].

    ::

        row of rank 0                  row of rank 1
        | a0 a0 a0 . | b0 b0 b0 b0 |   | a1 a1 . . | b1 b1 . . |    '.': padding, or alignment (bytes)

    `items` are the indices of the packed items; all rows have `row_numel` elements. `columns` are (item, elements) of
    each item in a row if every item is cut on dim 0, so that torch's operators for matrices apply; otherwise it is
    empty. A `ragged` buffer has no columns: each row holds its rank's chunks in sequence, because a tensor with one
    owner would leave its column empty elsewhere.
    """

    items: tuple[int, ...]
    blocks: tuple[Block, ...]
    gaps: tuple[Gap, ...]
    world_size: int
    row_numel: int
    columns: tuple[tuple[int, int], ...]
    ragged: bool = False

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.world_size * self.row_numel

    def row(self, rank: int) -> tuple[Place, ...]:
        """All pieces of the row of `rank`, in sequence."""
        found: list[Place] = []
        end = rank * self.row_numel
        for block in self.blocks:
            if block.first <= rank < block.first + block.size[0]:
                width = self.row_numel // block.stride[0]
                at = (block.at + (rank - block.first) * block.stride[0]) * width
                chunk = Place(block.item, math.prod(block.size[1:]) * width, block.size[1:])
                found += [Place(None, at - end), chunk] if at > end else [chunk]
                end = at + chunk.numel
        unused = (rank + 1) * self.row_numel - end
        return (*found, Place(None, unused)) if unused else tuple(found)

    def fill(self, buffer: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        """Copies the packed items of `wholes`, of any strides, to the rows of all ranks, cast; zeroes the padding."""
        if self._as_matrix(buffer):
            rows, packed = buffer.view(self.world_size, -1), [wholes[item] for item, _ in self.columns]
            if buffer.device.type == "cpu" and not self.gaps and self.numel <= _SMALL:
                rows.copy_(torch.cat([whole.reshape(self.world_size, -1) for whole in packed], 1))
            else:
                chunk_cat(packed, 0, self.world_size, out=rows)
            return
        targets = [strided(buffer, block.size, block.stride, block.at) for block in self.blocks]
        packed = [wholes[block.item] for block in self.blocks]
        chunks = [block.of_whole(whole, whole.stride()) for block, whole in zip(self.blocks, packed, strict=True)]
        foreach_copy_(targets, chunks)
        if self.gaps:
            foreach_zero_([strided(buffer, *gap) for gap in self.gaps])

    def copy_out(self, buffer: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Copies all ranks' rows to the items' flat tensors, each of which is a dense whole tensor.

        The flat tensor of an item cut on dim 0 must have room for the padding.
        """
        if self._as_matrix(buffer):
            rows = buffer.view(self.world_size, -1)
            out = [flats[item].view(rows.shape[0], -1) for item, _ in self.columns]
            torch.split_with_sizes_copy(rows, [size for _, size in self.columns], 1, out=out)
            return
        items = [as_dtype(buffer, flats[block.item].dtype) for block in self.blocks]
        chunks = [
            strided(item, block.size, block.stride, block.at) for item, block in zip(items, self.blocks, strict=True)
        ]
        foreach_copy_([block.of_whole(flats[block.item], block.dense) for block in self.blocks], chunks)

    def _as_matrix(self, buffer: torch.Tensor) -> bool:
        """Whether torch's operators for columns apply, and are the fastest way.

        On CUDA they are one kernel. On a CPU they also copy padding, which strided views skip.
        """
        return bool(self.columns) and (buffer.is_cuda or not self.gaps)


def strided(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], at: int) -> torch.Tensor:
    """The view of `tensor` that begins `at` elements after its first one."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + at)


def shaped(chunk: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense 1-D tensor as one of another shape. A view costs a microsecond, and most small chunks are 1-D already."""
    return chunk.view(shape) if len(shape) > 1 else chunk


def as_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The buffer of bytes as another dtype; the buffer itself if it is of that dtype."""
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


@functools.lru_cache(maxsize=64)
def pack(
    layouts: tuple[ChunkLayout, ...], items: tuple[int, ...], widths: tuple[int, ...], *, aligned: bool
) -> Packing | None:
    """The packing of `items` (indices into `layouts`), or None when they have no elements.

    `widths[i]` is the number of buffer elements in one element of item `i` (its bytes, in a byte buffer). `aligned`
    starts every piece at a multiple of 16. Equal groups, such as a model's layers, share one object.
    """
    filled = [item for item in items if layouts[item].numel]
    if not filled:
        return None
    ragged = any(layouts[item].owner is not None for item in filled)

    def room(item: int, rank: int) -> int:
        layout = layouts[item]
        numel = (layout.local_numel(rank) if ragged else layout.padded_local_numel) * widths[item]
        return -(-numel // _ALIGNMENT) * _ALIGNMENT if aligned else numel

    world = layouts[filled[0]].world_size
    gaps: list[Gap] = []
    places: list[tuple[int, int, int, int]] = []  # item, first rank, ranks, where the first one's chunk lies
    if not ragged:
        *columns, row = itertools.accumulate((room(item, 0) for item in filled), initial=0)
        for item, column in zip(filled, columns, strict=True):
            places += [(item, run.first, run.ranks, column + run.first * row) for run in layouts[item].runs]
    else:
        runs = runs_together([layouts[item] for item in filled])
        row = max(sum(room(item, first) for item in filled) for first, _ in runs)
        for first, count in runs:
            *columns, used = itertools.accumulate((room(item, first) for item in filled), initial=0)
            places += [(item, first, count, first * row + at) for item, at in zip(filled, columns, strict=True)]
            if row > used:
                gaps.append(Gap((count, row - used), (row, 1), first * row + used))
    blocks: list[Block] = []
    for item, first, count, at in places:
        used = layouts[item].local_numel(first) * widths[item]
        unused = room(item, first) - used
        if used:
            blocks.append(_block(layouts[item], item, widths[item], first, count, row, at))
        if unused:
            gaps.append(Gap((count, unused), (row, 1), at + used))
    dense = not ragged and not aligned and all(layouts[item].has_equal_slots for item in filled)
    sizes = tuple((item, room(item, 0)) for item in filled) if dense else ()
    return Packing(items, tuple(blocks), tuple(gaps), world, row, sizes, ragged)


def _block(layout: ChunkLayout, item: int, width: int, first: int, count: int, row: int, at: int) -> Block:
    """The block of an item whose elements are `width` of the buffer's, in rows `row` elements apart."""
    shape = layout.local_shape(first)
    return Block(
        item,
        first,
        size=(count, *shape),
        stride=(row // width, *dense_strides(shape)),
        at=at // width,
        dense=dense_strides(layout.shape),
        dim=layout.dim,
        begin=layout.offset(first),
    )
