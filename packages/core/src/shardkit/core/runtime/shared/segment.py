"""Memory that other processes of this host can map: where shards lie, and what is handed to peers.

A segment is an anonymous memory file (Linux, `memfd_create`). It has no name anywhere, so nothing is left behind when a
process is killed: it goes when the last process that maps it ends.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

# Every tensor starts at a cache line of its own.
ALIGNMENT = 64

_numbers = itertools.count(1)
_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment(mmap.mmap):
    """`nbytes` of zeroed memory. Tensors over it keep it alive; `fd` is what a peer needs to map it.

    `number` tells the segments of a process apart.
    """

    number: int
    fd: int
    nbytes: int
    address: int

    def __new__(cls, nbytes: int) -> Segment:
        fd = os.memfd_create("shardkit", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self = super().__new__(cls, fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(self, os.close, fd)
        self.number, self.fd, self.nbytes = next(_numbers), fd, nbytes
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _segments.add(self)
        return self


def available() -> bool:
    """Whether this system has anonymous memory files."""
    return hasattr(os, "memfd_create")


def carve(memory: Segment, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor over `memory` from byte `offset` on, which keeps `memory` alive and cannot be resized."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=numel * dtype.itemsize, offset=offset)
    return raw.view(dtype).view(tuple(shape))


class Mapping:
    """A peer's segment as this process sees it, for as long as a tensor over it lives. It keeps no descriptor."""

    def __init__(self, fd: int) -> None:
        nbytes = os.fstat(fd).st_size
        self._bytes = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor from byte `offset` on."""
        return self._bytes.narrow(0, offset, numel * dtype.itemsize).view(dtype)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def shared_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense copies of CPU tensors, side by side in one new segment."""
    sizes = [aligned(tensor.numel() * tensor.itemsize) for tensor in tensors]
    if not sum(sizes):
        return list(tensors)
    segment = Segment(sum(sizes))
    copies, offset = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        copies.append(carve(segment, offset, tensor.shape, tensor.dtype).copy_(tensor))
        offset += size
    return copies


def locate(tensor: torch.Tensor) -> tuple[Segment, int] | None:
    """The segment that a tensor lies in and the byte it starts at, or None for one with ordinary memory."""
    address = tensor.data_ptr()
    for segment in _segments:
        if segment.address <= address < segment.address + segment.nbytes:
            return segment, address - segment.address
    return None
