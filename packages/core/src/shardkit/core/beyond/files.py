"""Optimizer state in files of this rank, of which a bounded part is in memory.

Note [State in files]
The state of each parameter group lies in one file, which is mapped into memory: state tensors are views of the mapping,
so everybody may read them at any time, and a step writes to them as to any other memory. Before a group is stepped,
those that were stepped last leave memory until there is room, and the file of the next one is read ahead. As the groups
are stepped in the same order each time, the first ones stay, and each of the others is read once in a step. The kernel
writes behind.

A file never has a name, so nothing is left behind, whatever becomes of the process. Its blocks are allocated when it is
made: a disk that is full is an error then, and not the end of the process in the middle of a step.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch

from shardkit.core.runtime.shared.segment import aligned

__all__ = ["FileTier"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class FileTier:
    """A directory for optimizer state, and how many bytes of it each rank keeps in memory.

    Args:
        path: the directory, on a disk of this host; it is made if it does not exist. Each rank has files of its own.
        resident: bytes, as a number or such as "2GiB". The state of the largest parameter group must fit.

    Raises:
        ValueError: if `resident` is not a number of bytes.
        OSError: if the directory cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str], resident: int | str) -> None:
        self.path = Path(path)
        self.resident = _bytes_of(resident)
        self.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.path).close()
        self._files: WeakKeyDictionary[object, WeakSet[StateFile]] = WeakKeyDictionary()
        self._in_memory: list[ReferenceType[StateFile]] = []  # in the order in which they were last used

    def enter(self, group: object) -> None:
        """Before the step of a group: makes room for its state."""
        for file in self._files.get(group, ()):
            self._hold(file, file.nbytes)

    def read_ahead(self, group: object) -> None:
        """Has the state of a group read that will be stepped soon."""
        for file in self._files.get(group, ()):
            if ref(file) not in self._in_memory:
                file.madvise(mmap.MADV_WILLNEED)

    def put(self, group: object, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """After the step of a group: its state in files; tensors that are there already are returned as they are.

        Those that an earlier file had, before a state dict was loaded, free it.

        Raises:
            ValueError: if they would not fit into `resident` bytes.
            OSError: if the disk is full, or fails.
        """
        files = self._files.setdefault(group, WeakSet())
        fresh = [one for one in tensors if one.numel() and not any(one in file for file in files)]
        if not fresh:
            return [*tensors]
        nbytes = sum(aligned(one.nbytes) for one in fresh)
        if nbytes > self.resident:
            raise ValueError(
                f"the optimizer state of the parameter group of '{label}' takes {nbytes} bytes, and resident="
                f"{self.resident}; raise resident, or shard smaller modules"
            )
        file = StateFile(self.path, nbytes, label)
        self._hold(file, nbytes)
        files.add(file)
        placed = dict(zip(map(id, fresh), file.copies(fresh), strict=True))
        return [placed.get(id(one), one) for one in tensors]

    def _hold(self, file: StateFile, nbytes: int) -> None:
        """Notes that a file is in memory from now on; those that were used last make room."""
        held = [one for reference in self._in_memory if (one := reference()) is not None and one is not file]
        while held and nbytes + sum(one.nbytes for one in held) > self.resident:
            held.pop().madvise(mmap.MADV_DONTNEED)
        self._in_memory = [ref(one) for one in (*held, file)]


class StateFile(mmap.mmap):
    """A mapped file without a name, which lives as long as a tensor over it."""

    nbytes: int
    address: int

    def __new__(cls, path: Path, nbytes: int, label: str) -> StateFile:
        """Raises OSError if the disk has no room; the message has the path, the bytes and the FQN."""
        try:
            with tempfile.TemporaryFile(dir=path) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self = super().__new__(cls, file.fileno(), nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path} has no room for {nbytes} bytes of optimizer state of the parameter group of '{label}' "
                f"({error.strerror}); free space, or choose another directory",
            ) from error
        self.nbytes = nbytes
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        return self

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and 0 <= tensor.data_ptr() - self.address < self.nbytes

    @torch.no_grad()
    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors, one after the other from the beginning of the file."""
        copied, offset = [], 0
        for one in tensors:
            place = torch.frombuffer(self, dtype=one.dtype, count=one.numel(), offset=offset)
            copied.append(place.view(one.shape).copy_(one))
            offset += aligned(one.nbytes)
        return copied


def _bytes_of(value: int | str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower())
    number = math.floor(float(found[1]) * _UNITS[found[2]]) if found else 0
    if number <= 0:
        raise ValueError(f'resident={value!r} is not a number of bytes; give one above 0, such as 2**31 or "2GiB"')
    return number
