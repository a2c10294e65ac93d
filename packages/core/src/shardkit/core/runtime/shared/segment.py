"""Memory that other processes of this host can map, for shards and for data passed to peers.

A segment is an anonymous memory file (Linux, `memfd_create`). It has no name, so nothing is left behind when a process
is killed: it disappears when the last process that maps it ends. Its size is sealed, because a reader of a part that is
gone would be killed (SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
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

# Python keeps a second descriptor for a mapping, unless told not to (3.13).
ONE_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Every tensor starts at a separate cache line.
ALIGNMENT = 64

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_numbers = itertools.count(1)
_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment(mmap.mmap):
    """`nbytes` of zeroed memory, numbered in its process. Tensors over it keep it alive.

    Operations in which peers read it keep it alive, too, so its pages are freed at once when it is freed, although
    peers map it until they are told.
    """

    number: int
    fd: int
    nbytes: int
    address: int
    _process: int

    def __new__(cls, nbytes: int) -> Segment:
        fd = memory_file("shardkit")
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            self = super().__new__(cls, fd, nbytes, **ONE_DESCRIPTOR)
        except OSError as error:
            os.close(fd)
            raise _refused(error) from error
        weakref.finalize(self, os.close, fd)
        self.number, self.fd, self.nbytes = next(_numbers), fd, nbytes
        self._process = os.getpid()
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _segments.add(self)
        return self

    @property
    def path(self) -> str:
        return path_of(self.fd)

    def __del__(self) -> None:
        # A forked child maps it too, and must not free pages that its parent still uses.
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                self.madvise(mmap.MADV_REMOVE)


class NoSharedMemoryError(RuntimeError):
    """The system does not give this process another memory file."""


def memory_file(name: str) -> int:
    """The descriptor of a new, empty memory file. Raises `NoSharedMemoryError`."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _refused(error) from error


def path_of(fd: int) -> str:
    """Where another process of this user can open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _refused(error: OSError) -> NoSharedMemoryError:
    return NoSharedMemoryError(
        f"no more memory files are available: {error}. Each parameter group needs one: raise the limit on open files "
        "(ulimit -n) or on memory, or set SHARDKIT_SHARED_MEMORY=0 on any rank to do without"
    )


@functools.cache
def available() -> bool:
    """Whether this system has anonymous memory files, and lets this process create them."""
    try:
        os.close(memory_file("shardkit"))
    except (AttributeError, NoSharedMemoryError):  # AttributeError: not on Linux
        return False
    return True


@torch.inference_mode(False)  # tensors over shared memory outlive the forward that happens to make them
def carve(memory: Segment, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor over `memory` from byte `offset` on; it keeps `memory` alive and cannot be resized."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=numel * dtype.itemsize, offset=offset)
    return raw.view(dtype).view(tuple(shape))


class Mapping:
    """A peer's segment mapped into this process, as long as a tensor over it lives. It keeps no descriptor."""

    def __init__(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectionError(
                f"memory of another rank cannot be opened: {error}; raise the limit on open files (ulimit -n) or set "
                "SHARDKIT_SHARED_MEMORY=0 on any rank to do without"
            ) from error
        try:
            seals = 0
            with contextlib.suppress(OSError):  # not a memory file
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SIZE_SEALS != _SIZE_SEALS:
                raise ConnectionError(
                    "a peer has shared memory whose size is not sealed; all ranks must run the same version"
                )
            nbytes = os.fstat(fd).st_size
            self._bytes = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
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
    """The segment of a tensor and its first byte there, or None for a tensor in ordinary memory."""
    address = tensor.data_ptr()
    for segment in _segments:
        if segment.address <= address < segment.address + segment.nbytes:
            return segment, address - segment.address
    return None
