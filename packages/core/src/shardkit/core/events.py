"""Typed events about the engine: the only way for tools to look inside.

A call site checks one attribute before it builds an event, so without subscribers it costs one test::

    if events.hub.active:
        events.emit(events.PrefetchMiss(fqn))

Listeners run on the emitting thread, in the order of subscription. Their exceptions propagate to that thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

StorageKind: TypeAlias = Literal["unsharded", "packed", "outbox", "reduce_input", "reduce_output", "gradient"]


class Event:
    """The base class of all events."""


@dataclass(frozen=True)
class _Started(Event):
    """A communication of a parameter group was handed to the process group.

    `fqn` is the group's label and `fqns` are its parameters. `bytes` counts the full tensors that are gathered or
    reduced, `wire_bytes` what this rank sends: one chunk for each peer, if the backend chooses the algorithm.
    `padding_bytes` counts memory without elements, due to uneven chunks. `dtype` is that on the wire (`torch.uint8` for
    compressed tensors and a gather of mixed dtypes). `transport` is "shared", "c10d", "compressed" or "custom".
    """

    fqn: str
    fqns: tuple[str, ...]
    bytes: int
    wire_bytes: int
    dtype: torch.dtype
    group: dist.ProcessGroup
    padding_bytes: int = field(default=0, kw_only=True)
    transport: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class _Finished(_Started):
    """The communication is done: on a CPU the data has arrived, on a device it is ordered on the lane's stream.

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
class _Storage(Event):
    """`bytes` of memory that belong to `fqn` (a parameter or a group's label).

    `kind`: `unsharded` (an unsharded parameter), `packed` (the packed buffer of small and unevenly cut parameters or
    gradients), `outbox` (shared memory for copies that other ranks of this host read, kept between steps),
    `reduce_input` (compressed rows and terms of a sum), `reduce_output` (sums that become sharded gradients),
    `gradient` (unsharded gradients that a reduction has taken over, until it frees them).
    """

    fqn: str
    bytes: int
    kind: StorageKind


class StorageAllocated(_Storage):
    """Memory was allocated."""


class StorageFreed(_Storage):
    """Memory was freed."""


@dataclass(frozen=True)
class PrefetchHit(Event):
    """A group was used whose gather had been launched ahead, or that was still gathered from its last use."""

    fqn: str


@dataclass(frozen=True)
class PrefetchMiss(Event):
    """A group was used whose gather had to be launched at that moment."""

    fqn: str


@dataclass(frozen=True)
class DeviceSpan:
    """Two timing events of a device, recorded on one stream around a piece of work."""

    begin: Any
    end: Any

    @property
    def done(self) -> bool:
        """Whether the device has reached the end."""
        return bool(self.end.query())

    def seconds(self) -> float:
        """Device time between the two events; blocks until the device has reached the end."""
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


@dataclass(frozen=True)
class Launched(Event):
    """The host spent `seconds` on starting a communication: packing, writing its own chunks, submitting it.

    `operation` is the work of the lane: "all-gather" or "reduce-scatter" (with the all-reduce that may follow). On a
    device with streams `span` is the communication itself on the lane's stream, else None.
    """

    fqn: str
    operation: str
    seconds: float
    span: DeviceSpan | None = None


@dataclass(frozen=True)
class WaitStarted(Event):
    """This thread cannot continue until a communication of `fqn` does.

    `operation`: as in `Launched`, or "release" (until peers have read this rank's shards), "set-up" (until all ranks
    have compared their models, or have met), "order check".
    """

    fqn: str
    operation: str


@dataclass(frozen=True)
class WaitFinished(WaitStarted):
    """The wait ended after `seconds`, of which `blocked` were idle; the rest was local work on data that had arrived.

    On a device with streams the host does not wait: `span` is the time in which the compute stream was idle.
    """

    seconds: float
    blocked: float
    span: DeviceSpan | None = None


@dataclass(frozen=True)
class WaitFailed(WaitStarted):
    """The wait ended after `seconds` with an error, which the thread is about to raise."""

    seconds: float
    error: str


@dataclass(frozen=True)
class _ModulePhase(Event):
    """`phase`: `forward`, `backward`, or `recompute` (activation checkpointing runs forward again in backward)."""

    fqn: str
    phase: Literal["forward", "backward", "recompute"]
    root: bool


class ModuleBegan(_ModulePhase):
    """A sharded module begins a phase; its parameters have not been requested yet."""


class ModuleEnded(_ModulePhase):
    """A sharded module has ended the phase: it is resharded if configured, and its reductions have started."""


@dataclass(frozen=True)
class BackwardEnded(Event):
    """A backward is over. If `last`, all its reductions are done too."""

    last: bool


@dataclass(frozen=True)
class RootReady(Event):
    """`module` was found to be a root: from now on the names of the modules below it are known."""

    module: nn.Module


Listener: TypeAlias = Callable[[Event], None]


class Hub:
    """The process's subscriptions. `active` is true while there is one."""

    subscriptions: tuple[Subscription, ...] = ()
    active = False


hub = Hub()
_lock = threading.Lock()


class Subscription:
    """A listener's registration in the hub; ends with `close` or with the `with` block it opens."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        with _lock:
            hub.subscriptions, hub.active = (*hub.subscriptions, self), True

    def close(self) -> None:
        """Stop listening. Closing twice is harmless."""
        with _lock:
            hub.subscriptions = tuple(one for one in hub.subscriptions if one is not self)
            hub.active = bool(hub.subscriptions)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def subscribe(listener: Listener) -> Subscription:
    """Call `listener` with every event of this process until the returned subscription is closed."""
    return Subscription(listener)


def emit(event: Event) -> None:
    """Pass `event` to every listener. Check `hub.active` first, so that no event is built without listeners."""
    for subscription in hub.subscriptions:
        subscription.listener(event)


@contextlib.contextmanager
def waiting(fqn: str, operation: str) -> Iterator[Callable[[], None]]:
    """Surrounds a place where this thread may wait for other ranks; emits the events of a wait.

    Yields a function to call when the awaited data is there, if the rest of the block is local work.
    """
    if hub.active:
        emit(WaitStarted(fqn, operation))
    began = time.perf_counter()
    arrivals: list[float] = []
    try:
        yield lambda: arrivals.append(time.perf_counter())
    except BaseException as error:
        if hub.active:
            emit(WaitFailed(fqn, operation, time.perf_counter() - began, str(error)))
        raise
    if hub.active:
        now = time.perf_counter()
        emit(WaitFinished(fqn, operation, now - began, (arrivals or [now])[0] - began))
