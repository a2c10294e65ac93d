"""From events to operations: each collective with its start, its end, and who waited for it how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from shardkit.core import events
from shardkit.tools.profiling.log import Entry
from shardkit.tools.profiling.whereabouts import Whereabouts
from shardkit.tools.report.schema import CollectiveKind, Group, Operation, Phase, Wait

__all__ = ["DeviceClock", "Operations"]

_STARTED: dict[type, CollectiveKind] = {
    events.GatherStarted: "all-gather",
    events.ReduceStarted: "reduce-scatter",
    events.AllReduceStarted: "all-reduce",
}
_FINISHED: dict[type, CollectiveKind] = {
    events.GatherFinished: "all-gather",
    events.ReduceFinished: "reduce-scatter",
    events.AllReduceFinished: "all-reduce",
}
# A lane of core carries these.
_KINDS: dict[str, tuple[CollectiveKind, ...]] = {
    "all-gather": ("all-gather",),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
}
# Who was idle for less was not waiting: the end had come before.
_IDLE = 20e-6

_Started: TypeAlias = events.GatherStarted | events.ReduceStarted | events.AllReduceStarted


@dataclass
class _Open:
    event: _Started
    kind: CollectiveKind
    phase: Phase
    step: int
    group: int
    number: int
    start: float
    end: float = 0.0
    end_seen: bool = False
    exposed: float = 0.0
    blocked: float = 0.0
    moving: float = 0.0
    launch: float = 0.0
    waited_by: str = ""


class DeviceClock:
    """Turns timing events of a device into host time, by one that was recorded at a known time."""

    def __init__(self, anchor: tuple[float, object]) -> None:
        self._time, self._event = anchor

    def times(self, span: events.DeviceSpan) -> tuple[float, float]:
        """Host times of the span's begin and end. Blocks until the device is there."""
        seconds = span.seconds()
        begin = self._time + events.DeviceSpan(self._event, span.begin).seconds()
        return begin, begin + seconds


class Operations:
    """Follows a log; `finished`, `waits` and `groups` are what came out of it.

    Args:
        clock: of the device; None on a CPU.
        known: what the recorder has written down about each process group.
    """

    def __init__(self, clock: DeviceClock | None, known: Mapping[dist.ProcessGroup, Group]) -> None:
        self.finished: list[_Open] = []
        self.waits: list[Wait] = []
        self.launches: list[tuple[int, float]] = []
        self.groups: list[Group] = []
        self._clock = clock
        self._known = known
        self._group_index: dict[dist.ProcessGroup, int] = {}
        self._numbers: Counter[tuple[int, CollectiveKind]] = Counter()
        self._open: dict[tuple[CollectiveKind, str], list[_Open]] = {}
        self._unlaunched: list[_Open] = []
        self._waiting: list[tuple[_Open | None, float]] = []

    def follow(self, time: float, entry: Entry, where: Whereabouts) -> None:
        """Takes the next entry in."""
        kind = type(entry)
        if isinstance(entry, events.GatherStarted | events.ReduceStarted | events.AllReduceStarted):
            self._started(time, entry, where)
        elif kind in _FINISHED:
            self._ended(time, _FINISHED[kind], entry.fqn)  # type: ignore[union-attr]
        elif isinstance(entry, events.Launched):
            self._launched(entry, where)
        elif isinstance(entry, events.WaitStarted):
            self._wait(time, entry, where)

    def operations(self, origin: float) -> list[Operation]:
        """The operations that have ended, in the order of their start, with times since `origin`."""
        return [_operation(one, origin) for one in sorted(self.finished, key=lambda one: one.start)]

    # -- entries -------------------------------------------------------------------------------------------------------

    def _started(self, time: float, event: _Started, where: Whereabouts) -> None:
        kind = _STARTED[type(event)]
        group = self._index(event.group)
        number = self._numbers[group, kind]
        self._numbers[group, kind] += 1
        one = _Open(event, kind, where.phase, where.step, group, number, time)
        self._open.setdefault((kind, event.fqn), []).append(one)
        self._unlaunched.append(one)

    def _ended(self, time: float, kind: CollectiveKind, fqn: str) -> None:
        waiting = self._open.get((kind, fqn))
        if not waiting:  # it was started before the recording
            return
        one = waiting.pop(0)
        one.end = time
        self.finished.append(one)

    def _launched(self, event: events.Launched, where: Whereabouts) -> None:
        self.launches.append((where.step, event.seconds))
        launched, self._unlaunched = self._unlaunched, []
        for one in launched:
            if one.event.fqn == event.fqn and one.kind in _KINDS.get(event.operation, ()):
                one.launch = event.seconds
                if event.span is not None and self._clock is not None:
                    one.start, one.end = self._clock.times(event.span)
                    one.end_seen = True

    def _wait(self, time: float, entry: events.WaitStarted, where: Whereabouts) -> None:
        if type(entry) is events.WaitStarted:
            self._waiting.append((self._target(entry), time))
            return
        if isinstance(entry, events.WaitFinished) and entry.span is not None:
            self._stood_still(entry, where)
            return
        target, began = self._waiting.pop() if self._waiting else (None, time)
        if not isinstance(entry, events.WaitFinished):
            return
        if target is None:
            wait = Wait(entry.operation, entry.fqn, where.module, where.phase, where.step, began, entry.seconds)
            self.waits.append(wait)
            return
        target.exposed += entry.seconds
        target.blocked += entry.blocked
        target.waited_by = where.module
        if target.event.transport == "shared":
            target.moving += entry.seconds - entry.blocked
            target.end_seen = True
        elif entry.blocked > _IDLE:
            target.end = began + entry.blocked
            target.end_seen = True

    def _stood_still(self, entry: events.WaitFinished, where: Whereabouts) -> None:
        """The compute stream of a device waited: for the newest operation that the lane has carried for this group."""
        assert entry.span is not None
        seconds = entry.span.seconds()
        for one in reversed(self.finished):
            if one.event.fqn == entry.fqn and one.kind in _KINDS.get(entry.operation, ()):
                one.exposed += seconds
                one.blocked += seconds
                one.waited_by = where.module
                return

    def _target(self, entry: events.WaitStarted) -> _Open | None:
        """The oldest operation under way that this wait can be for."""
        found = [one for kind in _KINDS.get(entry.operation, ()) for one in self._open.get((kind, entry.fqn), ())]
        return min(found, key=lambda one: one.start, default=None)

    def _index(self, group: dist.ProcessGroup) -> int:
        if group not in self._group_index:
            self._group_index[group] = len(self.groups)
            self.groups.append(self._known[group])
        return self._group_index[group]


def _operation(one: _Open, origin: float) -> Operation:
    event = one.event
    return Operation(
        kind=one.kind,
        fqn=event.fqn,
        phase=one.phase,
        step=one.step,
        group=one.group,
        number=one.number,
        bytes=event.bytes,
        wire_bytes=event.wire_bytes,
        padding_bytes=event.padding_bytes,
        dtype=str(event.dtype).removeprefix("torch."),
        transport=event.transport,
        start=one.start - origin,
        end=one.end - origin,
        end_seen=one.end_seen,
        exposed=one.exposed,
        blocked=one.blocked,
        moving=one.moving,
        launch=one.launch,
        waited_by=one.waited_by,
    )
