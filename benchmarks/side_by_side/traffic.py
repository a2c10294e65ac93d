"""The bytes that one rank sends in one step, counted outside of the timed steps."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

_IO = Path("/proc/self/io")


def socket_bytes(step: Callable[[], None]) -> int | None:
    """Bytes that the process writes while `step` runs: gloo's sockets, for every system alike.

    They are the bytes on the wire, headers included. None where the kernel does not count them.
    """
    if not _IO.exists():
        return None
    before = _written()
    step()
    return _written() - before


def c10d_calls(step: Callable[[], None]) -> dict[str, int]:
    """Calls of process group operations by name while `step` runs, those from C++ (DDP's) included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    names = Counter(event.name for event in profiler.events())
    return {name.removeprefix("c10d::"): count for name, count in names.items() if name.startswith("c10d::")}


def _written() -> int:
    line = next(line for line in _IO.read_text().splitlines() if line.startswith("wchar:"))
    return int(line.split()[1])
