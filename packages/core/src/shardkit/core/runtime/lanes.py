"""A device's concurrency behind one ticket: programs run beside the computation, in the order they were started.

There are two kinds of lane and no threads. A `CpuLane` relies on the backend's own progress thread: works move on
by themselves, and a ticket's owner drives the local work between them. A `StreamLane` queues a whole program on
a stream of its own at once. Failure: whatever a program or one of its works raises comes out of `start`, `advance`
or `wait` as a `RuntimeError` that names the label, so that a timeout tells which group was waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardkit.core import events
from shardkit.core.runtime.program import Holder, Program, Waitable

__all__ = ["CpuLane", "Lane", "Program", "StreamLane", "Ticket", "make_lane"]


class Ticket(Protocol):
    """One started program."""

    done: bool

    def advance(self) -> None:
        """CPU: wait for the pending works and run the program to its next yield or its end. Streams: like `wait`."""

    def wait(self) -> None:
        """CPU: run the program to its end. Streams: make the current stream wait for it. Idempotent."""

    def abandon(self) -> None:
        """Give up: wait for what is pending, ignore errors, close the program. For recovery after an exception."""


class Lane(Protocol):
    """Runs programs of one kind beside the computation."""

    name: str

    def start(self, program: Program, label: str, keep_alive: Sequence[torch.Tensor] = ()) -> Ticket:
        """Launch `program`. `keep_alive` stays referenced until its ticket is done. Raises as tickets do."""

    def wait_event(self, event: Any) -> None:
        """Make the next start wait for `event`, too. No-op on CPU."""


def make_lane(device: torch.device, name: str, priority: int = 0) -> Lane:
    """A stream lane where `device` has streams, else a CPU lane. `name` is what its programs do, for messages."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "Stream") and hasattr(module, "current_stream"):
            return StreamLane(device, name, priority)
    return CpuLane(name)


def _failure(label: str, doing: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"{label}: {doing} failed: {error}")


class CpuLane:
    """Programs whose works make progress on the backend's thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, program: Program, label: str, keep_alive: Sequence[torch.Tensor] = ()) -> Ticket:
        ticket = CpuTicket(program, label, self.name, keep_alive)
        ticket.launch()
        return ticket

    def wait_event(self, event: Any) -> None:
        """Nothing to do: work on a CPU is in program order already."""


class CpuTicket:
    """A program between two of its yields, and the works it waits on."""

    def __init__(self, program: Program, label: str, name: str, keep_alive: Sequence[torch.Tensor]) -> None:
        self.done = False
        self._program: Program | None = program
        self._label = label
        self._name = name
        self._keep_alive = keep_alive
        self._pending: Sequence[Waitable] = ()

    def launch(self) -> None:
        """Run the program to its first yield."""
        began = time.perf_counter() if events.hub.active else 0.0
        self._resume(f"launching {self._name}")
        if began:
            events.emit(events.Launched(self._label, self._name, time.perf_counter() - began))

    def advance(self) -> None:
        if self.done:
            return
        if not events.hub.active:
            self._wait_for_works()
            self._resume(f"{self._name} (local work after its transfers)")
            return
        with events.Waiting(self._label, self._name) as waiting:
            self._wait_for_works()
            waiting.arrived()
            self._resume(f"{self._name} (local work after its transfers)")

    def _wait_for_works(self) -> None:
        try:
            for work in self._pending:
                work.wait()
        except Exception as error:
            # A failed work takes its siblings along, but they may still point into memory that the caller frees next.
            doing = f"{self._name} (waiting for its peers, {len(self._pending)} transfers)"
            self.abandon()
            raise _failure(self._label, doing, error) from error
        self._pending = ()

    def wait(self) -> None:
        while not self.done:
            self.advance()

    def abandon(self) -> None:
        if self.done:
            return
        for work in self._pending:
            with contextlib.suppress(Exception):
                work.wait()
        program = self._program
        self._finish()
        if program is not None:
            with contextlib.suppress(Exception):
                program.close()

    def _resume(self, doing: str) -> None:
        assert self._program is not None
        try:
            self._pending = next(self._program)
        except StopIteration:
            self._finish()
        except Exception as error:
            self._finish()
            raise _failure(self._label, doing, error) from error

    def _finish(self) -> None:
        self.done = True
        self._program = None
        self._pending = ()
        self._keep_alive = ()


class StreamLane:
    """Programs on a stream of their own, for CUDA, XPU and any device module that has streams and events.

    Note [One memory pool]: a program allocates nothing that its transfers use. Its caller, and `gather` and
    `reduce_scatter` before they return a program, allocate on the compute stream; the lane's stream waits for an event
    recorded there at `start`, and the compute stream waits for the lane before the memory is dropped (`wait`). So all
    memory comes from the compute stream's pool and no `record_stream` is needed.

    A start waits for the current stream even after `wait_event`: the memory that it is handed may have been freed by
    work that the compute stream has yet to finish.
    """

    def __init__(self, device: torch.device, name: str, priority: int = 0) -> None:
        self.name = name
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self.stream: Any = self._module.Stream(device=device, priority=priority)
        self._event: Any = None

    def start(self, program: Program, label: str, keep_alive: Sequence[torch.Tensor] = ()) -> Ticket:
        event, self._event = self._event, None
        if event is not None:
            self.stream.wait_event(event)
        self.stream.wait_event(self._module.current_stream(self.device).record_event())
        held = list(keep_alive)
        listening = events.hub.active
        launched = time.perf_counter()
        begin = self._timing_event(self.stream) if listening else None
        try:
            with self._module.stream(self.stream), Holder(held):
                for works in program:
                    for work in works:
                        work.wait()
            finished = self.stream.record_event()
        except Exception as error:
            with contextlib.suppress(Exception):
                self.stream.synchronize()  # what is queued already writes to memory that the caller frees next
            raise _failure(label, f"launching {self.name}", error) from error
        if listening:
            span = events.DeviceSpan(begin, self._timing_event(self.stream))
            events.emit(events.Launched(label, self.name, time.perf_counter() - launched, span))
        return StreamTicket(self, label, finished, held)

    def _timing_event(self, stream: Any) -> Any:
        return stream.record_event(self._module.Event(enable_timing=True))

    def hold_up(self, label: str, finished: Any) -> None:
        """Makes the current stream wait for `finished`, and says for how long."""
        stream = self._module.current_stream(self.device)
        if not events.hub.active:
            stream.wait_event(finished)
            return
        begin = self._timing_event(stream)
        stream.wait_event(finished)
        span = events.DeviceSpan(begin, self._timing_event(stream))
        events.emit(events.WaitFinished(label, self.name, 0.0, 0.0, span))

    def wait_event(self, event: Any) -> None:
        self._event = event


class StreamTicket:
    """A program that is queued as a whole; `done` once a stream has been made to wait for it."""

    def __init__(self, lane: StreamLane, label: str, finished: Any, held: list[torch.Tensor]) -> None:
        self.done = False
        self._lane = lane
        self._label = label
        self._finished = finished
        self._held = held

    def advance(self) -> None:
        """The stream runs by itself, so all that is left is to wait, which lets go of what the program held."""
        self.wait()

    def wait(self) -> None:
        if self.done:
            return
        self._lane.hold_up(self._label, self._finished)
        self.done = True
        self._held = []

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.wait()
