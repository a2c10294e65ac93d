"""The thread that watches: raises an alarm for a wait that takes too long, answers others' alarms, tells the verdict.

All ranks share a store. Alarm number `n` is a key in it; whoever sees it puts what there is to say about its own rank
beside it, waits a moment for the others, and reads what they said. The lowest rank that said something writes the
verdict. A rank that has died, is stopped, or cannot reach the store says nothing, and is told by that.

The thread has a connection of its own to the store, so a main thread that is stuck in it does not matter. When the
store itself is gone (it lives in rank 0's process unless torchrun holds it), the rank tells what it knows of itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Protocol

from shardkit.core import events
from shardkit.tools.watch.processes import Place
from shardkit.tools.watch.statement import Statement, from_text, to_text
from shardkit.tools.watch.verdict import verdict
from shardkit.tools.watch.witness import Witness

__all__ = ["Watcher"]

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
