"""What happened, as typed events: the only way that tools look inside.

A call site asks one attribute before it builds an event, so that a program without subscribers pays one test::

    if events.hub.active:
        events.emit(events.PrefetchMiss(fqn))

Listeners run on the thread that emits, in the order of subscription; what they raise propagates to that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

StorageKind: TypeAlias = Literal["unsharded", "packed", "outbox", "reduce_input", "reduce_output", "gradient"]


@dataclass(frozen=True)
class _Started:
    """A communication of a parameter group was handed to the process group.

    `fqn` is the group's label and `fqns` are its parameters. `bytes` counts the full tensors that are gathered or
    reduced. `wire_bytes` is what this rank sends; a collective whose algorithm is the backend's own is counted as
    sending its chunk to each peer. `dtype` is the one on the wire (`torch.uint8` for a gather of mixed dtypes).
    """

    fqn: str
    fqns: tuple[str, ...]
    bytes: int
    wire_bytes: int
    dtype: torch.dtype
    group: dist.ProcessGroup


@dataclass(frozen=True)
class _Finished(_Started):
    """The same communication is done: on a CPU the data is there, on a device it is ordered on the lane's stream.

    `seconds` is host time from launch to finish.
    """

    seconds: float


class GatherStarted(_Started):
    """An all-gather of a parameter group was launched."""


class GatherFinished(_Finished):
    """An all-gather of a parameter group is done."""


class ReduceStarted(_Started):
    """A reduce-scatter of a parameter group's gradients was launched."""


class ReduceFinished(_Finished):
    """A reduce-scatter of a parameter group's gradients is done."""


class AllReduceStarted(_Started):
    """An all-reduce of gradients over a replicate group was launched."""


class AllReduceFinished(_Finished):
    """An all-reduce of gradients over a replicate group is done."""


@dataclass(frozen=True)
class _Storage:
    """`bytes` of memory that belong to `fqn` (a parameter or a group's label).

    `kind`: `unsharded` (an unsharded parameter), `packed` (the packed buffer of small and oddly cut items),
    `outbox` (shared memory for gradients on their way to other ranks of this host, kept from step to step),
    `reduce_input` (gradient copies on their way out, terms of a sum on their way in), `reduce_output` (the sharded
    gradients), `gradient` (an unsharded gradient).
    """

    fqn: str
    bytes: int
    kind: StorageKind


class StorageAllocated(_Storage):
    """Memory was allocated."""


class StorageFreed(_Storage):
    """Memory was given back."""


@dataclass(frozen=True)
class PrefetchHit:
    """A group was used whose gather had been launched ahead of time."""

    fqn: str


@dataclass(frozen=True)
class PrefetchMiss:
    """A group was used whose gather had to be launched at that moment."""

    fqn: str


Event: TypeAlias = (
    GatherStarted
    | GatherFinished
    | ReduceStarted
    | ReduceFinished
    | AllReduceStarted
    | AllReduceFinished
    | StorageAllocated
    | StorageFreed
    | PrefetchHit
    | PrefetchMiss
)
Listener: TypeAlias = Callable[[Event], None]


class Hub:
    """The process's listeners. `active` is true while there is one."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self.active = False
        self._lock = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Append `listener`; one that is added twice hears everything twice."""
        with self._lock:
            self.listeners = (*self.listeners, listener)
            self.active = True

    def remove(self, listener: Listener) -> None:
        """Remove the first entry of `listener`, if there is one."""
        with self._lock:
            remaining = list(self.listeners)
            if listener in remaining:
                remaining.remove(listener)
            self.listeners = tuple(remaining)
            self.active = bool(remaining)


hub = Hub()


class Subscription:
    """A listener's place in the hub; ends with `close` or with the `with` block it opens."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener
        hub.add(listener)

    def close(self) -> None:
        """Stop listening. Closing twice is harmless."""
        listener, self._listener = self._listener, None
        if listener is not None:
            hub.remove(listener)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def subscribe(listener: Listener) -> Subscription:
    """Call `listener` with every event of this process until the returned subscription is closed."""
    return Subscription(listener)


def emit(event: Event) -> None:
    """Hand `event` to every listener. Ask `hub.active` first, so that no event is built for nobody."""
    for listener in hub.listeners:
        listener(event)
