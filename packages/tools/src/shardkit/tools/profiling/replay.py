"""Converts a recorder's log to the record of its rank."""

from __future__ import annotations

import datetime as dt
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import __version__, events
from shardkit.core.events import DeviceSpan
from shardkit.tools.profiling.log import (
    CARRIED,
    FINISHED,
    STARTED,
    Entry,
    OptimizerBegan,
    OptimizerEnded,
    Whereabouts,
    last_complete,
)
from shardkit.tools.profiling.memory import Memory
from shardkit.tools.profiling.recorder import Recorder
from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.schema import (
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

# A shorter idle time is not a wait: the operation had already ended.
_IDLE = 20e-6
_PARTS = ("forward", "backward", "optimizer", "exposed", "blocked", "launch")


class Replay:
    """Reads a log once.

    Attributes:
        operations: finished operations, in the order of their start.
        waits, spans: in the order of their end.
        groups: the process groups of the operations, which refer to them by index.
        prefetches: hits and misses, by module.
        memory: the memory over the whole log.

    Args:
        trains: whether the log holds optimizer steps (see `Whereabouts`).
        groups: the recorder's data about each process group.
        anchor: a host time, and a timing event that the device had reached then; None on a CPU.
    """

    def __init__(
        self,
        entries: list[tuple[float, Entry]],
        trains: bool,
        groups: Mapping[dist.ProcessGroup, Group],
        anchor: tuple[float, Any] | None = None,
    ) -> None:
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.spans: list[Span] = []
        self.prefetches: Counter[tuple[str, type]] = Counter()
        self._anchor = anchor
        self._where = Whereabouts(trains)
        self.memory = Memory((entry for _, entry in entries), self._where)
        self._borders: list[float] = []
        self._forwards = 0
        self._group_index: dict[dist.ProcessGroup, int] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._under_way: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        self._unlaunched: list[Operation] = []
        self._waiting: list[tuple[Operation | None, float]] = []
        self._open: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        self._backward: tuple[float, int] | None = None
        self._seconds: dict[str, dict[int, float]] = {part: defaultdict(float) for part in _PARTS}
        reactions: dict[type, Callable[[float, Any], None]] = {
            **dict.fromkeys(STARTED, self._started),
            **dict.fromkeys(FINISHED, self._finished),
            events.Launched: self._launched,
            events.WaitStarted: self._wait_started,
            events.WaitFinished: self._wait_finished,
            events.WaitFailed: self._wait_failed,
            events.ModuleBegan: self._module_began,
            events.ModuleEnded: self._module_ended,
            events.BackwardEnded: self._backward_ended,
            OptimizerBegan: lambda now, _: self._begin("", "optimizer", now),
            OptimizerEnded: lambda now, _: self._close("", "optimizer", now, "optimizer"),
            **dict.fromkeys((events.PrefetchHit, events.PrefetchMiss), self._prefetch),
        }
        for now, entry in entries:
            if self._where.follow(entry):
                self._borders.append(now)
            reaction = reactions.get(type(entry))
            if reaction is not None:
                reaction(now, entry)
            self.memory.follow(now, entry)
        self.operations.sort(key=lambda one: one.start)
        self.groups = [groups[group] for group in self._group_index]

    def steps(self, begin: float, end: float) -> list[Step]:
        """The steps between `begin` and `end`; none if no root has run forward."""
        borders = [begin, *self._borders, end] if self._forwards else []
        return [
            Step(index, first, last, *(self._seconds[part][index] for part in _PARTS))
            for index, (first, last) in enumerate(pairwise(borders))
        ]

    # -- communication -------------------------------------------------------------------------------------------------

    def _started(self, time: float, event: events.GatherStarted) -> None:
        kind = STARTED[type(event)]
        group = self._group_index.setdefault(event.group, len(self._group_index))
        one = Operation(
            kind=kind,
            fqn=event.fqn,
            phase=self._where.phase,
            step=self._where.step,
            group=group,
            number=self._numbers[group, kind],
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
        self._numbers[group, kind] += 1
        self._under_way[kind, event.fqn].append(one)
        self._unlaunched.append(one)

    def _finished(self, time: float, event: events.GatherFinished) -> None:
        under_way = self._under_way[FINISHED[type(event)], event.fqn]
        if under_way:  # else it started before the recording
            one = under_way.pop(0)
            one.end = time
            self.operations.append(one)

    def _launched(self, time: float, event: events.Launched) -> None:
        self._seconds["launch"][self._where.step] += event.seconds
        launched, self._unlaunched = self._unlaunched, []
        for one in launched:
            if one.fqn == event.fqn and one.kind in CARRIED.get(event.operation, ()):
                one.launch = event.seconds
                if event.span is not None and self._anchor is not None:
                    seconds = event.span.seconds()
                    host, device = self._anchor
                    one.start = host + DeviceSpan(device, event.span.begin).seconds()
                    one.end = one.start + seconds
                    one.end_seen = True

    def _wait_started(self, time: float, event: events.WaitStarted) -> None:
        """The wait is for the oldest matching operation in flight."""
        fits = [one for kind in CARRIED.get(event.operation, ()) for one in self._under_way[kind, event.fqn]]
        self._waiting.append((min(fits, key=lambda one: one.start, default=None), time))

    def _wait_failed(self, time: float, event: events.WaitFailed) -> None:
        if self._waiting:
            self._waiting.pop()

    def _wait_finished(self, time: float, event: events.WaitFinished) -> None:
        seconds = event.seconds if event.span is None else event.span.seconds()
        blocked = event.blocked if event.span is None else seconds
        self._seconds["exposed"][self._where.step] += seconds
        self._seconds["blocked"][self._where.step] += blocked
        where = self._where
        if event.span is not None:
            # The compute stream waited for the newest operation of this group on the lane.
            kinds = CARRIED.get(event.operation, ())
            carried = (one for one in reversed(self.operations) if one.fqn == event.fqn and one.kind in kinds)
            target, began = next(carried, None), time
        else:
            target, began = self._waiting.pop() if self._waiting else (None, time)
            if target is None:
                self.waits.append(
                    Wait(event.operation, event.fqn, where.module, where.phase, where.step, began, seconds)
                )
        if target is None:
            return
        target.exposed += seconds
        target.blocked += blocked
        target.waited_by = where.module
        if event.span is None and target.transport == "shared":
            target.moving += seconds - blocked
            target.end_seen = True
        elif event.span is None and blocked > _IDLE:
            target.end = began + blocked
            target.end_seen = True

    # -- modules and steps ---------------------------------------------------------------------------------------------

    def _module_began(self, time: float, event: events.ModuleBegan) -> None:
        self._begin(event.fqn, event.phase, time)
        if event.phase == "backward" and self._backward is None:
            self._backward = (time, self._where.step)

    def _module_ended(self, time: float, event: events.ModuleEnded) -> None:
        outermost = event.root and event.phase == "forward"
        self._forwards += outermost
        self._close(event.fqn, event.phase, time, "forward" if outermost else "")

    def _backward_ended(self, time: float, event: events.BackwardEnded) -> None:
        if self._backward is not None:
            begin, step = self._backward
            self._seconds["backward"][step] += time - begin
            self._backward = None

    def _begin(self, fqn: str, phase: str, time: float) -> None:
        self._open[fqn, phase].append((time, self._where.step))

    def _close(self, fqn: str, phase: str, time: float, part: str) -> None:
        if self._open[fqn, phase]:
            begin, step = self._open[fqn, phase].pop()
            self.spans.append(Span(fqn, phase, step, begin, time))
            if part:
                self._seconds[part][step] += time - begin

    def _prefetch(self, time: float, event: events.PrefetchHit | events.PrefetchMiss) -> None:
        self.prefetches[event.fqn, type(event)] += 1


def record_of(recorder: Recorder) -> RankRecord:
    """The record of a stopped recorder. Not collective.

    Entries after the last optimizer step are dropped, because they are not a whole step. There are no steps if the
    recording ended within its warm-up, or before a root's forward had ended.
    """
    entries = recorder.entries
    complete = last_complete(entry for _, entry in entries)
    end = recorder.ended
    if complete is not None and not recorder.full:
        entries = entries[:complete]
        end = entries[-1][0]
    replay = Replay(entries, complete is not None, recorder.groups, recorder.anchor)
    steps = replay.steps(recorder.began, end) if recorder.warm else []
    shard_bytes: Counter[str] = Counter()
    for fqn, size in recorder.shards.items():
        if fqn not in recorder.owned:
            shard_bytes[replay.memory.owner(fqn)] += size
    rank = Rank(
        rank=recorder.rank,
        place=PlaceOfRank.of_this_process(),
        begin=recorder.began,
        end=end,
        truncated=recorder.truncated,
        steps=steps,
        operations=replay.operations,
        waits=replay.waits,
        spans=replay.spans,
        modules=_modules(replay, recorder.holders),
        memory=replay.memory.result(),
        shard_bytes=dict(shard_bytes),
        owned={fqn: size for fqn, size in recorder.shards.items() if fqn in recorder.owned},
        capacity=recorder.capacity,
        overhead=Overhead(
            recorder.overhead,
            recorder.overhead / max(recorder.ended - recorder.began, 1e-9),
            len(recorder.entries),
        ),
    )
    device = recorder.device
    run = Run(
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=list(sys.argv),
        shardkit=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
        backend=recorder.backend,
        world_size=recorder.world_size,
        missing_ranks=[],
        recorded_steps=len(steps),
        clock="host",
        activations=recorder.activations,
    )
    return RankRecord(run, time.time() - time.perf_counter(), replay.groups, rank)


def _modules(replay: Replay, holders: dict[str, str]) -> list[ModuleOfRank]:
    of_module: dict[str, set[str]] = defaultdict(set)
    for fqn, holder in holders.items():
        of_module[replay.memory.owner(fqn)].add(holder)
    peaks, prefetches = replay.memory.module_peaks, replay.prefetches
    return [
        ModuleOfRank(
            fqn=name,
            holders=sorted(of_module[name]),
            prefetch_hits=prefetches[name, events.PrefetchHit],
            prefetch_misses=prefetches[name, events.PrefetchMiss],
            unsharded_peak=peaks[name]["unsharded_parameters"],
            gradients_peak=peaks[name]["gradients"],
            communication_peak=peaks[name]["communication"],
            activations_peak=peaks[name]["activations"],
        )
        for name in dict.fromkeys([*peaks, *(fqn for fqn, _ in prefetches)])
    ]
