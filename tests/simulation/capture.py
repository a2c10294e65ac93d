"""The rules of CUDA's stream capture, and replays of captured graphs.

A graph is one that `torch.cuda.graph` would capture: a stream belongs to it from where it waits for an event of the
graph. While it captures, a stream must not wait for events from outside the graph, the host must not ask how far the
device is, and no kernel may run beside the graph. At its end the first stream must come after all captured work. Its
memory is its own (`device.cpp`, `Pool`). Other memory that it uses must stay in place, and is written by others.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.simulation.configurations import CONFIGURATIONS, configuration, optimize
from tests.simulation.device import Access, Allocation, Observer, Stream, replay
from tests.simulation.races import Known, calling_site, join
from tests.simulation.training import Run, Scenario, started

WARM_UP = 3
REPLAYS = 3
AFTER = 2


class Captures(Observer):
    """Captures graphs and collects `findings`."""

    def __init__(self) -> None:
        self.findings: dict[str, None] = {}  # in order, each once
        self._graph = 0  # the newest one
        self._capturing = False
        self._streams: dict[int, Known] = {}  # of the graph: the work that each of them comes after
        self._last: dict[int, str] = {}  # the work queued on them last
        self._events: dict[int, tuple[int, Known]] = {}  # the graph, and the work before the event
        self._static: set[int] = set()  # allocations, by when they were made
        self._read: dict[int, tuple[Allocation, str]] = {}  # by address, the first read of older memory
        self._dropped = False

    # -- graphs --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self, static: Sequence[torch.Tensor], origin: Any = None) -> Iterator[int]:
        """Captures the block on the stream `origin`, or one of its own; yields the number of its graph, for `replay`.

        As on a GPU the block computes nothing: its writes are undone. `static`: tensors that replays read as they are
        then, such as shards and inputs.
        """
        module = torch.get_device_module("sim")
        module.synchronize()
        memory = self.simulation.memory
        found = (memory.find(one.data_ptr()) for one in static if one.numel())
        self._static = {allocation.born for allocation in found if allocation is not None}
        before = [(one, ctypes.string_at(one.at, one.nbytes)) for one in memory.live]
        origin = origin or Stream()
        with module.stream(origin):
            self._begin(origin.stream_id)
            try:
                yield self._graph
            finally:
                self._end(origin.stream_id)
        for allocation, content in before:
            if allocation.died is None:
                ctypes.memmove(allocation.at, content, allocation.nbytes)

    def drop(self) -> None:
        self._dropped = True

    def _begin(self, origin: int) -> None:
        self._graph += 1
        self._capturing = True
        self._streams = {origin: {origin: 0}}
        self._read.clear()

    def _end(self, origin: int) -> None:
        known = self._streams[origin]
        for stream, its in self._streams.items():
            if any(known.get(other, 0) < time for other, time in its.items()):
                self._find(f"stream {stream} is never waited for: {self._last[stream]}")
        for allocation, place in self._read.values():
            if allocation.notes.get("written by") != self._graph and allocation.born not in self._static:
                self._find(f"read, and no replay writes it: {allocation.nbytes} bytes, {place}")
        self._capturing = False
        self._streams = {}

    def graph(self, stream: int) -> int:
        return self._graph if stream in self._streams else 0

    # -- order ---------------------------------------------------------------------------------------------------------

    def recorded(self, event: int, stream: int) -> None:
        self._events[event] = self.graph(stream), dict(self._streams.get(stream, {}))

    def waits(self, stream: int, event: int) -> None:
        graph, known = self._events.get(event, (0, {}))
        if graph and not (self._capturing and graph == self._graph):
            self._find(f"stream {stream} waits for an event of a graph that has ended")
        elif graph and not stream:
            self._find("the default stream waits for an event of the graph, and cannot be captured")
        elif graph:
            join(self._streams.setdefault(stream, {stream: 0}), known)
            self._last[stream] = f"a wait at {calling_site()}"
        elif stream in self._streams:
            self._find(f"stream {stream} waits for an event from outside of the graph")

    def host_waits(self, event: int, stream: int) -> None:
        self._asked("the host waits", event)

    def queried(self, event: int, stream: int) -> None:
        self._asked("the host asks whether something is done", event)

    def elapsed(self, begin: int, end: int) -> float:
        self._asked("the host asks how long something took", begin)
        return 0.0

    def _asked(self, what: str, event: int) -> None:
        if self._capturing:
            self._find(f"{what} during a capture")
        elif self._events.get(event, (0, {}))[0]:
            self._find(f"{what}, for an event of a graph")

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocated(self, allocation: Allocation) -> None:
        allocation.notes["graph"] = 0 if allocation.pinned else self.graph(allocation.stream)

    def freed(self, allocation: Allocation) -> None:
        if not allocation.notes.get("graph") and allocation.notes.get("used by") == self._graph and not self._dropped:
            self._find(f"freed, and replays use it: {allocation.nbytes} bytes")

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        if not self._capturing:
            return
        if stream not in self._streams:
            self._find(f"{name} on stream {stream} is not captured")
            return
        self._streams[stream][stream] += 1
        self._last[stream] = f"{name} at {calling_site()}"
        for access in sorted(accesses, key=lambda one: one.write):  # a kernel reads before it writes
            allocation = access.allocation
            allocation.notes["used by"] = self._graph
            if access.write:
                allocation.notes["written by"] = self._graph
            elif allocation.notes.get("written by") != self._graph:
                self._read.setdefault(allocation.at, (allocation, f"{name} at {calling_site()}"))

    def collective(self, name: str, stream: int, group: dist.ProcessGroup, accesses: Sequence[Access]) -> None:
        self.ran(name, stream, accesses)

    def _find(self, what: str) -> None:
        self.findings[f"{what}, at {calling_site()}"] = None


# -- training ----------------------------------------------------------------------------------------------------------


def check_capture(configuration: Scenario, *, whole: bool = True) -> list[str]:
    """Findings of a captured step, and whether its replays train as eager steps do, bit for bit."""
    captures = Captures()
    eager, replayed = train(configuration), train(configuration, captures, whole=whole)
    same = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(eager, replayed, strict=True))
    return [*captures.findings, *([] if same else ["replays do not train as eager steps do"])]


def train(configuration: Scenario, captures: Captures | None = None, *, whole: bool = True) -> list[torch.Tensor]:
    """The shards after some eager steps, a few replays of a captured one, and eager steps again.

    Without `captures` all steps are eager. `whole`: the optimizer's step is in the graph, too; else it is eager, and
    gradients stay where they are between replays.
    """
    with started(configuration, "ours", captures or Captures()) as run:
        params = list(run.model.parameters())  # the sharded ones: later some may stay unsharded
        _fill(params)
        run.optimizer = torch.optim.SGD([param for param in params if param.requires_grad], lr=0.001, momentum=0.9)
        if captures is None:
            for _ in range(WARM_UP + REPLAYS):
                _step(run)
        else:
            side = _warmed_up(run)
            with captures.capture(_kept(params, run.optimizer), side) as graph:
                _step(run) if whole else run.scenario.step(run)
            for _ in range(REPLAYS):
                replay(graph)
                if not whole:
                    run.optimizer.step()
            run.optimizer.zero_grad()
            captures.drop()
        for _ in range(AFTER):
            _step(run)
        return [_local(param).cpu().clone() for param in params]


_MORE = (
    configuration("memory kept for ever", prepare=lambda model: model.set_keep_unsharded_storage(True)),
    configuration("unsharded after backward", prepare=lambda model: model.set_reshard_after_backward(False)),
)
EVERY = {one.name: one for one in (*_MORE, *CONFIGURATIONS.values())}

NOT_CAPTURED = {
    **{one.name: "the host waits during a capture" for one in CONFIGURATIONS.values() if one.offload is not None},
    "optimizer on another stream": "waits for an event from outside of the graph",  # of the step before
}
"""Configurations that cannot be captured as they are, with the finding that says why."""


def _fill(params: list[nn.Parameter]) -> None:
    """Other numbers in each parameter, which training changes."""
    with torch.no_grad():
        for place, param in enumerate(params):
            _local(param).fill_(0.001 + 0.0001 * place)


def _warmed_up(run: Run) -> Any:
    """Takes eager steps on a stream; returns it, for the capture."""
    module = torch.get_device_module("sim")
    main, side = module.current_stream(), Stream()
    side.wait_stream(main)
    with module.stream(side):
        for _ in range(WARM_UP):
            _step(run)
    main.wait_stream(side)
    return side


def _step(run: Run) -> None:
    run.scenario.step(run)
    if "stepped" not in run.kept:
        optimize(run)


def _kept(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of earlier steps that a step reads: the shards, and the optimizer's state."""
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [_local(tensor) for tensor in (*params, *state) if isinstance(tensor, torch.Tensor)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
