"""The events of a block of code, for tests that look at what happened and in which order."""

import contextlib
from collections.abc import Iterator
from typing import Any

from shardkit.core import events


@contextlib.contextmanager
def heard(*kinds: type[events.Event]) -> Iterator[list[Any]]:
    """The events inside, in order; only those of `kinds`, if any are given."""
    found: list[Any] = []

    def hear(event: events.Event) -> None:
        if not kinds or isinstance(event, kinds):
            found.append(event)

    with events.subscribe(hear):
        yield found


class Memory:
    """The bytes of unsharded parameters, and of packed buffers of gathers, that are held inside and were at most."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], int] = {}
        self.peak = 0
        self.gathers: list[str] = []
        self._packed: tuple[str, int] | None = None

    def __enter__(self) -> Any:
        self._subscription = events.subscribe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._subscription.close()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StorageAllocated) and event.kind == "unsharded":
            assert ("unsharded", event.fqn) not in self.held, f"{event.fqn} was allocated twice"
            self.held["unsharded", event.fqn] = event.bytes
        elif isinstance(event, events.StorageAllocated) and event.kind == "packed":
            self._packed = event.fqn, event.bytes  # a gather's or a reduction's: the next start tells which
        elif isinstance(event, events.StorageFreed) and event.kind in ("unsharded", "packed"):
            freed = self.held.pop((event.kind, event.fqn), event.bytes)
            assert freed == event.bytes
        elif isinstance(event, events.ReduceStarted):
            self._packed = None
        elif isinstance(event, events.GatherStarted):
            self.gathers.append(event.fqn)
            if self._packed is not None:
                assert self._packed[0] == event.fqn
                self.held["packed", event.fqn] = self._packed[1]
                self._packed = None
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        return sum(self.held.values())
