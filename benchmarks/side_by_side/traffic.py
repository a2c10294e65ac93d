"""The bytes that one rank sends in one step, counted outside of the timed steps."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def shardkit_events() -> Iterator[dict[str, int]]:
    """Wire bytes and numbers of gathers and reductions, as shardkit's own events report them."""
    from shardkit.core import events

    counted = {"gathers": 0, "gather_wire_bytes": 0, "reductions": 0, "reduction_wire_bytes": 0}

    def listen(event: events.Event) -> None:
        if isinstance(event, events.GatherStarted):
            counted["gathers"] += 1
            counted["gather_wire_bytes"] += event.wire_bytes
        elif isinstance(event, events.ReduceStarted | events.AllReduceStarted):
            counted["reductions"] += 1
            counted["reduction_wire_bytes"] += event.wire_bytes

    with events.subscribe(listen):
        yield counted


def _written() -> int:
    line = next(line for line in _IO.read_text().splitlines() if line.startswith("wchar:"))
    return int(line.split()[1])
