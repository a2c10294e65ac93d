"""Memory that lies in a file: its pages are read when they are touched, and leave memory when they are told to."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch

from shardkit.core.runtime.shared.segment import ONE_DESCRIPTOR, aligned

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Linux 5.14: one call instead of a fault for each page, and an error where a fault would end the process."""

_files: list[ReferenceType[MappedFile]] = []
"""Copied to go through it, as threads add to it."""


class MappedFile(mmap.mmap):
    """A mapped file without a name, which lives as long as a tensor over it; `what` lies there."""

    path: Path
    what: str
    nbytes: int
    address: int

    def __new__(cls, path: Path, nbytes: int, what: str) -> MappedFile:
        """Raises OSError if the disk has no room, or fails; the message has the path, the bytes and the FQN."""
        try:
            with tempfile.TemporaryFile(dir=path) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self = super().__new__(cls, file.fileno(), nbytes, **ONE_DESCRIPTOR)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path} cannot take {nbytes} bytes of {what} ({error.strerror}); free space, or choose another "
                "directory",
            ) from error
        self.path, self.what, self.nbytes = path, what, nbytes
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _files.append(ref(self, _files.remove))
        return self

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and 0 <= tensor.data_ptr() - self.address < self.nbytes

    def read_in(self, begin: int = 0, nbytes: int | None = None, *, to_write: bool) -> None:
        """Reads bytes into memory. Raises OSError if the disk fails; the message has the path and the FQN."""
        try:
            self.madvise(_POPULATE_WRITE if to_write else _POPULATE_READ, *self._pages(begin, nbytes))
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: pages are read when they are touched
                raise OSError(
                    error.errno,
                    f"the file in {self.path} with {self.what} cannot be read ({error.strerror}): the disk has failed, "
                    "or the file was cut short; restore the last checkpoint, with another directory",
                ) from error

    def read_ahead(self) -> None:
        """Has the kernel read the file soon; its pages count as memory of the process when they are touched."""
        self.madvise(mmap.MADV_WILLNEED)

    def leave_memory(self, begin: int = 0, nbytes: int | None = None) -> None:
        """Frees the memory of bytes, which stay in the file."""
        self.madvise(mmap.MADV_DONTNEED, *self._pages(begin, nbytes))

    def _pages(self, begin: int, nbytes: int | None) -> tuple[int, int]:
        end = self.nbytes if nbytes is None else begin + nbytes
        begin -= begin % mmap.PAGESIZE
        return begin, end - begin

    @torch.no_grad()
    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors, one after the other from the beginning of the file."""
        copied, offset = [], 0
        for one in tensors:
            place = torch.frombuffer(self, dtype=one.dtype, count=one.numel(), offset=offset)
            copied.append(place.view(one.shape).copy_(one))
            offset += aligned(one.nbytes)
        return copied


def file_of(tensor: torch.Tensor) -> MappedFile | None:
    """The file that a tensor lies in, or None for a tensor in ordinary memory."""
    return _file_at(tensor.data_ptr()) if _files else None


def _file_at(address: int) -> MappedFile | None:
    alive = (one for reference in _files.copy() if (one := reference()) is not None)
    return next((one for one in alive if 0 <= address - one.address < one.nbytes), None)


@contextlib.contextmanager
def briefly_in_memory(block: memoryview) -> Iterator[None]:
    """Within it a block may be used; then it leaves memory, if it lies in a file. Raises as `MappedFile.read_in`."""
    array: Any = np.frombuffer(block, dtype=np.uint8)
    file = _file_at(array.ctypes.data) if _files else None
    if file is None:
        yield
        return
    begin = array.ctypes.data - file.address
    file.read_in(begin, len(block), to_write=not block.readonly)
    yield
    file.leave_memory(begin, len(block))
