"""Rows of bytes: the format in which one rank sends the elements of items to another.

Note [Blocks of int8]: `block` consecutive elements share one fp32 scale, the largest magnitude among them over 127, and
each is sent as the nearest whole number of scales. So the error of an element is at most half a scale, up to the
rounding of fp32. bfloat16 has the range of fp32 and needs no scale. A block with an infinity or a NaN has a scale that
is not finite, and arrives as values that are not finite, so that checks for overflow find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from shardkit.core.runtime.sharding import ChunkLayout, runs_together

_LARGEST = 127
# Below fp32's least normal number a scale loses its precision; such blocks (magnitudes below 1.5e-36) become zeros.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# The bytes after an item's codes can be viewed as fp32.
_SCALE_BYTES = 4

# Every item starts at a multiple of this, so that its bytes can be viewed as any dtype.
_ALIGNMENT = 16

# Number of elements rounded at once. More need fewer calls but larger temporaries: 4 bytes each. On a CPU these stay in
# its caches. A device would take less time for so few elements than the host for the calls.
_AT_ONCE = 1 << 20
_AT_ONCE_ON_DEVICE = 1 << 23


@dataclass(frozen=True)
class AsDtype:
    """Elements in `dtype`; `lossless` if their own dtype is not wider, so that reading returns what was written.

    Dims before the last are separate chunks of one length: values `(*, numel)` become uint8 `(*, nbytes(numel))`, and
    each chunk starts at a multiple of 16 bytes. Values are read in any floating-point dtype, with stride 1 in the last
    dim.
    """

    dtype: torch.dtype
    lossless: bool

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def write(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.view(self.dtype).copy_(values)

    def read(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(wire.view(self.dtype))


@dataclass(frozen=True)
class Int8Blocks:
    """One byte for each element, then one fp32 scale for each `block` of them; see Note [Blocks of int8].

    Shapes as for `AsDtype`::

        block = 4      | c c c c | c c c c | c c . . | s0 | s1 | s2 |      '.': up to the next multiple of 4 bytes
    """

    block: int
    lossless = False

    def nbytes(self, numel: int) -> int:
        return self._codes_bytes(numel) + -(-numel // self.block) * _SCALE_BYTES

    def write(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        for rows, codes, scales in self._blocks(values, wire):
            _quantize(rows, codes, scales)

    def read(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        for rows, codes, scales in self._blocks(values, wire):
            torch.mul(codes, scales.unsqueeze(-1), out=rows)

    def _codes_bytes(self, numel: int) -> int:
        return -(-numel // _SCALE_BYTES) * _SCALE_BYTES

    def _blocks(
        self, values: torch.Tensor, wire: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The full blocks as rows of matrices, then the rest as one shorter row: views, with codes and scales."""
        numel = values.shape[-1]
        codes, scales = wire[..., :numel].view(torch.int8), wire[..., self._codes_bytes(numel) :].view(torch.float32)
        full = numel // self.block
        cut, size = full * self.block, (full, self.block)
        if full:
            yield values[..., :cut].unflatten(-1, size), codes[..., :cut].unflatten(-1, size), scales[..., :full]
        if cut < numel:
            yield values[..., cut:].unsqueeze(-2), codes[..., cut:].unsqueeze(-2), scales[..., full:]


WireFormat: TypeAlias = AsDtype | Int8Blocks
"""How elements become bytes and back."""


def _quantize(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Rounds each row of `rows` to whole numbers in [-127, 127] and computes its scale."""
    if rows.dtype == torch.float64:
        rows = rows.float()
    torch.div(torch.linalg.vector_norm(rows, float("inf"), dim=-1).float(), _LARGEST, out=scales)
    lost = scales < _LEAST_SCALE
    scales.masked_fill_(lost, 0)
    steps = scales.masked_fill(lost, float("inf"))  # a block without a scale becomes zeros
    codes.copy_(torch.div(rows, steps.unsqueeze(-1)).round_())


@dataclass(frozen=True)
class Row:
    """One rank's chunks, concatenated: (item, first byte, bytes, elements) of those that are not empty."""

    chunks: tuple[tuple[int, int, int, int], ...]

    @cached_property
    def nbytes(self) -> int:  # a multiple of 16, so that rows can be concatenated
        return _aligned(self.chunks[-1][1] + self.chunks[-1][2]) if self.chunks else 0


class RowRun(NamedTuple):
    """`ranks` consecutive ranks from `first` on, with rows of the same layout."""

    first: int
    ranks: int
    row: Row

    def batches(self, numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """(first, ranks) of parts to round at once on `device`: as many chunks of `numel` as it takes, or one."""
        step = max(1, (_AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_DEVICE) // numel)
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
    """The chunks of `ranks` consecutive ranks, equal in shape: a view `(ranks, *shape)` of the whole tensor."""
    dim, length = layout.dim, layout.length(first)
    part = whole.narrow(dim, layout.offset(first), ranks * length)
    chunks: torch.Tensor = part.unflatten(dim, (ranks, length)).movedim(dim, 0)
    return chunks


def format_of(kind: str | None, block: int, layout: ChunkLayout, dtype: torch.dtype) -> WireFormat:
    """The format of an item that would be sent in `dtype` without compression; `kind` is "int8", "bf16" or None.

    Vectors are not compressed: norms and biases are few bytes and matter for the result. Neither are items that are no
    wider than the compressed form, or not floating-point.
    """
    itemsize = 1 if kind == "int8" else 2
    if kind is None or len(layout.shape) < 2 or not dtype.is_floating_point or dtype.itemsize <= itemsize:
        return AsDtype(dtype, lossless=True)
    return Int8Blocks(block) if kind == "int8" else AsDtype(torch.bfloat16, lossless=False)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
