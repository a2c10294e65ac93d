"""Gives a trace the times of a machine: when operators and communications run, and who waits for them.

There are two kinds of machine. Ranks on a CPU compute themselves: an operator's overhead and its work follow one
another, and with shared memory the rank itself copies the data of a communication when it waits for it. A device with a
queue works behind its host, which only launches; communication runs on separate streams.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from shardkit.tools.estimating.trace import Awaited, Copied, Dispatched, Operator, Ran, Trace, Transfer
from shardkit.tools.machine import Machine


class OperatorCosts(Protocol):
    """Seconds that a device needs for one call of an operator, without its launch."""

    def seconds(self, operator: Operator) -> float:
        """Seconds of one call; 0 for one that only makes views."""


class Roofline:
    """Times from the machine's description: the longer of an operator's arithmetic and its memory traffic."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def seconds(self, operator: Operator) -> float:
        """As `OperatorCosts`. Raises `MachineError` if the description has no FLOP/s for the dtype."""
        machine, reached = self._machine, self._machine.efficiency
        moving = operator.bytes / (machine.memory_bandwidth * reached.memory)
        if not operator.flops:
            return moving
        part = reached.attention if operator.attention else reached.matmul
        return max(moving, operator.flops / (machine.flops_for(operator.dtype or torch.float32) * part))


# Ways in which NCCL moves bytes, relative to Simple over a ring: factors of the start latencies, inside a host and
# between hosts, and of bandwidth. From NCCL 2.10, src/graph/tuning.cc: baseLat, hwLat and the bandwidths of the
# protocols. The second of each is LL, for small messages.
_RINGS = ((1.0, 1.0, 1.0, 1.0), (3.6 / 8.4, 0.47 / 3.4, 2.7 / 9.6, 1 / 4))
_TREES = ((0.0, 28 / 3.4, 50 / 9.6, 0.9), (4.4 / 8.4, 0.52 / 3.4, 5.0 / 9.6, 0.9 / 3.8))


def transfer_seconds(transfer: Transfer, machine: Machine) -> float:
    """Seconds that a communication takes by itself. Raises `MachineError` for a missing link between hosts.

    Every rank receives `(ranks - 1) / ranks` of the bytes over its link inside the host. `(hosts - 1) / hosts` of the
    bytes come from other hosts, once for each host and over the adapters of all its ranks in the group. An all-reduce
    is a reduce-scatter and an all-gather. NCCL uses a ring, whose steps add up, or for an all-reduce a tree, with the
    protocol that is fastest for the size; gloo's latencies add up as in a tree.
    """
    ranks, hosts = transfer.ranks, transfer.hosts
    if ranks == 1:
        return 0.0
    link = machine.link(hosts)
    halves = 2 if transfer.collective == "all-reduce" else 1
    moving = transfer.moved * (ranks - 1) / ranks / machine.inside.bandwidth
    if hosts > 1:
        moving = max(moving, transfer.moved * (hosts - 1) / hosts / (ranks / hosts * link.bandwidth))
    if machine.transport != "nccl":
        return halves * (moving + link.latency * math.ceil(math.log2(ranks)))
    ways = [(one, float(ranks - hosts), float(hosts - 1)) for one in _RINGS]
    if halves == 2:
        ways += [(one, ranks / hosts - 1, math.log2(hosts)) for one in _TREES]
    return min(
        begin * machine.collective_seconds
        + halves * (steps * inside * machine.inside.latency + steps_between * between * link.latency)
        + halves * moving / bandwidth
        for (begin, inside, between, bandwidth), steps, steps_between in ways
    )


Lane: TypeAlias = Literal["compute", "waiting", "all-gather", "reduction", "all-reduce", "to device", "to host"]


class Span(NamedTuple):
    """A stream's work from `begin` to `end`, for a module or a parameter group."""

    lane: Lane
    fqn: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of one iteration, in seconds.

    Attributes:
        step: from its beginning to its end.
        compute: time in operators, including launches on the critical path.
        communication: time that communications take by themselves, overlapped or not.
        exposed: time that computation waits for them.
        optimizer: time in operators of the optimizer, unless the next forward runs beside them.
        host_step: time of the optimizer's step on the host, with its files; `host_exposed` of it is not hidden.
        copies: time of the copies between device and host, overlapped or not.
        flops: three times those of forward: forward and backward without recomputation.
        exposed_by_fqn: exposed time by the group that is waited for.
        compute_by_fqn: time in operators, by module.
        spans: work of each stream.
        moments: completion time of each step of the trace.
    """

    step: float
    compute: float
    communication: float
    exposed: float
    optimizer: float
    flops: int
    exposed_by_fqn: dict[str, float]
    compute_by_fqn: dict[str, float]
    host_step: float = 0.0
    host_exposed: float = 0.0
    copies: float = 0.0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    moments: tuple[float, ...] = field(default=(), repr=False)


class _Lanes:
    """Communication beside the computation: a lane each for gathers, reductions and all-reduces, as in core."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lanes: dict[Lane, float] = defaultdict(float)
        self._groups: dict[str, float] = defaultdict(float)
        self._reduced: dict[str, float] = {}
        self._pending: dict[int, tuple[float, float, str]] = {}
        self._later = (0.0, "")
        self.communication = self.copies = 0.0
        self.spans: list[Span] = []

    def launch(self, transfer: Transfer, now: float) -> None:
        seconds = transfer_seconds(transfer, self._machine)
        self.communication += seconds
        if self._machine.transport == "shared" and transfer.of_core:
            self._pending[transfer.about] = now, seconds, transfer.fqn
            return
        lane: Lane = "reduction"
        if transfer.collective == "all-gather" or transfer.collective == "all-reduce":
            lane = transfer.collective
        follows = lane == "all-reduce" and transfer.of_core and self._machine.device != "cpu"
        if follows:
            now = self._reduced.get(transfer.fqn, now)  # queued directly after its reduce-scatter
        begin = max(self._lanes[lane], now)
        if self._machine.transport == "nccl":
            begin = max(begin, self._groups[transfer.group])
        if transfer.copied and lane == "all-gather":  # of the shards, while the gather before it runs
            begin = max(begin, self._copy("to device", transfer.copied, transfer, now))
        end = self._groups[transfer.group] = begin + seconds
        self.spans.append(Span(lane, transfer.fqn, transfer.phase, begin, end))
        if transfer.copied and lane == "reduction":  # of its result; no longer than the lane's next one
            end = self._copy("to host", transfer.copied, transfer, end)
            self._later = max(self._later, (end, transfer.fqn))
        self._lanes[lane] = end
        if lane == "reduction":
            self._reduced[transfer.fqn] = end
        if follows:
            self._later = max(self._later, (end, transfer.fqn))  # nothing in backward needs its result
        else:
            self._pending[transfer.about] = end, 0.0, transfer.fqn

    def copy(self, copied: Copied, now: float) -> None:
        end = self._copy("to host" if copied.to_host else "to device", copied.nbytes, copied, now)
        self._pending[copied.about] = end, 0.0, copied.fqn

    def _copy(self, lane: Lane, nbytes: int, of: Copied | Transfer, now: float) -> float:
        """The end of a copy that begins at `now`, or after the one before it."""
        seconds, begin = nbytes / self._machine.host_link, max(self._lanes[lane], now)
        self.copies += seconds
        self._lanes[lane] = begin + seconds
        self.spans.append(Span(lane, of.fqn, of.phase, begin, begin + seconds))
        return begin + seconds

    def wait(self, number: int, now: float) -> tuple[float, str]:
        """When a wait that starts at `now` ends, and the group it waits for."""
        end, work, fqn = self._pending.pop(number, (now, 0.0, ""))
        return max(end, now) + work, fqn

    def settle(self, now: float) -> tuple[float, str]:
        """The same for the all-reduces that backward leaves to its end."""
        (end, fqn), self._later = self._later, (0.0, "")
        return max(end, now), fqn


def _stepped(trace: Trace, seconds: float) -> dict[str, float]:
    """When a step that begins with the iteration has updated each group, by label: in the order of forward."""
    groups: dict[str, int] = {}
    for one in trace.transfers:
        if one.copied and (one.collective, one.phase) == ("all-gather", "forward"):
            groups.setdefault(one.fqn, one.copied)
    ends = itertools.accumulate(nbytes * seconds / sum(groups.values()) for nbytes in groups.values())
    return dict(zip(groups, ends, strict=True))


def replay(
    trace: Trace, machine: Machine, costs: OperatorCosts, *, overlapped: bool = False, in_files: int = 0
) -> Timeline:
    """The times of a trace on a machine. Raises `MachineError` as `transfer_seconds` and `costs`.

    A step on the host takes the time of its memory traffic at this rank's part of the host's bandwidth. If it is
    `overlapped`, it begins with the iteration, and each gather in forward waits for its group; `in_files` are the bytes
    that it reads from files and writes to them meanwhile.
    """
    lanes = _Lanes(machine)
    queued = machine.device != "cpu"
    seconds_of = functools.cache(costs.seconds)
    host = device = 0.0
    flops = 0
    exposed, compute = defaultdict[str, float](float), defaultdict[str, float](float)
    spans, moments = list[Span](), list[float]()
    each = machine.ranks_per_host / machine.host_bandwidth
    stepped_bytes = sum(one.operator.bytes for one in trace.steps if isinstance(one, Ran) and one.on_host)
    host_step = max(stepped_bytes * each, in_files / machine.storage_bandwidth)
    host_exposed = 0.0 if overlapped else host_step
    stepped = _stepped(trace, host_step) if overlapped else {}

    def note(lane: Literal["compute", "waiting"], fqn: str, phase: str, begin: float) -> None:
        last = spans[-1] if spans else None
        if last is not None and (last.lane, last.fqn, last.phase) == (lane, fqn, phase):
            spans[-1] = last._replace(end=device)
        elif device > begin:
            spans.append(Span(lane, fqn, phase, begin, device))

    def wait(ready: float, fqn: str, phase: str) -> None:
        nonlocal device
        exposed[fqn] += ready - device
        before, device = device, ready
        note("waiting", fqn, phase, before)

    for step in trace.steps:
        if isinstance(step, Ran):
            if step.phase not in ("forward", "backward"):
                wait(*lanes.settle(device), step.phase)
            before = device
            if step.on_host and not overlapped:
                host = device = max(host, device) + machine.operator_seconds + step.operator.bytes * each
                note("compute", step.fqn, step.phase, before)
            elif not step.on_host:
                seconds = seconds_of(step.operator)
                flops += step.operator.flops if step.phase == "forward" else 0
                host += machine.operator_seconds
                device = max(device, host) + seconds if queued else device + machine.operator_seconds + seconds
                compute[step.fqn] += device - before
                note("compute", step.fqn, step.phase, before)
        elif isinstance(step, Dispatched):
            seconds = machine.dtensor_seconds + step.tensors * machine.dtensor_each_seconds
            host += seconds
            if not queued:
                device += seconds
                compute[step.fqn] += seconds
        elif isinstance(step, Transfer):
            ready = stepped.get(step.fqn, 0.0)
            if ready > device:  # the host waits for the group's step before it launches anything else
                host_exposed += ready - device
                before, device, host = device, ready, max(host, ready)
                note("waiting", step.fqn, step.phase, before)
            lanes.launch(step, device)
        elif isinstance(step, Copied):
            lanes.copy(step, device)
        elif isinstance(step, Awaited):
            wait(*lanes.wait(step.about, device), step.phase)
        moments.append(device)
    wait(*lanes.settle(device), "backward")
    return Timeline(
        step=max(device, host if queued else 0.0),
        compute=sum(compute.values()),
        communication=lanes.communication,
        exposed=sum(exposed.values()),
        optimizer=sum(one.end - one.begin for one in spans if (one.lane, one.phase) == ("compute", "optimizer")),
        flops=3 * flops,
        exposed_by_fqn={fqn: seconds for fqn, seconds in exposed.items() if fqn or seconds},
        compute_by_fqn=dict(compute),
        host_step=host_step,
        host_exposed=host_exposed,
        copies=lanes.copies,
        spans=(*spans, *lanes.spans),
        moments=tuple(moments),
    )
