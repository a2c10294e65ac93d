"""The race and lifetime checker: vector clocks over streams, events and the host.

A stream's clock counts its kernels, and its *known* vector says how many kernels of every other stream have ended
before the next kernel on it. Events carry that vector, and waiting joins it. The host has one, too, which everything
inherits that it queues later. A thread beside the host counts as a stream, whose kernels are its accesses. Every
allocation remembers its accesses until a later write covers them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.simulation.device import Access, Allocation, Observer

_OURS = ("device.py", "races.py", "faults.py", "capture.py", "threads.py")
_THREAD = -2
_LOOKED_THROUGH = ("<", sys.prefix, torch.__path__[0], *(str(Path(__file__).with_name(name)) for name in _OURS))
_ENGINE = "/shardkit/"

Known = dict[int, int]


@dataclass(frozen=True)
class Site:
    """A line of Python, and the lines of the engine that led to it, innermost first."""

    lines: tuple[str, ...]

    @property
    def in_engine(self) -> bool:
        return bool(self.lines) and _ENGINE in self.lines[0]

    @property
    def functions(self) -> str:
        """The names of the functions that the lines are in."""
        return " < ".join(line.split()[-1] for line in self.lines)

    def __str__(self) -> str:
        return " < ".join(line.rpartition("/shardkit/")[2] for line in self.lines) or "autograd"


def calling_site(depth: int = 3) -> Site:
    """The innermost Python lines outside of torch and the simulation; none in the middle of autograd."""
    frame = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(_LOOKED_THROUGH) and (not lines or _ENGINE in code.co_filename):
            lines.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return Site(tuple(lines))


@dataclass(frozen=True)
class _Past:
    """An access that later ones must come after. The host is stream -1, at time 0."""

    begin: int
    end: int
    write: bool
    stream: int
    time: int
    place: str


@dataclass
class _Life:
    """The state of an allocation.

    `ready`: kernels of its pool's stream when it was made. `earlier`: accesses to memory that had gone back to the pool
    by then, and so may be this memory; later ones must come after them, too. `filled`: the parts written. `recorded`:
    the streams of `record_stream`, which the allocator waits for by itself.
    """

    ready: int
    place: str
    earlier: list[_Past]
    accesses: list[_Past] = field(default_factory=list)
    filled: list[tuple[int, int]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)

    def fill(self, begin: int, end: int) -> None:
        apart = []
        for low, high in self.filled:
            if high < begin or low > end:
                apart.append((low, high))
            else:
                begin, end = min(begin, low), max(end, high)
        self.filled = [*apart, (begin, end)]

    def is_filled(self, begin: int, end: int) -> bool:
        return any(low <= begin and end <= high for low, high in self.filled)


class Checker(Observer):
    """Collects the first `limit` `findings`.

    `drops` decides which waits are left out, by the line that asks for them: planted faults.
    """

    def __init__(self, drops: Callable[[Site], bool] = lambda site: False, limit: int = 20) -> None:
        self.findings: dict[str, None] = {}  # in order, each once
        self.waited_at: set[Site] = set()  # lines of the engine that make a stream or the host wait
        self._drops = drops
        self._limit = limit
        self._streams: dict[int, Known] = {}
        self._events: dict[int, Known] = {}
        self._host: Known = {}
        self._thread: Known = {}
        self._in_thread = False
        self._pools: dict[int, dict[int, _Past]] = {}  # the last use, by each stream, of memory that went back
        self._module = "start"

    # -- order ---------------------------------------------------------------------------------------------------------

    def _known(self, stream: int) -> Known:
        return self._streams.setdefault(stream, {stream: 0})

    def _kept(self, site: Site) -> bool:
        """Whether a wait is to be simulated."""
        if not site.in_engine:
            return True
        self.waited_at.add(site)
        return not self._drops(site)

    def recorded(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._known(stream))

    def waits(self, stream: int, event: int) -> None:
        if self._kept(calling_site()):
            join(self._known(stream), self._events.get(event, {}))

    def host_waits(self, event: int, stream: int) -> None:
        if event > 0:
            sources = [self._events.get(event, {})]
        else:
            sources = list(self._streams.values()) if stream < 0 else [self._known(stream)]
        if event < 0 or self._kept(calling_site()):
            for source in sources:
                join(self._host, source)

    def computed(self, stream: int, cost: float, what: str) -> None:
        self._module = what

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocated(self, allocation: Allocation) -> None:
        stream = allocation.stream
        known = self._known(stream)
        join(known, self._host)
        pool = self._pools.setdefault(stream, {})
        earlier = [past for past in pool.values() if not allocation.pinned and not _is_after(known, stream, past)]
        allocation.notes["life"] = life = _Life(known[stream], str(calling_site()), earlier)
        if allocation.pinned:
            life.fill(0, allocation.nbytes)  # the host fills it, unseen

    def freed(self, allocation: Allocation) -> None:
        if allocation.pinned:  # the allocator of pinned memory waits for copies by itself
            return
        life: _Life = allocation.notes["life"]
        pool = self._pools.setdefault(allocation.stream, {})
        for past in life.accesses:
            last = pool.get(past.stream)
            if past.stream not in life.recorded and (last is None or last.time < past.time):
                pool[past.stream] = past

    def used_by(self, allocation: Allocation, stream: int) -> None:
        allocation.notes["life"].recorded.add(stream)

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        self._run(name, stream, accesses, reads_padding=False)

    def collective(self, name: str, stream: int, group: dist.ProcessGroup, accesses: Sequence[Access]) -> None:
        self._run(name, stream, accesses, reads_padding=True)

    def host_used(self, access: Access) -> None:
        if self._in_thread:
            self._host[_THREAD] = self._host.get(_THREAD, 0) + 1
            self._check(access, _THREAD, self._host[_THREAD], self._host, f"a thread at {calling_site()}")
        else:
            self._check(access, -1, 0, self._host, f"the host at {calling_site()}")

    def beside(self, work: Callable[[], None]) -> Known:
        """Does work of a thread that the host goes on beside, after its earlier work; returns what it knows then."""
        join(self._thread, self._host)
        host, self._host, self._in_thread = self._host, self._thread, True
        try:
            work()
        finally:
            self._host, self._in_thread = host, False
        return dict(self._thread)

    def host_joins(self, ended: Known) -> None:
        """The host waits for work of a thread."""
        if self._kept(calling_site()):
            join(self._host, ended)

    def _run(self, name: str, stream: int, accesses: Sequence[Access], *, reads_padding: bool) -> None:
        if len(self.findings) >= self._limit:
            return
        known = self._known(stream)
        join(known, self._host)
        known[stream] += 1
        place = f"{name} on stream {stream} at {calling_site()}, {self._module}"
        for access in sorted(accesses, key=lambda one: one.write):  # a kernel reads before it writes
            life: _Life = access.allocation.notes["life"]
            if not access.write and not reads_padding and not life.is_filled(access.begin, access.end):
                self._find("read before it was written", access.allocation, place)
            self._check(access, stream, known[stream], known, place)

    def _check(self, access: Access, stream: int, time: int, known: Known, place: str) -> None:
        allocation = access.allocation
        life: _Life = allocation.notes["life"]
        if not allocation.pinned and allocation.stream != stream and known.get(allocation.stream, 0) < life.ready:
            self._find("used before its pool's stream is done with it", allocation, place)
        for past in life.earlier:
            if not _is_after(known, stream, past):
                self._find("freed while in use, and used again", allocation, place, past)
        kept = []
        for past in life.accesses:
            apart = past.end <= access.begin or access.end <= past.begin
            after = _is_after(known, stream, past)
            if not apart and (access.write or past.write) and not after:
                self._find("race", allocation, place, past)
            covered = access.begin <= past.begin and past.end <= access.end
            same_reader = past.stream == stream and access.write == past.write
            if not (covered and after and (access.write or same_reader)):
                kept.append(past)
        kept.append(_Past(access.begin, access.end, access.write, stream, time, place))
        life.accesses = kept
        if access.write:
            life.fill(access.begin, access.end)

    def _find(self, kind: str, allocation: Allocation, place: str, past: _Past | None = None) -> None:
        earlier = ""
        if past is not None:
            earlier = f"\n  not ordered after the {'write' if past.write else 'read'} by {past.place}"
        life: _Life = allocation.notes["life"]
        memory = f"{allocation.nbytes} bytes of stream {allocation.stream}, allocated at {life.place}"
        self.findings[f"{kind}: {place}{earlier}\n  {memory}"] = None


def _is_after(known: Known, stream: int, past: _Past) -> bool:
    """Whether the next work on `stream`, which has `known`, comes after `past`."""
    return past.stream in (stream, -1) or known.get(past.stream, 0) >= past.time


def join(known: Known, more: Known) -> None:
    """Adds the order of `more` to `known`."""
    for stream, time in more.items():
        if known.get(stream, 0) < time:
            known[stream] = time
