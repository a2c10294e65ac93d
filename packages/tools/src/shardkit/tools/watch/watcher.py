"""The thread that watches: raises an alarm for a wait that takes too long, answers others' alarms, tells the verdict.

All ranks share a store. Alarm number `n` is a key in it; whoever sees it puts what there is to say about its own rank
beside it, waits a moment for the others, and reads what they said. The lowest rank that said something writes the
verdict. A rank that has died, is stopped, or cannot reach the store says nothing, and is told by that.

The thread has a connection of its own to the store, so a main thread that is stuck in it does not matter. When the
store itself is gone (it lives in rank 0's process unless torchrun holds it), the rank tells what it knows of itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core import events
from shardkit.tools.launching import WATCH_SECONDS
from shardkit.tools.profiling.log import OptimizerBegan, OptimizerEnded, Whereabouts
from shardkit.tools.torch_compat import own_store_connection
from shardkit.tools.watch.verdict import Place, Started, Statement, WaitingFor, from_text, to_text, verdict

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


# How long the others may take to answer: they look at the store a few times a second.
_GRACE = 2.0
_SLOWEST_LOOK = 0.5


class Store(Protocol):
    """What is used of c10d's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Puts a value in."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


def _place_key(rank: int) -> str:
    return f"place/{rank}"


def _alarm_key(number: int) -> str:
    return f"alarm/{number}"


def _said_key(number: int, rank: int) -> str:
    return f"said/{number}/{rank}"


class Watcher:
    """One rank's watcher. `begin` starts its thread, which ends with the process or with `end`.

    Args:
        store: a connection that nobody else uses.
        limit: seconds that a wait may take.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit: float) -> None:
        self.witness = Witness(rank, self._wait_failed)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._number = 0
        self._quiet_until = 0.0
        self._failure: str | None = None
        self._told = threading.Event()
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="shardkit-watch", daemon=True)

    def begin(self) -> None:
        """Tells the others where this process is and starts to watch."""
        self._store.set(_place_key(self._rank), Place.of_this_process().to_text())
        while self._store.check([_alarm_key(self._number)]):
            self._number += 1
        self._thread.start()

    def end(self) -> None:
        """Stops watching; a thread that is stuck in the store is left to itself."""
        self._ended = True
        self._wake.set()
        self._thread.join(_GRACE)

    # -- the main thread -----------------------------------------------------------------------------------------------

    def _wait_failed(self, event: events.WaitFailed) -> None:
        """Holds the error up until it has been reported: the process may end by it."""
        self._told.clear()
        self._failure = event.error
        self._wake.set()
        self._told.wait(2 * _GRACE + self._world_size * 0.01)

    # -- the watcher's thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended:
            self._wake.wait(min(_SLOWEST_LOOK, self._limit / 4))
            self._wake.clear()
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - c10d's RuntimeError; whatever else must not end the watch
                with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
                    self._tell_alone(error)
                self._told.set()

    def _look(self) -> None:
        failure = self._failure
        if failure is not None or self._too_long():
            self._store.set(_alarm_key(self._number), str(self._rank))
        elif not self._store.check([_alarm_key(self._number)]):
            return
        number, self._number = self._number, self._number + 1
        statement = self.witness.statement(failure)
        self._store.set(_said_key(number, self._rank), to_text(statement))
        self._be_quiet(statement)
        time.sleep(_GRACE)
        self._conclude(number)
        if failure is not None:
            self._failure = None
            self._told.set()

    def _too_long(self) -> bool:
        waiting = self.witness.waiting()
        return waiting is not None and waiting.seconds > self._limit and time.monotonic() > self._quiet_until

    def _be_quiet(self, statement: Statement) -> None:
        """One hang, one report: the next one is due when the wait has become twice as long."""
        waited = statement.waiting.seconds if statement.waiting is not None else 0.0
        self._quiet_until = time.monotonic() + max(self._limit, waited)

    def _conclude(self, number: int) -> None:
        """Reads what was said; the lowest of those who said something writes the verdict."""
        statements: dict[int, Statement] = {}
        silent: dict[int, str] = {}
        for rank in range(self._world_size):
            said = self._read(_said_key(number, rank))
            if said is not None:
                statements[rank] = from_text(said)
                if rank < self._rank:
                    return
            else:
                place = self._read(_place_key(rank))
                silent[rank] = Place.from_text(place).condition() if place else "has not begun to watch"
        self._write(verdict(statements, silent))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _tell_alone(self, error: Exception) -> None:
        """The store cannot be reached: this rank's own story, once a hang or failure."""
        failure, self._failure = self._failure, None
        if failure is not None or self._too_long():
            statement = self.witness.statement(failure)
            self._be_quiet(statement)
            lost = {rank: "unknown: the store is gone" for rank in range(self._world_size) if rank != self._rank}
            self._write(f"the store cannot be reached ({error})\n{verdict({self._rank: statement}, lost)}")
        self._told.set()

    def _write(self, text: str) -> None:
        lines = "".join(f"shardkit watch: {line}\n" for line in text.splitlines())
        sys.stderr.write(lines)
        sys.stderr.flush()


def start() -> None:
    """Begins to watch this process. Does nothing without a process group of several ranks.

    Raises:
        ValueError: for a limit that is no positive number.
    """
    limit = _seconds(os.environ.get(WATCH_SECONDS, "60"))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = own_store_connection("shardkit_watch")
    watcher = Watcher(store, dist.get_rank(), dist.get_world_size(), limit)
    watcher.begin()
    atexit.register(watcher.end)  # before the interpreter goes, under a thread that is in the store
    events.subscribe(watcher.witness.hear)
    register_optimizer_step_pre_hook(watcher.witness.before_step)
    register_optimizer_step_post_hook(watcher.witness.after_step)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{WATCH_SECONDS} is '{text}'; expected a positive number of seconds")
    return seconds
