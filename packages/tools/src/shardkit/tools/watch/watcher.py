"""The watching thread: raises an alarm for a wait that takes too long, answers alarms, writes the verdict.

All ranks share a store. Alarm number `n` is a key in it. A rank that sees the key adds a statement about itself, waits
a moment for the others, and reads their statements. The lowest rank with a statement writes the verdict. A rank that
has died, is stopped, or cannot reach the store makes no statement, which identifies it.

The thread has its own connection to the store, so a main thread that is stuck in the store does not matter. If the
store is gone (it lives in rank 0's process unless torchrun holds it), the rank reports what it knows of itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core import events
from shardkit.tools.profiling.log import CARRIED, FINISHED, STARTED, Entry, OptimizerBegan, OptimizerEnded, Whereabouts
from shardkit.tools.torch_compat import own_store_connection
from shardkit.tools.watch import WATCH_SECONDS
from shardkit.tools.watch.verdict import Kind, Process, Started, Statement, WaitingFor, verdict

_T = TypeVar("_T")
_Collective: TypeAlias = tuple[Kind, int]
_REMEMBERED = 64
_FRAMES = 100


class Witness:
    """Listens on the emitting threads and is queried by the watcher's thread; a lock separates the two.

    Args:
        failed: called on the thread that is about to raise, when a wait fails.
    """

    def __init__(self, rank: int, failed: Callable[[events.WaitFailed], None]) -> None:
        self._rank = rank
        self._failed = failed
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._where = Whereabouts(trains=True)
        self._ranks: dict[dist.ProcessGroup, tuple[int, ...]] = {}
        self._counts: Counter[Kind] = Counter()
        self._last: dict[Kind, deque[str]] = {}
        self._open: dict[tuple[str, str], list[_Collective]] = defaultdict(list)
        self._waits: list[tuple[float, events.WaitStarted, _Collective | None]] = []
        self._queued: deque[tuple[float, events.Launched, _Collective | None]] = deque()
        self._newest: _Collective | None = None

    def hear(self, event: Entry) -> None:
        with self._lock:
            self._where.follow(event)
            if type(event) in STARTED:
                self._began(event)  # type: ignore[arg-type]
            elif type(event) in FINISHED:
                self._ended(event)  # type: ignore[arg-type]
            elif isinstance(event, events.Launched) and event.span is not None:
                self._queued.append((time.monotonic(), event, self._newest))
            elif type(event) is events.WaitStarted:
                # The oldest matching operation in flight; a release belongs to no collective.
                kinds = CARRIED.get(event.operation, ())
                under_way = (self._open[kind, event.fqn][0] for kind in kinds if self._open[kind, event.fqn])
                self._waits.append((time.monotonic(), event, next(under_way, None)))
        if isinstance(event, events.WaitFailed):
            self._failed(event)
        if isinstance(event, events.WaitFinished | events.WaitFailed) and getattr(event, "span", None) is None:
            with self._lock:
                if self._waits:
                    self._waits.pop()

    def _began(self, event: events.GatherStarted) -> None:
        if event.group not in self._ranks:
            self._ranks[event.group] = tuple(dist.get_process_group_ranks(event.group))
        kind = Kind(STARTED[type(event)], event.group.group_name, self._ranks[event.group])
        self._newest = (kind, self._counts[kind])
        self._open[kind.kind, event.fqn].append(self._newest)
        self._counts[kind] += 1
        self._last.setdefault(kind, deque(maxlen=_REMEMBERED)).append(event.fqn)

    def _ended(self, event: events.GatherFinished) -> None:
        waiting = self._open[FINISHED[type(event)], event.fqn]
        # Two models may have modules of one name.
        mine = (one for one in waiting if one[0].group == event.group.group_name)
        if (one := next(mine, None)) is not None:
            waiting.remove(one)

    # -- what the watcher asks -----------------------------------------------------------------------------------------

    def waiting(self) -> WaitingFor | None:
        """The innermost wait, or on a device the oldest unfinished communication; None if there is none."""
        with self._lock:
            while self._queued and self._queued[0][1].span is not None and self._queued[0][1].span.done:
                self._queued.popleft()
            if not self._waits and not self._queued:
                return None
            began, event, target = self._waits[-1] if self._waits else self._queued[0]
        kind, number = target or (Kind(event.operation), -1)
        return WaitingFor(event.operation, event.fqn, kind, number, time.monotonic() - began)

    def statement(self, failure: str | None) -> Statement:
        waiting = self.waiting()
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)[-_FRAMES:]
        with self._lock:
            where = self._where
            return Statement(
                self._rank,
                where.step,
                where.phase,
                where.module,
                waiting,
                [Started(kind, count, list(self._last[kind])) for kind, count in self._counts.items()],
                [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in stack],
                failure,
            )


# Seconds for other ranks to answer: they look at the store a few times a second.
_GRACE = 2.0
_SLOWEST_LOOK = 0.5


class Watcher:
    """One rank's watcher. `begin` starts its thread, which ends with the process or with `end`.

    Args:
        store: a connection without other users.
        limit: seconds that a wait may take.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: float) -> None:
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
        self._store.set(f"place/{self._rank}", msgspec.json.encode(Process.own()).decode())
        while self._store.check([f"alarm/{self._number}"]):
            self._number += 1
        self._thread.start()

    def end(self) -> None:
        """Stops watching; a thread that is stuck in the store is abandoned."""
        self._ended = True
        self._wake.set()
        self._thread.join(_GRACE)

    # -- the main thread -----------------------------------------------------------------------------------------------

    def _wait_failed(self, event: events.WaitFailed) -> None:
        """Delays the error until it has been reported, because it may end the process."""
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
            self._store.set(f"alarm/{self._number}", str(self._rank))
        elif not self._store.check([f"alarm/{self._number}"]):
            return
        number, self._number = self._number, self._number + 1
        statement = self.witness.statement(failure)
        self._store.set(f"said/{number}/{self._rank}", msgspec.json.encode(statement).decode())
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
        """One report for each hang: the next one is due when the wait has become twice as long."""
        waited = statement.waiting.seconds if statement.waiting is not None else 0.0
        self._quiet_until = time.monotonic() + max(self._limit, waited)

    def _conclude(self, number: int) -> None:
        """Reads the statements; the lowest rank with a statement writes the verdict."""
        statements: dict[int, Statement] = {}
        silent: dict[int, str] = {}
        for rank in range(self._world_size):
            said = self._read(f"said/{number}/{rank}", Statement)
            if said is not None:
                statements[rank] = said
                if rank < self._rank:
                    return
            else:
                place = self._read(f"place/{rank}", Process)
                silent[rank] = place.condition() if place is not None else "has not begun to watch"
        self._write(verdict(statements, silent))

    def _read(self, key: str, kind: type[_T]) -> _T | None:
        return msgspec.json.decode(self._store.get(key), type=kind) if self._store.check([key]) else None

    def _tell_alone(self, error: Exception) -> None:
        """Call if the store cannot be reached: reports this rank alone, once for each hang or failure."""
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
    """Starts watching this process. Does nothing without a process group of several ranks.

    Raises:
        ValueError: if the limit is not a positive number.
    """
    text = os.environ.get(WATCH_SECONDS, "60")
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ValueError(f"{WATCH_SECONDS} is '{text}'; expected a positive number of seconds")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = own_store_connection("shardkit_watch")
    watcher = Watcher(store, dist.get_rank(), dist.get_world_size(), limit)
    watcher.begin()
    atexit.register(watcher.end)  # before the interpreter ends while this thread is in the store
    hear = watcher.witness.hear
    events.subscribe(hear)
    register_optimizer_step_pre_hook(lambda *_: hear(OptimizerBegan()))
    register_optimizer_step_post_hook(lambda *_: hear(OptimizerEnded()))
