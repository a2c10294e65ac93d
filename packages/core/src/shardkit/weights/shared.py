"""Memory of a receiver into which processes of the same host and user write, so that nothing goes through a socket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from shardkit.core.runtime.shared.meeting import possible
from shardkit.core.runtime.shared.segment import Mapping as Mapped
from shardkit.core.runtime.shared.segment import NoSharedMemoryError, Segment, aligned
from shardkit.weights.wire import Message

_PATH = re.compile(r"/proc/\d+/fd/\d+")


def this_host() -> str:
    """Equal for processes that see each other's descriptors: one boot, one namespace of processes, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"


class Staging:
    """The bytes that a receiver has and has not taken yet: those of each sender, one after the other."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._offsets: dict[int, int] = {}
        total = 0
        for rank, size in sizes.items():
            self._offsets[rank] = total
            total += aligned(size)
        self._segment: Segment | None = None
        with contextlib.suppress(NoSharedMemoryError):  # what is sent goes through sockets then
            self._segment = Segment(total) if possible() and total else None
        if self._segment is None:
            self._bytes = torch.empty(total, dtype=torch.uint8)
        else:
            self._bytes = torch.frombuffer(self._segment, dtype=torch.uint8)

    def part(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a sender."""
        start = self._offsets[rank] + offset
        return self._bytes[start : start + nbytes]

    def place(self, rank: int) -> Message | None:
        """Where the bytes of a sender are to be written; None if the memory is not shared."""
        if self._segment is None:
            return None
        path, number = self._segment.path, self._segment.number
        return {"host": this_host(), "path": path, "number": number, "offset": self._offsets[rank]}


class SharedStaging:
    """The bytes of one sender in the `Staging` of a receiver, as another process sees it."""

    def __init__(self, place: Message, memory: Mapped) -> None:
        self._place, self._memory = place, memory

    @classmethod
    def opened(cls, place: Message | None, before: SharedStaging | None) -> SharedStaging | None:
        """The memory at a place, or `before` if that is it; None if this process cannot open it."""
        if place is None or not possible() or not _PATH.fullmatch(str(place["path"])) or place["host"] != this_host():
            return None
        if before is not None and before._place == place:
            return before
        try:
            return cls(place, Mapped(place["path"]))
        except (OSError, RuntimeError):
            return None

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Where a bucket belongs."""
        return self._memory.tensor(int(self._place["offset"]) + offset, nbytes, torch.uint8)
