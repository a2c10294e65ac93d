"""Runs a training job with fake tensors, as one rank of a world that does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core.runtime.transport import StandIn, stand_ins
from shardkit.core.state import state_of
from shardkit.core.torch_compat import local_of
from shardkit.tools.estimating.errors import explained
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.estimating.ledger import Peak
from shardkit.tools.estimating.observer import Observer
from shardkit.tools.estimating.reserved import CachingAllocator
from shardkit.tools.estimating.trace import Trace
from shardkit.tools.estimating.traffic import neighbourhood
from shardkit.tools.estimating.transport import SimulatedTransport, simulated
from shardkit.tools.estimating.world import fake_world
from shardkit.tools.machine import Machine, Transport
from shardkit.tools.torch_compat import FakeTensors

__all__ = ["Recording", "simulate"]


@dataclass(frozen=True)
class StateSize:
    """Bytes of tensors that a checkpoint holds: this rank's part, and the whole over all ranks."""

    own: int
    whole: int


@dataclass(frozen=True)
class Recording:
    """What one iteration of a rank was.

    Attributes:
        trace: what it did.
        peak: the moment of most memory.
        idle_bytes: what stays between iterations.
        weights: size of parameters and buffers.
        optimizer: size of the optimizer's state.
        cached_bytes: what torch's caching allocator of GPUs would have taken from the device.
        parameters: elements of the whole model's parameters.
        outbox_bytes: of the peak, for gradients that peers of this host read; at most, as it depends on who is ahead.
        mapped_bytes: memory of other ranks of this host that this rank maps (shared memory).
        groups: labels of the parameter groups.
        values_read: where data of tensors was asked for.
    """

    trace: Trace
    peak: Peak
    idle_bytes: int
    weights: StateSize
    optimizer: StateSize
    cached_bytes: int
    parameters: int
    mapped_bytes: int
    outbox_bytes: int
    groups: tuple[str, ...]
    values_read: tuple[str, ...]


def simulate(job: TrainingJob, axes: Mapping[str, int], rank: int, machine: Machine) -> Recording:
    """Runs two iterations and records the second, when the order of groups is known and the optimizer has its state.

    Of the machine only matters which ranks share a host, and how they move bytes.

    Raises:
        EstimateError: for a job that cannot run with fake tensors, saying where and why.
    """
    with fake_world(axes, rank) as mesh:
        fake = FakeTensors()
        observer = Observer(machine.ranks_per_host, fake)
        transports: dict[dist.ProcessGroup, SimulatedTransport] = {}

        def stand_in(group: dist.ProcessGroup, device: torch.device) -> StandIn:
            if group not in transports:
                several = neighbourhood(group, machine.ranks_per_host).hosts > 1
                kind: Transport = "pairwise" if several and machine.transport == "shared" else machine.transport
                transports[group] = simulated(group, device, kind, machine.ranks_per_host, observer.announce)
            return transports[group]

        with fake, stand_ins(stand_in), observer:
            return _run(job, mesh, observer, transports)


def _run(
    job: TrainingJob,
    mesh: DeviceMesh,
    observer: Observer,
    transports: dict[dist.ProcessGroup, SimulatedTransport],
) -> Recording:
    with explained("building the model failed", "the factory runs with tensors that have no data, on 'cpu'"):
        model = job.build(mesh)
    observer.adopt(model)
    allocator = CachingAllocator()
    observer.ledger.watch(allocator.changed)
    with explained("making the optimizer failed", "it gets the parameters of the sharded model"):
        optimizer = job.optimizer(model.parameters())
    for recording in (False, True):
        observer.where.set_phase = "inputs"
        with explained("making the inputs failed", "the function is called without arguments"):
            batches = [job.inputs() for _ in range(job.policies.accumulate)]
        observer.where.set_phase = "between"
        if recording:
            idle = observer.ledger.total
            observer.start()
        with explained("an iteration failed", "it ran with tensors that have no data; it runs on 'cpu' tensors"):
            job.run(model, optimizer, batches)
        del batches
    assert observer.ledger.peak is not None
    groups = [group for module in model.modules() if (state := state_of(module)) for group in state.groups]
    return Recording(
        trace=observer.trace,
        peak=observer.ledger.peak,
        idle_bytes=idle,
        weights=_state_size([*model.parameters(), *model.buffers()]),
        optimizer=_state_size(_tensors_of(optimizer)),
        cached_bytes=allocator.reserved,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        outbox_bytes=sum(one.outbox_bytes for one in transports.values()),
        mapped_bytes=sum(one.mapped_bytes for one in transports.values()),
        groups=tuple(dict.fromkeys(group.label for group in groups)),
        values_read=tuple(observer.values_read),
    )


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _state_size(tensors: list[torch.Tensor]) -> StateSize:
    own = [local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return StateSize(
        sum(tensor.numel() * tensor.itemsize for tensor in own),
        sum(tensor.numel() * tensor.itemsize for tensor in tensors),
    )
