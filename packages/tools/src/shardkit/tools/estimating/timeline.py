"""Gives a trace the times of a machine: when operators run, when communication runs beside them, who waits for it.

There are two kinds of machine. Ranks on a CPU compute themselves: an operator's overhead and its work follow one
another, and with shared memory the copying of a communication is work of the rank itself, done where it is waited for.
A device with a queue works behind its host, which only launches; communication runs on streams of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch

from shardkit.tools.estimating.trace import Awaited, Dispatched, Launched, Operator, Ran, Trace, Transfer
from shardkit.tools.machine import Machine


class OperatorCosts(Protocol):
    """Seconds that a device needs for one call of an operator, its launch aside."""

    def seconds(self, operator: Operator) -> float:
        """Seconds of one call; 0 for one that only makes views."""


class Roofline:
    """From the machine's description: an operator takes as long as its arithmetic, or its memory traffic if longer."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def seconds(self, operator: Operator) -> float:
        machine = self._machine
        moving = operator.bytes / (machine.memory_bandwidth * machine.efficiency)
        if not operator.flops:
            return moving
        return max(moving, operator.flops / machine.flops_for(operator.dtype or torch.float32))


def transfer_seconds(transfer: Transfer, machine: Machine) -> float:
    """Seconds that a communication takes by itself.

    Every rank receives `(ranks - 1) / ranks` of the bytes over its link inside the host. What comes from other hosts,
    `(hosts - 1) / hosts` of the bytes, comes once for each host and over the adapters of all its ranks in the group. An
    all-reduce is a reduce-scatter and an all-gather. Latencies add up as in a tree.
    """
    if transfer.ranks == 1:
        return 0.0
    link = machine.link(transfer.hosts)
    halves = 2 if transfer.collective == "all-reduce" else 1
    moving = transfer.moved * (transfer.ranks - 1) / transfer.ranks / machine.inside.bandwidth
    if transfer.hosts > 1:
        adapters = transfer.ranks / transfer.hosts
        outside = transfer.moved * (transfer.hosts - 1) / transfer.hosts / (adapters * link.bandwidth)
        moving = max(moving, outside)
    return halves * (moving + link.latency * math.ceil(math.log2(transfer.ranks)))


@dataclass(frozen=True)
class Timeline:
    """The times of one iteration, in seconds.

    Attributes:
        step: from its beginning to its end.
        compute: in operators, launches included where they are on the critical path.
        communication: that communications take by themselves, overlapped or not.
        exposed: that computation waits for them.
        exposed_by_fqn: the same, by the group that is waited for.
        compute_by_fqn: time in operators, by module.
    """

    step: float
    compute: float
    communication: float
    exposed: float
    exposed_by_fqn: dict[str, float]
    compute_by_fqn: dict[str, float]


class _Lanes:
    """What communicates beside the computation: one lane for gathers and one for everything else, as in core."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[bool, float] = defaultdict(float)
        self._pending: dict[int, tuple[float, float, str]] = {}
        self.communication = 0.0

    def launch(self, number: int, transfer: Transfer, now: float) -> None:
        seconds = transfer_seconds(transfer, self._machine)
        self.communication += seconds
        if self._machine.transport == "shared" and transfer.of_core:
            self._pending[number] = now, seconds, transfer.fqn
            return
        lane = transfer.collective == "all-gather"
        end = self._free[lane] = max(self._free[lane], now) + seconds
        self._pending[number] = end, 0.0, transfer.fqn

    def wait(self, number: int, now: float) -> tuple[float, str]:
        """When the communication's bytes are there, if one waits from `now` on, and whose they are."""
        end, work, fqn = self._pending.pop(number, (now, 0.0, ""))
        return max(end, now) + work, fqn


def replay(trace: Trace, machine: Machine, costs: OperatorCosts) -> Timeline:
    """The times of a trace on a machine."""
    lanes = _Lanes(machine)
    queued = machine.device != "cpu"
    seconds_of: dict[Operator, float] = {}
    host = device = 0.0
    exposed: dict[str, float] = defaultdict(float)
    compute: dict[str, float] = defaultdict(float)
    for step in trace.steps:
        if isinstance(step, Ran):
            seconds = seconds_of.get(step.operator)
            if seconds is None:
                seconds = seconds_of[step.operator] = costs.seconds(step.operator)
            before = device
            host += machine.operator_seconds
            device = max(device, host) + seconds if queued else device + machine.operator_seconds + seconds
            compute[step.fqn] += device - before
        elif isinstance(step, Dispatched):
            seconds = machine.dtensor_seconds + step.tensors * machine.dtensor_each_seconds
            host += seconds
            if not queued:
                device += seconds
                compute[step.fqn] += seconds
        elif isinstance(step, Launched):
            lanes.launch(step.number, step.transfer, device)
        else:
            assert isinstance(step, Awaited)
            ready, fqn = lanes.wait(step.number, device)
            exposed[fqn] += ready - device
            device = ready
    return Timeline(
        step=max(device, host if queued else 0.0),
        compute=sum(compute.values()),
        communication=lanes.communication,
        exposed=sum(exposed.values()),
        exposed_by_fqn=dict(exposed),
        compute_by_fqn=dict(compute),
    )
