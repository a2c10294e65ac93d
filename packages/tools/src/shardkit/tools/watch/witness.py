"""Keeps track of where this rank is, from core's events: cheap enough to listen all the time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.optim import Optimizer

from shardkit.core import events
from shardkit.tools.profiling.log import OptimizerBegan, OptimizerEnded
from shardkit.tools.profiling.whereabouts import Whereabouts
from shardkit.tools.watch.statement import Started, Statement, WaitingFor

__all__ = ["Witness"]

_REMEMBERED = 64
_FRAMES = 100

_Began: TypeAlias = events.GatherStarted | events.ReduceStarted | events.AllReduceStarted
_Ended: TypeAlias = events.GatherFinished | events.ReduceFinished | events.AllReduceFinished

_KINDS: dict[type, str] = {
    events.GatherStarted: "all-gather",
    events.GatherFinished: "all-gather",
    events.ReduceStarted: "reduce-scatter",
    events.ReduceFinished: "reduce-scatter",
    events.AllReduceStarted: "all-reduce",
    events.AllReduceFinished: "all-reduce",
}


class Witness:
    """Listens on the threads that emit; asked by the watcher's thread. A lock keeps the two apart.

    Args:
        failed: called, on the thread that is about to raise, when a wait fails.
    """

    def __init__(self, rank: int, failed: Callable[[events.WaitFailed], None]) -> None:
        self._rank = rank
        self._failed = failed
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._where = Whereabouts(trains=True)
        self._groups: dict[dist.ProcessGroup, list[int]] = {}
        self._counts: Counter[tuple[str, dist.ProcessGroup]] = Counter()
        self._last: dict[tuple[str, dist.ProcessGroup], deque[str]] = {}
        self._open: dict[tuple[str, str], deque[tuple[dist.ProcessGroup, int]]] = {}
        self._waits: list[tuple[float, events.WaitStarted, tuple[dist.ProcessGroup, str, int] | None]] = []
        self._queued: deque[tuple[float, events.Launched, tuple[dist.ProcessGroup, str, int] | None]] = deque()
        self._newest: tuple[dist.ProcessGroup, str, int] | None = None

    def hear(self, event: events.Event) -> None:
        """Takes an event in."""
        with self._lock:
            if isinstance(event, events.ModuleBegan | events.ModuleEnded | events.BackwardEnded):
                self._where.follow(event)
            elif isinstance(event, events.GatherStarted | events.ReduceStarted | events.AllReduceStarted):
                self._began(event)
            elif isinstance(event, events.GatherFinished | events.ReduceFinished | events.AllReduceFinished):
                self._ended(event)
            elif isinstance(event, events.Launched) and event.span is not None:
                self._queued.append((time.monotonic(), event, self._newest))
            elif type(event) is events.WaitStarted:
                self._waits.append((time.monotonic(), event, self._target(event)))
        if isinstance(event, events.WaitFailed):
            self._failed(event)
        if isinstance(event, events.WaitFinished | events.WaitFailed) and getattr(event, "span", None) is None:
            with self._lock:
                if self._waits:
                    self._waits.pop()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step begins."""
        with self._lock:
            self._where.follow(OptimizerBegan())

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step has ended."""
        with self._lock:
            self._where.follow(OptimizerEnded())

    # -- what the watcher asks -----------------------------------------------------------------------------------------

    def waiting(self) -> WaitingFor | None:
        """The innermost wait, or on a device the oldest communication that it has not got through; None if none."""
        with self._lock:
            while self._queued and self._queued[0][1].span is not None and self._queued[0][1].span.done:
                self._queued.popleft()
            if self._waits:
                began, event, target = self._waits[-1]
                return self._described(began, event.operation, event.fqn, target)
            if self._queued:
                began, launched, target = self._queued[0]
                return self._described(began, launched.operation, launched.fqn, target)
        return None

    def statement(self, failure: str | None) -> Statement:
        """Everything that is known of this rank now."""
        waiting = self.waiting()
        with self._lock:
            started = [
                Started(kind, group.group_name, self._groups[group], count, list(self._last[kind, group]))
                for (kind, group), count in self._counts.items()
            ]
            where = self._where
            return Statement(
                self._rank, where.step, where.phase, where.module, waiting, started, self._stack(), failure
            )

    def _described(
        self, began: float, operation: str, fqn: str, target: tuple[dist.ProcessGroup, str, int] | None
    ) -> WaitingFor:
        seconds = time.monotonic() - began
        if target is None:
            return WaitingFor(operation, operation, fqn, "", [], -1, seconds)
        group, kind, number = target
        return WaitingFor(operation, kind, fqn, group.group_name, self._groups[group], number, seconds)

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return []
        found = traceback.extract_stack(frame)[-_FRAMES:]
        return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in found]

    # -- events --------------------------------------------------------------------------------------------------------

    def _began(self, event: _Began) -> None:
        kind, group = _KINDS[type(event)], event.group
        if group not in self._groups:
            self._groups[group] = dist.get_process_group_ranks(group)
        key = (kind, group)
        self._newest = (group, kind, self._counts[key])
        self._open.setdefault((kind, event.fqn), deque()).append((group, self._counts[key]))
        self._counts[key] += 1
        self._last.setdefault(key, deque(maxlen=_REMEMBERED)).append(event.fqn)

    def _ended(self, event: _Ended) -> None:
        waiting = self._open.get((_KINDS[type(event)], event.fqn), deque())
        for one in waiting:
            if one[0] is event.group:  # two models may have modules of one name
                waiting.remove(one)
                return

    def _target(self, event: events.WaitStarted) -> tuple[dist.ProcessGroup, str, int] | None:
        """Which collective a wait is for: the oldest under way that fits; a release is of the newest gather."""
        if event.operation == "all-gather":
            kinds: tuple[str, ...] = ("all-gather",)
        elif event.operation == "reduce-scatter":
            kinds = ("reduce-scatter", "all-reduce")
        else:
            return None
        for kind in kinds:
            if waiting := self._open.get((kind, event.fqn)):
                group, number = waiting[0]
                return group, kind, number
        return None
