"""Reads ranges of tensors that lie in files, mapped or not, in any order in memory that torch.save keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardkit.legacy_fsdp_compat.migrate import stored as chunks
from shardkit.legacy_fsdp_compat.migrate.raw_bytes import Region, read_range
from shardkit.legacy_fsdp_compat.migrate.stored import CheckpointError, Part, Read, StoredTensor
from shardkit.legacy_fsdp_compat.migrate.torch_files import release_pages

__all__ = ["mapped_reader", "region_reader", "whole"]


def whole(name: str, tensor: torch.Tensor, file: str) -> StoredTensor:
    """A stored tensor that is one mapped tensor of one file."""
    numel = tensor.numel()
    part = Part(0, numel, mapped_reader(name, tensor, 0, file), file)
    return StoredTensor(name, tensor.dtype, tuple(tensor.shape), (part,) if numel else ())


def mapped_reader(name: str, tensor: torch.Tensor, start: int, file: str) -> Read:
    """Reads ranges of a mapped tensor whose first element is number `start` of the whole.

    Raises:
        CheckpointError: for anything but a plain dense tensor in memory.
    """
    _check_plain(name, tensor, file)
    memory = tensor.detach()
    first = memory.storage_offset()
    found = _Memory(
        tuple(memory.shape),
        memory.stride(),
        memory.dtype,
        lambda low, high: memory.as_strided((high - low,), (1,), first + low),
        lambda: release_pages(memory),
    )
    return lambda low, high: found.read(low - start, high - start)


def region_reader(path: Path, start: int, region: Region) -> Read:
    """Reads ranges of a tensor in a file, not mapped, whose first element is number `start` of the whole."""
    found = _Memory(
        region.shape,
        region.strides,
        region.dtype,
        lambda low, high: read_range(path, region.offset + low * region.dtype.itemsize, high - low, region.dtype),
        lambda: None,
    )
    return lambda low, high: found.read(low - start, high - start)


@dataclass(frozen=True)
class _Memory:
    """A tensor's elements in the order in which they lie in memory.

    Attributes:
        shape, strides, dtype: of the tensor.
        fetch: elements [start, stop) of memory, counted from the tensor's first one: 1-D, perhaps a view.
        done: called when what was fetched is not needed any more.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[int, int], torch.Tensor]
    done: Callable[[], None]

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) in row-major order: a copy."""
        if low >= high or self._is_row_major():
            copy = self.fetch(low, high).clone()
            self.done()
            return copy
        row = math.prod(self.shape[1:])
        first, last = low // row, -(-high // row)
        return self._rows(first, last).view(-1)[low - first * row : high - first * row]

    def _is_row_major(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def _rows(self, first: int, last: int) -> torch.Tensor:
        """Rows in row-major order, fetched in pieces along the dim whose neighbours lie farthest apart in memory: each
        piece is then a range of memory of about CHUNK_BYTES.
        """
        sizes = (last - first, *self.shape[1:])
        dim = max(range(len(sizes)), key=lambda one: (sizes[one] > 1, self.strides[one]))
        count = max(1, chunks.CHUNK_BYTES // max(1, self.strides[dim] * self.dtype.itemsize))
        rows = torch.empty(sizes, dtype=self.dtype)
        for at in range(0, sizes[dim], count):
            part = [*sizes[:dim], min(count, sizes[dim] - at), *sizes[dim + 1 :]]
            start = first * self.strides[0] + at * self.strides[dim]
            span = 1 + sum((size - 1) * stride for size, stride in zip(part, self.strides, strict=True))
            found = self.fetch(start, start + span)
            rows.narrow(dim, at, part[dim]).copy_(found.as_strided(part, self.strides, found.storage_offset()))
            self.done()
        return rows


def _check_plain(name: str, tensor: torch.Tensor, file: str) -> None:
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"'{name}' in {file} is a {kind.__name__}, which is not converted; load it where it was saved, and save it "
            "with torch.distributed.checkpoint"
        )
    odd = tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized
    if odd or tensor.is_conj() or tensor.is_neg():
        kinds = f"{tensor.layout} on {tensor.device}" + (", conjugated or negated" if not odd else "")
        raise CheckpointError(f"'{name}' in {file} is a tensor of {kinds}; only dense tensors in memory are converted")
