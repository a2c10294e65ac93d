"""Memory of a receiver into which senders of the same host and user write, so that nothing is sent through a socket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardkit.core.runtime.shared.meeting import possible
from shardkit.core.runtime.shared.segment import Mapping as Mapped
from shardkit.core.runtime.shared.segment import NoSharedMemoryError, Segment, aligned

__all__ = ["SharedStaging", "Staging"]

_PATH = re.compile(r"/proc/\d+/fd/\d+")


def _host() -> str:
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

    def place(self) -> dict[str, Any] | None:
        """Where senders find the memory; None if it is not shared."""
        if self._segment is None:
            return None
        offsets = [[rank, offset] for rank, offset in self._offsets.items()]
        return {"host": _host(), "path": self._segment.path, "number": self._segment.number, "offsets": offsets}


class SharedStaging:
    """A receiver's `Staging` as a sender of its host sees it."""

    def __init__(self, place: dict[str, Any], memory: Mapped) -> None:
        self.place, self._memory, self._offsets = place, memory, dict(place["offsets"])

    @classmethod
    def opened(cls, place: dict[str, Any] | None, before: SharedStaging | None) -> SharedStaging | None:
        """The memory at a place, or `before` if that is it; None if this process cannot open it."""
        if place is None or not possible() or not _PATH.fullmatch(str(place.get("path"))):
            return None
        if before is not None and before.place == place:
            return before
        try:
            return cls(place, Mapped(place["path"])) if place["host"] == _host() else None
        except (OSError, RuntimeError):
            return None

    def part(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes that sender `rank` writes."""
        return self._memory.tensor(self._offsets[rank] + offset, nbytes, torch.uint8)
