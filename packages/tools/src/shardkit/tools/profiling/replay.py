"""From a recorder's log to the record of its rank."""

from __future__ import annotations

import datetime as dt
import os
import platform
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import __version__, events
from shardkit.core.events import BackwardEnded, ModuleBegan, ModuleEnded, PrefetchHit, PrefetchMiss, WaitFinished
from shardkit.tools.profiling.log import Entry, OptimizerBegan, OptimizerEnded, Whereabouts, last_complete
from shardkit.tools.profiling.memory import Memory
from shardkit.tools.profiling.recorder import Recorder
from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.schema import (
    CollectiveKind,
    Group,
    ModuleOfRank,
    Operation,
    Overhead,
    PlaceOfRank,
    Rank,
    Run,
    Span,
    Step,
    Wait,
)

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
_CARRIED: dict[str, tuple[CollectiveKind, ...]] = {
    "all-gather": ("all-gather",),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
}
# Who was idle for less was not waiting: the end had come before.
_IDLE = 20e-6

_Started: TypeAlias = events.GatherStarted | events.ReduceStarted | events.AllReduceStarted


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
        self.finished: list[Operation] = []
        self.waits: list[Wait] = []
        self.launches: list[tuple[int, float]] = []
        self.groups: list[Group] = []
        self._clock = clock
        self._known = known
        self._group_index: dict[dist.ProcessGroup, int] = {}
        self._numbers: Counter[tuple[int, CollectiveKind]] = Counter()
        self._open: dict[tuple[CollectiveKind, str], list[Operation]] = {}
        self._unlaunched: list[Operation] = []
        self._waiting: list[tuple[Operation | None, float]] = []

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

    def operations(self) -> list[Operation]:
        """The operations that have ended, in the order of their start."""
        return sorted(self.finished, key=lambda one: one.start)

    # -- entries -------------------------------------------------------------------------------------------------------

    def _started(self, time: float, event: _Started, where: Whereabouts) -> None:
        kind = _STARTED[type(event)]
        group = self._index(event.group)
        number = self._numbers[group, kind]
        self._numbers[group, kind] += 1
        one = Operation(
            kind=kind,
            fqn=event.fqn,
            phase=where.phase,
            step=where.step,
            group=group,
            number=number,
            bytes=event.bytes,
            wire_bytes=event.wire_bytes,
            padding_bytes=event.padding_bytes,
            dtype=str(event.dtype).removeprefix("torch."),
            transport=event.transport,
            start=time,
            end=time,
            end_seen=False,
            exposed=0.0,
            blocked=0.0,
            moving=0.0,
            launch=0.0,
            waited_by="",
        )
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
            if one.fqn == event.fqn and one.kind in _CARRIED.get(event.operation, ()):
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
        if target.transport == "shared":
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
            if one.fqn == entry.fqn and one.kind in _CARRIED.get(entry.operation, ()):
                one.exposed += seconds
                one.blocked += seconds
                one.waited_by = where.module
                return

    def _target(self, entry: events.WaitStarted) -> Operation | None:
        """The oldest operation under way that this wait can be for."""
        found = [one for kind in _CARRIED.get(entry.operation, ()) for one in self._open.get((kind, entry.fqn), ())]
        return min(found, key=lambda one: one.start, default=None)

    def _index(self, group: dist.ProcessGroup) -> int:
        if group not in self._group_index:
            self._group_index[group] = len(self.groups)
            self.groups.append(self._known[group])
        return self._group_index[group]


class Spans:
    """Follows a log; `spans` in the order of their end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        self._borders: list[float] = []
        self._forwards = 0
        self._backward: tuple[float, int] | None = None
        self._parts: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._exposed: dict[int, float] = defaultdict(float)
        self._blocked: dict[int, float] = defaultdict(float)

    def follow(self, time: float, entry: Entry, where: Whereabouts, *, new_step: bool) -> None:
        """Takes the next entry in."""
        if new_step:
            self._borders.append(time)
        if isinstance(entry, ModuleBegan):
            self._open[entry.fqn, entry.phase].append((time, where.step))
            if entry.phase == "backward" and self._backward is None:
                self._backward = (time, where.step)
        elif isinstance(entry, ModuleEnded):
            outermost = entry.root and entry.phase == "forward"
            self._forwards += outermost
            self._close(entry.fqn, entry.phase, time, "forward" if outermost else "")
        elif isinstance(entry, BackwardEnded) and self._backward is not None:
            begin, step = self._backward
            self._parts["backward"][step] += time - begin
            self._backward = None
        elif isinstance(entry, OptimizerBegan):
            self._open["", "optimizer"].append((time, where.step))
        elif isinstance(entry, OptimizerEnded):
            self._close("", "optimizer", time, "optimizer")
        elif isinstance(entry, WaitFinished):
            seconds = entry.span.seconds() if entry.span is not None else entry.seconds
            self._exposed[where.step] += seconds
            self._blocked[where.step] += seconds if entry.span is not None else entry.blocked

    def steps(self, begin: float, end: float, launches: list[tuple[int, float]]) -> list[Step]:
        """The steps between `begin` and `end`; none if no root has run forward."""
        launch: dict[int, float] = defaultdict(float)
        for step, seconds in launches:
            launch[step] += seconds
        if not self._forwards:
            return []
        borders = [begin, *self._borders, end]
        return [
            Step(
                index=index,
                begin=borders[index],
                end=borders[index + 1],
                forward=self._parts["forward"][index],
                backward=self._parts["backward"][index],
                optimizer=self._parts["optimizer"][index],
                exposed=self._exposed[index],
                blocked=self._blocked[index],
                launch=launch[index],
            )
            for index in range(len(borders) - 1)
        ]

    def _close(self, fqn: str, phase: str, time: float, part: str) -> None:
        opened = self._open[fqn, phase]
        if not opened:
            return
        begin, step = opened.pop()
        self.spans.append(Span(fqn, phase, step, begin, time))
        if part:
            self._parts[part][step] += time - begin


def record_of(recorder: Recorder, *, activations: bool) -> RankRecord:
    """What a recorder that has stopped makes known. Not collective.

    What comes after the last optimizer step is left out: it is no whole step. There are no steps if the recording ended
    within its warm-up, or before a root's forward had ended.
    """
    overhead = recorder.overhead
    entries = recorder.entries
    complete = last_complete(entry for _, entry in entries)
    end = recorder.ended
    if complete is not None and not recorder.full:
        entries = entries[:complete]
        end = entries[-1][0]
    clock = None if recorder.anchor is None else DeviceClock(recorder.anchor)
    operations, spans, memory = Operations(clock, recorder.groups), Spans(), Memory(entry for _, entry in entries)
    prefetches = _replay(entries, complete is not None, operations, spans, memory)
    steps = spans.steps(recorder.began, end, operations.launches) if recorder.warm else []
    rank = Rank(
        rank=recorder.world.rank,
        place=_place(),
        begin=recorder.began,
        end=end,
        truncated=recorder.truncated,
        steps=steps,
        operations=operations.operations(),
        waits=operations.waits,
        spans=spans.spans,
        modules=_modules(prefetches, memory, recorder.holders),
        memory=memory.result(),
        shard_bytes=_by_module({k: v for k, v in recorder.shards.items() if k not in recorder.owned}, memory),
        owned={fqn: size for fqn, size in recorder.shards.items() if fqn in recorder.owned},
        overhead=Overhead(overhead, overhead / max(recorder.ended - recorder.began, 1e-9), len(recorder.entries)),
    )
    run = _run(recorder, len(steps), activations=activations)
    return RankRecord(run, time.time() - time.perf_counter(), operations.groups, rank)


def _replay(
    entries: list[tuple[float, Entry]], trains: bool, operations: Operations, spans: Spans, memory: Memory
) -> Counter[tuple[str, type]]:
    where = Whereabouts(trains)
    prefetches: Counter[tuple[str, type]] = Counter()
    for now, entry in entries:
        new_step = where.follow(entry)
        operations.follow(now, entry, where)
        spans.follow(now, entry, where, new_step=new_step)
        memory.follow(now, entry, where)
        if isinstance(entry, PrefetchHit | PrefetchMiss):
            prefetches[entry.fqn, type(entry)] += 1
    return prefetches


def _by_module(shards: dict[str, int], memory: Memory) -> dict[str, int]:
    held: Counter[str] = Counter()
    for fqn, size in shards.items():
        held[memory.owner(fqn)] += size
    return dict(held)


def _modules(prefetches: Counter[tuple[str, type]], memory: Memory, holders: dict[str, str]) -> list[ModuleOfRank]:
    of_module: dict[str, set[str]] = defaultdict(set)
    for fqn, holder in holders.items():
        of_module[memory.owner(fqn)].add(holder)
    names = dict.fromkeys([*memory.module_peaks, *(fqn for fqn, _ in prefetches)])
    return [
        ModuleOfRank(
            fqn=name,
            holders=sorted(of_module[name]),
            prefetch_hits=prefetches[name, PrefetchHit],
            prefetch_misses=prefetches[name, PrefetchMiss],
            unsharded_peak=memory.module_peaks[name]["unsharded_parameters"],
            gradients_peak=memory.module_peaks[name]["gradients"],
            communication_peak=memory.module_peaks[name]["communication"],
            activations_peak=memory.module_peaks[name]["activations"],
        )
        for name in names
    ]


def _run(recorder: Recorder, steps: int, *, activations: bool) -> Run:
    return Run(
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=list(sys.argv),
        shardkit=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=_device_name(recorder.device),
        backend=recorder.world.backend,
        world_size=recorder.world.size,
        missing_ranks=[],
        recorded_steps=steps,
        clock="host",
        activations=activations,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def _place() -> PlaceOfRank:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return PlaceOfRank(socket.gethostname(), boot, os.getpid())
