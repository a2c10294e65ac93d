"""How long operators and communications take on a machine."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from shardkit.tools.estimating.trace import Operator
from shardkit.tools.estimating.traffic import Transfer
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
