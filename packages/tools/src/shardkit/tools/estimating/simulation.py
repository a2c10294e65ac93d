"""Runs a training job with fake tensors, as one rank of a simulated world."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.commands.users_code import users_code
from shardkit.core.runtime.choice import stand_ins
from shardkit.core.runtime.lanes import Program, Reduction
from shardkit.core.runtime.plan import GatherPlan, Mean, ReducePlan, Transport, report_allocated, report_freed, reported
from shardkit.core.runtime.shared.segment import ALIGNMENT, aligned
from shardkit.tools.estimating.job import EstimateError, TrainingJob
from shardkit.tools.estimating.observer import Observer, on_this_rank
from shardkit.tools.estimating.trace import Trace, neighbourhood
from shardkit.tools.machine import Machine
from shardkit.tools.machine import Transport as Kind
from shardkit.tools.torch_compat import FakeTensors, forget_meshes, join_fake_world

_MOST_RANKS = 16_384


def axes_of(mesh: int | Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh, given as a world size or as sizes by name.

    Raises:
        EstimateError: for no axes, sizes below one, or more ranks than can be simulated.
    """
    axes = {"dp": mesh} if isinstance(mesh, int) else dict(mesh)
    if not axes or any(size < 1 for size in axes.values()) or math.prod(axes.values()) > _MOST_RANKS:
        raise EstimateError(
            f"a mesh of {axes} cannot be simulated; expected sizes from 1 on, {_MOST_RANKS} ranks at most"
        )
    return axes


@contextlib.contextmanager
def _fake_world(axes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Makes this process `rank` of a world without peers while the context lasts; gives its mesh, on "cpu".

    Raises:
        EstimateError: if the process already has a default process group, or the world has no such rank.
    """
    if dist.is_initialized():
        raise EstimateError(
            "this process has a default process group already; run the estimate in a process of its own, without "
            "torchrun and before init_process_group"
        )
    world_size = math.prod(axes.values())
    if not 0 <= rank < world_size:
        raise EstimateError(f"there is no rank {rank} among {world_size} ranks; expected 0 to {world_size - 1}")
    join_fake_world(rank, world_size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        forget_meshes()


class SimulatedTransport(Transport):
    """Stands in for one of core's transports in a process group: same plans, memory and events, but nothing moves.

    Args:
        kind: "shared" and "gloo" as with gloo on CPU, "nccl" for in-place collectives.
        ranks_per_host: number of ranks that share a host.
        observer: is told, before a reduction that sends unequal parts, the bytes that stay inside this host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        kind: Kind,
        ranks_per_host: int,
        observer: Observer,
    ) -> None:
        super().__init__(group, device)
        # torch 2.15's NCCL launches each collective by itself, so that core packs everything (runtime/choice.py).
        together = torch.__version__ < (2, 15)  # type: ignore[operator]  # torch declares a str
        self.coalesces = kind == "nccl" and (together or os.environ.get("TORCH_DIST_USE_NCCL2") == "0")
        self.collective = kind != "shared"
        self.kind = kind
        self._local = neighbourhood(group, ranks_per_host).local
        self._observer = observer
        self._lent: dict[str, int] = {}
        # Like core's outbox: parcels by the number of the reduction that filled them last.
        self._parcels: dict[int, torch.Tensor] = {}
        self._posted = 0

    @property
    def outbox_bytes(self) -> int:
        """Bytes of this rank's outbox, assuming that it is behind its peers as often as ahead."""
        return sum(parcel.numel() for parcel in self._parcels.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes that this rank maps of its peers' memory: their shards and outboxes, of the same size as its own."""
        return sum(self._lent.values()) + (self.world_size - 1) * self.outbox_bytes

    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        packed = None
        if plan.packing is not None:
            packed = self.buffer(plan.packing.numel, plan.packed_dtype, plan.label, "packed")
        own = sum(item.layout.local_numel(self.rank) * item.dtype.itemsize for item in plan.items)
        return self._run_gather(plan, packed, self._copied(own, plan.label))

    def _run_gather(self, plan: GatherPlan, packed: torch.Tensor | None, copied: torch.Tensor | None) -> Program:
        if self.kind == "shared":
            own = sum(item.layout.local_numel(self.rank) * item.dtype.itemsize for item in plan.items)
            self._lent[plan.label] = plan.nbytes - own
        with reported(plan, time.perf_counter()):
            yield ()
            if packed is not None:
                report_freed(packed, plan.label, "packed")
            del packed, copied

    def _copied(self, nbytes: int, label: str) -> torch.Tensor | None:
        """Memory of the device for offloaded shards before a gather, or their gradients after a reduction."""
        if not self._observer.offloads or not nbytes:
            return None
        made = torch.empty(nbytes, dtype=torch.uint8)
        report_allocated(made, label, "packed")
        return made

    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        packed, rows = None, []
        if self.kind != "shared":
            packed = plan.pack(grads)
            rows = [grads[i].to(plan.wire_dtype).contiguous() for i in plan.direct]
            grads.clear()
        return self._run_reduction(plan, grads, rows, packed)

    def _run_reduction(
        self, plan: ReducePlan, grads: list[torch.Tensor], rows: list[torch.Tensor], packed: torch.Tensor | None
    ) -> Reduction:
        output = plan.allocate_output()
        copied = self._copied(output.nbytes, plan.label)
        if self.kind == "shared":
            itemsize = plan.wire_dtype.itemsize
            self._post([numel * itemsize for place, numel in enumerate(plan.row_numels) if place != self.rank], plan)
            grads.clear()
            self._observer.announce(sum(plan.row_numels[place] for place in self._local) * itemsize)
        with reported(plan, time.perf_counter()):
            yield ()
            if self.kind == "gloo" and packed is not None:
                torch.empty_like(packed)  # gloo reduces a copy, which becomes a tensor of torch when it is waited for
            if packed is not None:
                report_freed(packed, plan.label, "packed")
            del rows, packed, copied
            if self.kind == "shared" and plan.wire_dtype != plan.reduce_dtype and output.numel():
                torch.empty_like(output)  # each peer's terms are cast before they are added
        return output

    def _post(self, sizes: Sequence[int], plan: ReducePlan) -> None:
        """Fills a parcel with rows. Ranks are never in step: one parcel is in use while the next is filled."""
        nbytes = sum(map(aligned, sizes)) or ALIGNMENT
        idle = {number: parcel for number, parcel in self._parcels.items() if number < self._posted - 1}
        fitting = [number for number, parcel in idle.items() if parcel.numel() >= nbytes]
        if fitting:
            parcel = self._parcels.pop(min(fitting, key=lambda number: idle[number].numel()))
        else:
            for number, unused in idle.items():
                del self._parcels[number]
                report_freed(unused, plan.label, "outbox")
            parcel = torch.empty(nbytes, dtype=torch.uint8)
            report_allocated(parcel, plan.label, "outbox")
        self._parcels[self._posted] = parcel
        self._posted += 1

    def all_gather(self, buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        return ()

    def exchange(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int]
    ) -> Sequence[dist.Work]:
        return ()


class Sizes(NamedTuple):
    """Sizes of a model or a part of it: elements of parameters, bytes of weights and of optimizer state.

    Weights are parameters and buffers; `own` is this rank's part, `whole` is the sum over all ranks.
    """

    parameters: int
    own_weights: int
    whole_weights: int
    own_optimizer: int
    whole_optimizer: int

    def plus(self, other: Sizes, times: int) -> Sizes:
        """These sizes plus `times` times those of `other`."""
        return Sizes(*(own + times * one for own, one in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Recording:
    """The recording of one iteration of a rank.

    Attributes:
        trace: its steps.
        sizes: sizes of parameters, buffers and optimizer state.
        blocks: the same for each repeated block that the trace distinguishes; empty if it distinguishes none.
        outbox_bytes: part of the peak, for gradients that peers of this host read; an upper bound.
        mapped_bytes: memory of other ranks of this host that this rank maps (shared memory).
        values_read: places that asked for data of tensors.
        dtypes: dtypes of parameters and of the optimizer's state.
    """

    trace: Trace
    sizes: Sizes
    blocks: list[Sizes]
    mapped_bytes: int
    outbox_bytes: int
    values_read: tuple[str, ...]
    dtypes: dict[str, str]


def simulate(
    job: TrainingJob, axes: Mapping[str, int], rank: int, machine: Machine, repeated: str | None = None
) -> Recording:
    """Runs two iterations and records the second, when the order of groups is known and optimizer state exists.

    It depends on the machine only in which ranks share a host, how they move bytes, and whether there is a device. With
    `repeated`, the FQN of a list of blocks, the trace distinguishes the blocks.

    Raises:
        EstimateError: if the job cannot run with fake tensors (the message says where and why), or as `_fake_world`.
    """
    fake = FakeTensors()
    observer = Observer(machine.ranks_per_host, fake, repeated)
    transports: dict[dist.ProcessGroup, SimulatedTransport] = {}

    def stand_in(group: dist.ProcessGroup, device: torch.device) -> Transport:
        if group not in transports:
            several = neighbourhood(group, machine.ranks_per_host).hosts > 1
            kind: Kind = "gloo" if several and machine.transport == "shared" else machine.transport
            transports[group] = SimulatedTransport(group, device, kind, machine.ranks_per_host, observer)
        return transports[group]

    with _fake_world(axes, rank) as mesh, fake, stand_ins(stand_in), observer:
        model, optimizer = _run(job, mesh, observer, has_device=machine.device != "cpu")
        trace = observer.stop()  # before anything is freed
        blocks: list[Sizes] = []
        if repeated is not None and not observer.mixed:
            blocks = [_sizes(block, optimizer) for block in model.get_submodule(repeated).children()]
        states = _states(optimizer, model.parameters())
        return Recording(
            trace=trace,
            sizes=_sizes(model, optimizer),
            blocks=blocks,
            outbox_bytes=sum(one.outbox_bytes for one in transports.values()),
            mapped_bytes=sum(one.mapped_bytes for one in transports.values()),
            values_read=tuple(observer.values_read),
            dtypes={"parameters": _dtypes(model.parameters()), "optimizer state": _dtypes(states)},
        )


def _run(
    job: TrainingJob, mesh: DeviceMesh, observer: Observer, *, has_device: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds a job and runs two iterations; the observer records the second."""
    with users_code("building the model", "the factory runs with tensors that have no data, on 'cpu'", EstimateError):
        model = job.build(mesh)
    observer.adopt(model, has_device=has_device)
    with users_code("making the optimizer", "it gets the parameters of the sharded model", EstimateError):
        optimizer = job.make_optimizer(model)
    for recording in (False, True):
        observer.where.set_phase = "inputs"
        with users_code("making the inputs", "the function is called without arguments", EstimateError):
            batches = [job.inputs() for _ in range(job.policies.accumulate)]
        observer.where.set_phase = "between"
        if recording:
            # Not earlier: in the first step DTensor infers shapes with fake tensors as large as whole parameters.
            observer.start()
        with users_code("an iteration", "it ran with tensors on 'cpu' that have no data", EstimateError):
            job.run(model, optimizer, batches)
        del batches
    return model, optimizer


def _states(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    values = (value for one in parameters if one in optimizer.state for value in optimizer.state[one].values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes, in order of falling bytes."""
    held: Counter[str] = Counter()
    for one in tensors:
        if one.dim():
            held[str(one.dtype).removeprefix("torch.")] += one.numel() * one.itemsize
    return " and ".join(name for name, _ in held.most_common()) or "none"


def _sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sizes:
    parameters = list(model.parameters())
    sizes = []
    for tensors in ([*parameters, *model.buffers()], _states(optimizer, parameters)):
        own = map(on_this_rank, tensors)
        sizes += [sum(tensor.numel() * tensor.itemsize for tensor in some) for some in (own, tensors)]
    return Sizes(sum(parameter.numel() for parameter in parameters), *sizes)
