"""Tensors as they lie in memory or in a file, in any order of dims, read by ranges in row-major order."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.core.checkpoint import stored as chunks
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.stored import Part, Read, StoredTensor
from shardkit.core.checkpoint.torch_files import release_pages

__all__ = ["Memory", "mapped_reader", "row_major_strides", "whole"]


def whole(path: tuple[Any, ...], tensor: torch.Tensor, file: str) -> StoredTensor:
    """A stored tensor that is one mapped tensor of one file."""
    numel = tensor.numel()
    part = Part(0, numel, mapped_reader(name_of(path), tensor, 0, file), file)
    return StoredTensor(path, tensor.dtype, tuple(tensor.shape), (part,) if numel else ())


def mapped_reader(name: str, tensor: torch.Tensor, start: int, file: str) -> Read:
    """Reads ranges of a mapped tensor whose first element is number `start` of the whole.

    Raises:
        CheckpointError: for anything but a plain dense tensor in memory.
    """
    _check_plain(name, tensor, file)
    memory, first = tensor.detach(), tensor.storage_offset()

    def fetch(low: int, high: int) -> torch.Tensor:
        return memory.as_strided((high - low,), (1,), first + low).resolve_conj().resolve_neg()

    found = Memory(tuple(memory.shape), memory.stride(), memory.dtype, fetch, lambda: release_pages(memory))
    return lambda low, high: found.read(low - start, high - start)


@dataclass(frozen=True)
class Memory:
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
        row = self.row
        first, last = low // row, -(-high // row)
        return self.rows(first, last).view(-1)[low - first * row : high - first * row]

    @property
    def row(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.shape[1:])

    def _is_row_major(self) -> bool:
        expected = row_major_strides(self.shape)
        return all(
            size < 2 or seen == needed for size, seen, needed in zip(self.shape, self.strides, expected, strict=True)
        )

    def rows(self, first: int, last: int) -> torch.Tensor:
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


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()


def _check_plain(name: str, tensor: torch.Tensor, file: str) -> None:
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"'{name}' in {file} is a {kind.__name__}, which is not converted; load it where it was saved, and save it "
            "with torch.distributed.checkpoint"
        )
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(
            f"'{name}' in {file} is a tensor of {tensor.layout} on {tensor.device}; only dense tensors in memory are "
            "converted"
        )
