"""What the elements of one item look like on the wire: as they are, rounded to another dtype, or int8 with scales.

Note [Blocks of int8]: `block` consecutive elements share one fp32 scale, the largest magnitude among them over 127, and
each travels as the nearest whole number of scales. So an element is off by at most half a scale, up to the rounding of
fp32. bfloat16 has the range of fp32 and needs no scale. A block with an infinity or a NaN has a scale that is none, and
arrives as values that are not finite, so that whoever looks for overflow finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AsDtype", "Int8Blocks", "WireFormat"]

_LARGEST = 127
# Below fp32's least normal number a scale loses its precision; such blocks (magnitudes below 1.5e-36) become zeros.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# What follows an item's codes can be viewed as fp32.
_SCALE_BYTES = 4


class WireFormat(Protocol):
    """How `numel` elements become bytes and back. Dims before the last are chunks of one length, each for itself."""

    @property
    def lossless(self) -> bool:
        """Whether what is read is what was written."""

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""

    def write(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        """Writes `values`, `(*, numel)`, to `wire`: `(*, nbytes(numel))` of uint8; chunks start at multiples of 16."""

    def read(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `write` wrote, cast, to `values` of any floating-point dtype and any strides but the last, 1."""


@dataclass(frozen=True)
class AsDtype:
    """Elements in `dtype`; `lossless` if that is all they are given in."""

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

    ::

        block = 4      | c c c c | c c c c | c c . . | s0 | s1 | s2 |      '.': up to the next multiple of 4 bytes
    """

    block: int

    @property
    def lossless(self) -> bool:
        return False

    def nbytes(self, numel: int) -> int:
        return self._codes_bytes(numel) + -(-numel // self.block) * _SCALE_BYTES

    def write(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        codes, scales = self._parts(wire, values.shape[-1])
        for rows, codes_of, scales_of in self._blocks(values, codes, scales):
            _quantize(rows, codes_of, scales_of)

    def read(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        codes, scales = self._parts(wire, values.shape[-1])
        for rows, codes_of, scales_of in self._blocks(values, codes, scales):
            torch.mul(codes_of, scales_of.unsqueeze(-1), out=rows)

    def _codes_bytes(self, numel: int) -> int:
        return -(-numel // _SCALE_BYTES) * _SCALE_BYTES

    def _parts(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        return wire[..., :numel].view(torch.int8), wire[..., self._codes_bytes(numel) :].view(torch.float32)

    def _blocks(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The full blocks as rows of matrices, then the rest as one shorter row: views, with codes and scales."""
        numel = values.shape[-1]
        full = numel // self.block
        cut = full * self.block
        size = (full, self.block)
        parts = []
        if full:
            whole = values[..., :cut].unflatten(-1, size), codes[..., :cut].unflatten(-1, size)
            parts.append((*whole, scales[..., :full]))
        if cut < numel:
            parts.append((values[..., cut:].unsqueeze(-2), codes[..., cut:].unsqueeze(-2), scales[..., full:]))
        return parts


def _quantize(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Each row of `rows` to whole numbers in [-127, 127] and its scale."""
    rows = rows.float()
    torch.div(torch.linalg.vector_norm(rows, float("inf"), dim=-1), _LARGEST, out=scales)
    scales.masked_fill_(scales < _LEAST_SCALE, 0)
    steps = torch.where(scales == 0, float("inf"), scales)  # a block without a scale becomes zeros
    codes.copy_(torch.div(rows, steps.unsqueeze(-1)).round_())
