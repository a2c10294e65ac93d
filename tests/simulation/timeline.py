"""The timeline: how long forward and backward take when kernels and collectives have costs, and nothing else does.

Every stream has a clock, and so has every communicator (a process group): a collective begins when its stream and its
communicator are free. The host takes no time, except in waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tests.simulation.device import Access, Observer


@dataclass(frozen=True)
class Costs:
    """Time per byte. For collectives: per byte that a rank sends in a ring; for `copy`: per byte read or written."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    copy: float = 0.0
    transfer: float = 0.0

    def of_collective(self, name: str, world: int, read: int, written: int) -> float:
        share = (world - 1) / world
        if name.startswith("allgather"):
            return written * share * self.all_gather
        if name.startswith("reduce_scatter"):
            return read * share * self.reduce_scatter
        if name.startswith("allreduce"):
            return 2 * read * share * self.all_reduce
        if name.startswith(("alltoall", "broadcast")):
            return read * share * self.all_gather
        raise NotImplementedError(f"the timeline knows no cost of c10d::{name}")


class Timeline(Observer):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.host = 0.0
        self._streams: dict[int, float] = defaultdict(float)
        self._links: dict[str, float] = defaultdict(float)
        self._events: dict[int, float] = defaultdict(float)

    def clock(self, stream: int = 0) -> float:
        """When `stream` is done with all that is queued on it."""
        return max(self._streams[stream], self.host)

    def settle(self) -> float:
        end = max([self.host, *self._streams.values(), *self._links.values()])
        self.host = end
        return end

    def _run(self, stream: int, cost: float, link: str | None = None) -> None:
        begin = self.clock(stream)
        if link is not None:
            begin = max(begin, self._links[link])
            self._links[link] = begin + cost
        self._streams[stream] = begin + cost

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        if self.simulation.declared:
            return
        copies = name == "copy" or "split_with_sizes_copy" in name
        if copies and any(access.allocation.notes.get("gathered") for access in accesses if not access.write):
            _holds_gathered(accesses)
        moved = sum(access.end - access.begin for access in accesses)
        if name in ("host_to_device", "device_to_host"):
            sizes = [access.end - access.begin for access in accesses if not access.allocation.pinned]
            self._run(stream, sum(sizes) * self.costs.transfer, name)
        else:
            self._run(stream, moved * self.costs.copy)

    def collective(self, name: str, stream: int, group: dist.ProcessGroup, accesses: Sequence[Access]) -> None:
        read = sum(access.end - access.begin for access in accesses if not access.write)
        written = sum(access.end - access.begin for access in accesses if access.write)
        self._run(stream, self.costs.of_collective(name, group.size(), read, written), group.group_name)
        if name.startswith("allgather"):
            _holds_gathered(accesses)

    def computed(self, stream: int, cost: float, what: str) -> None:
        self._run(stream, cost)

    def recorded(self, event: int, stream: int) -> None:
        self._events[event] = self.clock(stream)

    def waits(self, stream: int, event: int) -> None:
        self._streams[stream] = max(self._streams[stream], self._events[event])

    def host_waits(self, event: int, stream: int) -> None:
        if stream < 0:
            self.settle()
        else:
            self.host = max(self.host, self._events[event] if event > 0 else self._streams[stream])

    def elapsed(self, begin: int, end: int) -> float:
        return self._events[end] - self._events[begin]


def _holds_gathered(accesses: Sequence[Access]) -> None:
    for access in accesses:
        if access.write:
            access.allocation.notes["gathered"] = True
