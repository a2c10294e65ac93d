"""Memory of a receiver into which processes of the same host and user write, so that nothing goes through a socket."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.meeting import possible
from shardkit.weights.wire import Message

_PATH = re.compile(r"/proc/\d+/fd/\d+")


def this_host() -> str:
    """Equal for processes that see each other's descriptors: one boot, one namespace of processes, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getuid()}"


class Staging(NamedTuple):
    """The bytes of a sender that a receiver has and has not taken yet; `place`, if shared, is where others write."""

    data: torch.Tensor
    place: Message | None


def staging(sizes: Mapping[int, int]) -> dict[int, Staging]:
    """Memory for the bytes of each sender."""
    total = sum(map(segment.aligned, sizes.values()))
    shared, found, offset = None, {}, 0
    with contextlib.suppress(segment.NoSharedMemoryError):  # what is sent goes through sockets then
        shared = segment.Segment(total) if possible() and total else None
    memory = torch.empty(total, dtype=torch.uint8) if shared is None else torch.frombuffer(shared, dtype=torch.uint8)
    for rank, size in sizes.items():
        place: Message | None = None
        if shared is not None:
            place = {"host": this_host(), "path": shared.path, "number": shared.number}
            place |= {"offset": offset, "nbytes": size}
        found[rank] = Staging(memory[offset : offset + size], place)
        offset += segment.aligned(size)
    return found


def opened(place: Message | None) -> torch.Tensor | None:
    """The memory at a place; None if this process cannot open it."""
    if place is None or not possible() or not _PATH.fullmatch(str(place["path"])) or place["host"] != this_host():
        return None
    try:
        return segment.Mapping(place["path"]).tensor(int(place["offset"]), int(place["nbytes"]), torch.uint8)
    except (OSError, RuntimeError):
        return None
