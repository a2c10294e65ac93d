"""Memory that other processes of this host can map: where shards lie, and what is handed to peers.

A segment is an anonymous memory file (Linux, `memfd_create`). It has no name anywhere, so nothing is left behind when a
process is killed: it goes when the last process that maps it ends.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

# Python maps through a second descriptor, unless told not to (3.13).
_ONE_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

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
        try:
            fd = os.memfd_create("shardkit", os.MFD_CLOEXEC)
        except OSError as error:
            raise _refused(nbytes, error) from error
        try:
            os.ftruncate(fd, nbytes)
            self = super().__new__(cls, fd, nbytes, **_ONE_DESCRIPTOR)
        except OSError as error:
            os.close(fd)
            raise _refused(nbytes, error) from error
        weakref.finalize(self, os.close, fd)
        self.number, self.fd, self.nbytes = next(_numbers), fd, nbytes
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _segments.add(self)
        return self


def _refused(nbytes: int, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"no memory file of {nbytes} bytes to be had: {error}. Each parameter group needs one: raise the limit on open "
        "files (ulimit -n) or on memory, or set SHARDKIT_SHARED_MEMORY=0 on any rank to do without"
    )


@functools.cache
def available() -> bool:
    """Whether this system has anonymous memory files, and lets this process make them."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("shardkit", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True


@torch.inference_mode(False)  # tensors over shared memory outlive the forward that happens to make them
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


@torch.inference_mode(False)
@torch.no_grad()
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
