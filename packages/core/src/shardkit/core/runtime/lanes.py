"""Programs that run beside the computation, in launch order.

A *program* is a communication written as a generator, so that one body serves CPU and streams. With a `CpuLane` works
progress on the backend's own thread, and the owner of the program's ticket runs the local work between them. A
`StreamLane` queues a whole program on a separate stream at once. Both have the same methods.

Failure: any error of a program or its works is raised by `start`, `wait_for_stage` or `wait` as a `RuntimeError` with
the label, so that a timeout shows which group was waiting.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from shardkit.core import events
from shardkit.core.torch_compat import set_grad_enabled

Works: TypeAlias = Sequence[Any]
"""c10d's works, or postings of the shared-memory transport. None: it has ended. `wait` raises if one failed, also if
called again; on streams it lets the current stream wait, not the host."""

Program: TypeAlias = Generator[Works, None, None]
"""Launches communication, yields the works it waits on, continues with local work once they are done, may launch and
yield again, then returns. Programs compose with `yield from`. Lanes run them without autograd."""

Reduction: TypeAlias = Generator[Works, None, torch.Tensor]
"""A program that returns its output, which it has allocated on its lane."""


# A list, because all empty tuples are the same object.
NEXT_STAGE: Works = []
"""Yielded where a program needs its inputs no more: the lane's next program does not wait for the rest of this one,
such as the all-reduce of a reduced shard."""


class _Running(threading.local):
    """The lane whose program this thread is queueing on a stream, and the list that keeps tensors alive for it."""

    held: list[torch.Tensor] | None = None
    lane: StreamLane | None = None


_running = _Running()


def hold(*tensors: torch.Tensor) -> None:
    """Called by a program: keeps `tensors` alive until its ticket has been waited for.

    A stream lane runs a program to its end while the device has hardly begun. A buffer owned only by the program's
    frame would be returned to the allocator, and reused by the compute stream, while it is still being written. On a
    CPU lane a frame outlives its transfers and nothing needs to be held.
    """
    if _running.held is not None:
        _running.held.extend(tensors)


def note_sources_read() -> None:
    """A duty of every gather, once it has read its sources: memory that they were staged in waits for this event."""
    if _running.lane is not None:
        _running.lane.sources_read = _running.lane.stream.record_event()


def _failure(label: str, doing: str, error: str) -> RuntimeError:
    hint = ""
    if "Timed out" in error:  # an error of gloo, which has no names
        hint = (
            "; all ranks must run the same modules in the same order, and have gradients of the same parameters: "
            "SHARDKIT_DEBUG=order finds the first difference"
        )
    return RuntimeError(f"{label}: {doing} failed: {error}{hint}")


class CpuLane:
    """Programs whose works make progress on the backend's thread. `name` is their purpose, for messages."""

    has_streams = False
    sources_read: Any = None  # nothing waits for events: work on a CPU is in program order already

    def __init__(self, name: str) -> None:
        self.name = name

    def start(
        self, program: Program, label: str, keep_alive: Sequence[torch.Tensor] = (), *, after_current: bool = True
    ) -> CpuTicket:
        """Launches `program`. `keep_alive` stays referenced until its ticket is done. Raises as tickets do."""
        began = time.perf_counter() if events.hub.active else 0.0
        ticket = CpuTicket(program, label, self.name, keep_alive)
        if began:
            try:
                events.emit(events.Launched(label, self.name, time.perf_counter() - began))
            except BaseException:
                ticket.abandon()  # a listener's error: transfers write to memory that the caller frees next
                raise
        return ticket

    def wait_event(self, event: Any) -> None:
        """Nothing to do."""

    def current_event(self) -> Any:
        return None

    def owning_memory(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


_UNHEARD = contextlib.nullcontext()


class CpuTicket:
    """A program between two of its yields, and the works it waits on. It runs to its first yield at once.

    `has_stages` says whether `wait_for_stage` has more to do: until the end, because waiting drives the program.
    """

    def __init__(self, program: Program, label: str, name: str, keep_alive: Sequence[torch.Tensor]) -> None:
        self.done = False
        self.has_stages = True
        self.finished: Any = None  # for streams
        self._program: Program | None = program
        self._label = label
        self._name = name
        self._keep_alive = keep_alive
        self._pending: Works = ()
        self._failed: tuple[str, str] | None = None  # for whoever waits next: an error would keep frames, and so memory
        try:
            self._resume(f"launching {name}")
        except RuntimeError:
            with events.waiting(label, name):  # for listeners: a peer has ended before it was waited for
                raise

    def wait_for_stage(self) -> None:
        """Waits for the pending works, and runs the program to its next yield or its end.

        Tensors that the program has read so far may be dropped afterwards.
        """
        if self._failed is not None:
            raise _failure(self._label, *self._failed)
        if self.done:
            return
        with events.waiting(self._label, self._name) if events.hub.active else _UNHEARD as arrived:
            try:
                for work in self._pending:
                    if work is not None:
                        work.wait()
            except Exception as error:
                # A failed work makes its siblings fail, but they may still point to memory that the caller frees next.
                doing = f"{self._name} (waiting for its peers, {len(self._pending)} transfers)"
                self.abandon()
                self._failed = doing, str(error)
                raise _failure(self._label, doing, str(error)) from error
            self._pending = ()
            if arrived is not None:
                arrived()
            self._resume(f"{self._name} (local work after its transfers)")

    def wait(self) -> None:
        """Runs the program to its end. Idempotent: a program that has failed raises again."""
        while self._failed is not None or not self.done:
            self.wait_for_stage()

    def reader_events(self) -> tuple[Any, ...]:
        return ()

    def abandon(self) -> None:
        """Gives up: waits for pending transfers, ignores errors, closes the program. For recovery after an error."""
        self._failed = None
        if self.done:
            return
        for work in self._pending:
            with contextlib.suppress(Exception):
                if work is not None:
                    work.wait()
        program = self._program
        self._finish()
        if program is not None:
            with contextlib.suppress(Exception):
                program.close()

    def _resume(self, doing: str) -> None:
        assert self._program is not None
        graphed = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            self._pending = next(self._program)
            while self._pending is NEXT_STAGE:
                self._pending = next(self._program)
        except StopIteration:
            self._finish()
        except Exception as error:
            self._finish()
            self._failed = doing, str(error)
            raise _failure(self._label, doing, str(error)) from error
        finally:
            set_grad_enabled(graphed)

    def _finish(self) -> None:
        self.done, self.has_stages = True, False
        self._program = None
        self._pending = ()
        self._keep_alive = ()


class StreamLane:
    """Programs on a separate stream, for CUDA, XPU and any device module that has streams and events.

    Note [Who owns memory]: torch's allocator gives memory that is freed on the host to the next allocation on the same
    stream at once. So memory belongs to one stream, and before it is freed, that stream must wait for its users.

        unsharded parameters,    the gather lane's. Readers wait for the gather on their own stream. A reshard records
        packed gather buffers    an event on each stream that read them; the lane waits for these events before the
                                 memory is freed. So a gather waits for the readers of the memory that it takes over,
                                 and for nothing else that computes.
        gradients, the buffers   the compute stream's, which packs them. A reduction starts behind an event of the
        they are packed into     compute stream, which waits for the reduction before it drops them (`StreamTicket`).
        reduced gradients,       the reduction lane's, that of a cast after an all-reduce its second stage's. Whoever
        their casts              drops them does so on the compute stream, and the next reduction starts behind that.
        shards                   the compute stream's, and written there: group.py, Note [Writers of shards].

    No `record_stream` is needed, and the order of memory reuse does not depend on timing.

    A program that yields `NEXT_STAGE` continues on the lane `following`. Tensors that it has read until then may be
    dropped after `wait_for_stage` of its ticket.

    Note [Graphs]: while a CUDA graph is captured, a stream belongs to it once it has waited for an event of it. Memory
    that was allocated earlier on that stream does not belong to the graph, and others would get it between two replays.
    So a lane joins the graph before it allocates. Its programs are waited for in any case, so the captured stream gets
    the lane back. A replay does not repeat a gather from before the capture; waiting for one in a capture is an error.
    """

    has_streams = True

    def __init__(self, device: torch.device, name: str, priority: int = 0) -> None:
        self.name = name
        self.device = device
        self._priority = priority
        self.sources_read: Any = None  # an event where the program started last has read its sources
        self._module: Any = torch.get_device_module(device)
        self.is_captured: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)

    @functools.cached_property
    def stream(self) -> Any:
        return self._module.Stream(device=self.device, priority=self._priority)

    @functools.cached_property
    def following(self) -> StreamLane:
        """The lane of a program's second stage."""
        return StreamLane(self.device, self.name, self._priority)

    def start(
        self, program: Program, label: str, keep_alive: Sequence[torch.Tensor] = (), *, after_current: bool = True
    ) -> StreamTicket:
        """Queues `program` after the work that the current stream has queued so far.

        Without `after_current`, it only waits for the lane's earlier programs and the events of `wait_event`.
        """
        if after_current:
            self.stream.wait_event(self.current_event())
        stages: list[_Stage] = []
        lane, held = self, list(keep_alive)
        listening = events.hub.active
        launched = time.perf_counter()
        begin = self._timing_event(self.stream) if listening else None
        try:
            while True:
                ended = lane._run_stage(program, held)
                stages.append(_Stage(lane.stream.record_event(), held))
                if ended:
                    break
                lane, held = lane.following, []
                lane.stream.wait_event(stages[-1].finished)
        except Exception as error:
            lane.outlast()
            raise _failure(label, f"launching {self.name}", str(error)) from error
        if listening:
            span = events.DeviceSpan(begin, self._timing_event(lane.stream))
            try:
                events.emit(events.Launched(label, self.name, time.perf_counter() - launched, span))
            except BaseException:
                lane.outlast()
                raise
        return StreamTicket(self, label, stages, self.current_stream() if after_current else None)

    def _run_stage(self, program: Program, held: list[torch.Tensor]) -> bool:
        """Queues `program` on this lane's stream up to `NEXT_STAGE`; True if it has ended."""
        outer = _running.held, _running.lane
        _running.held, _running.lane = held, self
        try:
            with self._module.stream(self.stream), torch.no_grad():
                for works in program:
                    if works is NEXT_STAGE:
                        return False
                    for work in works:
                        if work is not None:
                            work.wait()
        finally:
            _running.held, _running.lane = outer
        return True

    def outlast(self) -> None:
        """After a failure: makes the current stream wait, as queued work uses memory that the caller frees next.

        The host does not wait. The work may be a collective that no peer joins.
        """
        with contextlib.suppress(Exception):
            self.current_stream().wait_event(self.stream.record_event())

    def _timing_event(self, stream: Any) -> Any:
        return stream.record_event(self._module.Event(enable_timing=True))

    def make_current_wait(self, label: str, finished: Any) -> None:
        """Makes the current stream wait for the event `finished`, and reports the waiting time to listeners."""
        stream = self.current_stream()
        if not events.hub.active:
            stream.wait_event(finished)
            return
        begin = self._timing_event(stream)
        stream.wait_event(finished)
        span = events.DeviceSpan(begin, self._timing_event(stream))
        events.emit(events.WaitFinished(label, self.name, 0.0, 0.0, span))

    def wait_event(self, event: Any) -> None:
        """Makes all later programs wait for `event`."""
        self.stream.wait_event(event)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def current_event(self) -> Any:
        """Behind what is queued on the current stream, which is this lane's only in `owning_memory`."""
        return self.current_stream().record_event()

    def owning_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Memory allocated inside belongs to the lane: see Note [Who owns memory]."""
        if self.is_captured() and not self._is_in_graph:
            self.wait_event(self.current_event())
        manager: contextlib.AbstractContextManager[Any] = self._module.stream(self.stream)
        return manager

    @property
    def _is_in_graph(self) -> bool:
        with self._module.stream(self.stream):
            return self.is_captured()


class _Stage(NamedTuple):
    """A part of a program queued on one stream: the event at its end, and the tensors it reads and writes."""

    finished: Any
    held: list[torch.Tensor]


class StreamTicket:
    """A program that is queued as a whole; `done` after a stream has been made to wait for its end, `finished`.

    `inputs_of` is the stream that made its inputs and owns their memory; None if it reads only what stays.
    """

    def __init__(self, lane: StreamLane, label: str, stages: list[_Stage], inputs_of: Any) -> None:
        self.done = False
        self._waited_on: list[Any] = []
        self._inputs_of = inputs_of
        self._lane = lane
        self._label = label
        self.finished: Any = stages[-1].finished
        self._stages = stages
        self.has_stages = True
        self._captured = lane.is_captured()

    def wait_for_stage(self) -> None:
        """Makes the current stream wait for the first stage, and drops the tensors that the program was given to read.

        A second stage is left to `wait`: its results are not needed earlier.
        """
        if self.has_stages and len(self._stages) > 1:
            stage = self._stages.pop(0)
            self._lane.make_current_wait(self._label, stage.finished)
            self._return_inputs(stage)
        elif self.has_stages:
            self.wait()
        self.has_stages = False

    def wait(self) -> None:
        """Makes the current stream wait for the whole program. Every stream that reads its results must call this."""
        if not self._captured and self._lane.is_captured():
            raise RuntimeError(
                f"{self._label}: {self._lane.name} was started before the capture of the CUDA graph that uses it, so "
                "replays would not run it again; reshard all modules and end the step before the capture begins"
            )
        stream = self._lane.current_stream()
        if stream in self._waited_on:
            return
        self._lane.make_current_wait(self._label, self.finished)
        self._waited_on.append(stream)
        for stage in self._stages:
            self._return_inputs(stage)
        self._stages.clear()
        self.done = True

    def _return_inputs(self, stage: _Stage) -> None:
        """Before the inputs of a stage are dropped: if another stream waited, theirs must wait, too."""
        if stage.held and self._inputs_of is not None and self._inputs_of != self._lane.current_stream():
            self._inputs_of.wait_event(stage.finished)

    def reader_events(self) -> tuple[Any, ...]:
        """Events on the streams that have waited; their reads so far come before the events."""
        return tuple(stream.record_event() for stream in self._waited_on)

    def abandon(self) -> None:
        """As `wait`, without errors."""
        with contextlib.suppress(Exception):
            self.wait()


Lane: TypeAlias = CpuLane | StreamLane
Ticket: TypeAlias = CpuTicket | StreamTicket


def make_lane(device: torch.device, name: str, priority: int = 0) -> Lane:
    """A stream lane if `device` has streams, else a CPU lane. The stream is created at the first program."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "Stream") and hasattr(module, "current_stream"):
            return StreamLane(device, name, priority)
    return CpuLane(name)
