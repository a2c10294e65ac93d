"""Runs a training job with fake tensors, as one rank of a world that does not exist."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardkit.core import Owned, events
from shardkit.core.ownership import newton_schulz_flops
from shardkit.core.placements import is_ours, layout_for
from shardkit.core.runtime.choice import stand_ins
from shardkit.core.runtime.collective import FlatTransport
from shardkit.core.runtime.lanes import Program
from shardkit.core.runtime.packing import Slots
from shardkit.core.runtime.plan import GatherPlan, ReducePlan, Transport
from shardkit.core.runtime.shared.segment import ALIGNMENT, aligned
from shardkit.core.storage import note_allocated, note_freed
from shardkit.core.torch_compat import local_of
from shardkit.core.users_code import users_code
from shardkit.tools.estimating.job import EstimateError, TrainingJob
from shardkit.tools.estimating.observer import Observer
from shardkit.tools.estimating.trace import Trace, neighbourhood
from shardkit.tools.machine import Machine
from shardkit.tools.machine import Transport as Kind
from shardkit.tools.torch_compat import FakeTensors, forget_meshes, join_fake_world

MOST_RANKS = 16_384


def axes_of(mesh: int | Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh, given as a world size or as sizes by name.

    Raises:
        EstimateError: for no axes, sizes below one, or more ranks than can be simulated.
    """
    axes = {"dp": mesh} if isinstance(mesh, int) else dict(mesh)
    if not axes or any(size < 1 for size in axes.values()) or math.prod(axes.values()) > MOST_RANKS:
        raise EstimateError(
            f"a mesh of {axes} cannot be simulated; expected sizes from 1 on, {MOST_RANKS} ranks at most"
        )
    return axes


@contextlib.contextmanager
def fake_world(axes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Within this context the process is `rank` of a world without peers; gives its mesh, on "cpu".

    Raises:
        EstimateError: if the process is a rank of something already, or the world has no such rank.
    """
    if dist.is_initialized():
        raise EstimateError(
            "this process has a default process group already; an estimate runs in a process of its own, without "
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


@dataclass(eq=False)
class _Parcel:
    memory: torch.Tensor
    number: int


class _Outbox:
    """Follows core's `Outbox`. Ranks are never in step: a parcel is on its way while the next is filled."""

    def __init__(self) -> None:
        self._parcels: list[_Parcel] = []
        self._numbers = itertools.count()

    @property
    def nbytes(self) -> int:
        """Bytes of all parcels."""
        return sum(parcel.memory.numel() for parcel in self._parcels)

    def post(self, nbytes: int, label: str) -> None:
        """Fills a parcel of at least `nbytes`."""
        nbytes = nbytes or ALIGNMENT
        number = next(self._numbers)
        idle = [parcel for parcel in self._parcels if parcel.number < number - 1]
        fitting = [parcel for parcel in idle if parcel.memory.numel() >= nbytes]
        if fitting:
            min(fitting, key=lambda parcel: parcel.memory.numel()).number = number
            return
        for parcel in idle:
            self._parcels.remove(parcel)
            note_freed(parcel.memory, label, "outbox")
        memory = torch.empty(nbytes, dtype=torch.uint8)
        note_allocated(memory, label, "outbox")
        self._parcels.append(_Parcel(memory, number))


class SimulatedTransport(Transport):
    """Stands in for one of core's transports in a process group.

    Args:
        kind: "shared" and "pairwise" as gloo has them on CPU, "nccl" for in-place collectives.
        ranks_per_host: which ranks share a host.
        announce: called with the bytes that stay inside this host just before each communication starts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        kind: Kind,
        ranks_per_host: int,
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(group, device)
        self.packs = kind != "shared"
        self.padded = kind == "nccl"
        self.sums_locally = kind != "nccl"
        self.kind = kind
        self.neighbours = neighbourhood(group, ranks_per_host)
        self._announce = announce
        self._outbox = _Outbox()
        self._lent: dict[str, int] = {}

    @property
    def outbox_bytes(self) -> int:
        """What this rank's outbox holds, if it is behind its peers as often as not."""
        return self._outbox.nbytes

    @property
    def mapped_bytes(self) -> int:
        """What this rank maps of its peers' memory: their shards and their outboxes, which are like its own."""
        return sum(self._lent.values()) + (self.world_size - 1) * self._outbox.nbytes

    # -- gathers -------------------------------------------------------------------------------------------------------

    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        packed = None
        if plan.packing is not None:
            packed = self.gather_buffer(plan.packing.numel, plan.packed_dtype, plan.label)
            note_allocated(packed, plan.label, "packed")
        return self._run_gather(plan, packed)

    def _run_gather(self, plan: GatherPlan, packed: torch.Tensor | None) -> Program:
        launched = time.perf_counter()
        if self.kind == "shared":
            own = sum(item.layout.local_numel(self.rank) * item.dtype.itemsize for item in plan.items)
            self._lent[plan.label] = plan.nbytes - own
        described = (plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.dtype, self.group)
        self._announce(plan.wire_nbytes * len(self.neighbours.local) // max(1, self.world_size - 1))
        events.emit(events.GatherStarted(*described))
        yield ()
        if packed is not None:
            note_freed(packed, plan.label, "packed")
        del packed
        events.emit(events.GatherFinished(*described, time.perf_counter() - launched))

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduce(
        self,
        plan: ReducePlan,
        grads: list[torch.Tensor],
        output: torch.Tensor,
        *,
        predivide: float | None,
        postdivide: float | None,
        op: Any,
    ) -> Program:
        if self.kind == "shared":
            return self._reduce_shared(plan, grads, output)
        packed = None
        if plan.packing is not None:
            packed = self.reduce_buffer(plan.packing.numel, plan.wire_dtype, plan.label)
            note_allocated(packed, plan.label, "packed")
        return self._run_reduction(plan, grads, output, packed)

    def _reduce_shared(self, plan: ReducePlan, grads: list[torch.Tensor], output: torch.Tensor) -> Program:
        launched = time.perf_counter()
        itemsize = plan.wire_dtype.itemsize
        rows = (numel for rank, numel in enumerate(plan.row_numels) if rank != self.rank)
        self._outbox.post(sum(aligned(numel * itemsize) for numel in rows), plan.label)
        grads.clear()
        self._start_reduction(plan)
        yield ()
        if plan.wire_dtype != plan.reduce_dtype and output.numel():
            torch.empty_like(output)  # each peer's terms are cast before they are added
        self._end_reduction(plan, launched)

    def _run_reduction(
        self, plan: ReducePlan, grads: list[torch.Tensor], output: torch.Tensor, packed: torch.Tensor | None
    ) -> Program:
        launched = time.perf_counter()
        rows = [grads[i].to(plan.wire_dtype).contiguous() for i in plan.direct]
        staging = self._landing_rows(plan)
        self._start_reduction(plan)
        yield ()
        for buffer, kind in ((packed, "packed"), (staging, "reduce_input")):
            if buffer is not None:
                note_freed(buffer, plan.label, kind)  # type: ignore[arg-type]
        del rows, packed, staging, buffer
        self._end_reduction(plan, launched)

    def _landing_rows(self, plan: ReducePlan) -> torch.Tensor | None:
        peers = self.world_size - 1 - plan.lands_in_output
        if self.kind != "pairwise" or peers <= 0 or not plan.output_numel:
            return None
        staging = torch.empty(peers * plan.output_numel, dtype=plan.wire_dtype, device=self.device)
        note_allocated(staging, plan.label, "reduce_input")
        return staging

    def _start_reduction(self, plan: ReducePlan) -> None:
        if self.padded:
            inside = plan.wire_nbytes * len(self.neighbours.local) // max(1, self.world_size - 1)
        else:
            inside = sum(plan.row_numels[place] for place in self.neighbours.local) * plan.wire_dtype.itemsize
        self._announce(inside)
        events.emit(events.ReduceStarted(*_described(plan)))

    def _end_reduction(self, plan: ReducePlan, launched: float) -> None:
        events.emit(events.ReduceFinished(*_described(plan), time.perf_counter() - launched))


class SimulatedNetwork(SimulatedTransport, FlatTransport):
    """A simulated transport between ranks that share no memory: core's own programs for compressed rows run on it."""

    def all_gather(self, buffers: Sequence[torch.Tensor], slots: Sequence[Slots], tag: int) -> Sequence[dist.Work]:
        """Nothing to wait for."""
        return ()

    def exchange(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int], tag: int
    ) -> Sequence[dist.Work]:
        """Nothing to wait for."""
        return ()


def simulated(
    group: dist.ProcessGroup, device: torch.device, kind: Kind, ranks_per_host: int, announce: Callable[[int], None]
) -> SimulatedTransport:
    """What stands in for the transport of `kind`; see `SimulatedTransport`."""
    made = SimulatedTransport if kind == "shared" else SimulatedNetwork
    return made(group, device, kind, ranks_per_host, announce)


def _described(plan: ReducePlan) -> tuple[str, tuple[str, ...], int, int, torch.dtype, dist.ProcessGroup]:
    return plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.wire_dtype, plan.transport.group


@dataclass(frozen=True)
class Sizes:
    """Of a model, or a part of it: elements of its parameters; bytes of weights and of the optimizer's state.

    Weights are parameters and buffers; `own` is this rank's part, `whole` that of all ranks.
    """

    parameters: int
    own_weights: int
    whole_weights: int
    own_optimizer: int
    whole_optimizer: int

    def plus(self, other: Sizes, times: int) -> Sizes:
        """With `times` times as much as `other` has."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Sizes(*(own + times * one for own, one in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class Owners:
    """How parameters lie on the ranks of the shard group, where `Owned` or `Blocks` decide it for some of them.

    Attributes:
        bytes: of all parameters, by rank.
        work: of an optimizer step on owned matrices, by rank: FLOPs of one iteration of Newton-Schulz.
        by_fqn: the owner of each owned parameter.
    """

    bytes: tuple[int, ...]
    work: tuple[float, ...]
    by_fqn: dict[str, int]

    @property
    def slowest(self) -> int:
        """The rank with most work; of equals that with most bytes, then the lowest."""
        return max(range(len(self.bytes)), key=lambda rank: (self.work[rank], self.bytes[rank], -rank))


def _owners(model: nn.Module) -> Owners | None:
    placed = [(fqn, one, one.placements[-1]) for fqn, one in model.named_parameters() if isinstance(one, DTensor)]
    if not any(is_ours(at) for _, _, at in placed):
        return None
    ranks = placed[0][1].device_mesh.size(-1)
    nbytes, work, by_fqn = [0] * ranks, [0.0] * ranks, {}
    for fqn, one, at in placed:
        layout = layout_for(None if isinstance(at, Replicate) else at, tuple(one.shape), ranks)
        for rank in range(ranks):
            nbytes[rank] += one.itemsize * (one.numel() if isinstance(at, Replicate) else layout.local_numel(rank))
        if isinstance(at, Owned) and at.rank is not None:
            by_fqn[fqn] = at.rank
            work[at.rank] += newton_schulz_flops(torch.empty(one.shape, device="meta"))
    return Owners(tuple(nbytes), tuple(work), by_fqn)


@dataclass(frozen=True)
class Recording:
    """What one iteration of a rank was.

    Attributes:
        trace: what it did.
        sizes: of parameters, buffers and optimizer state.
        blocks: the same for each repeated block that the trace tells apart; none if it tells none apart.
        outbox_bytes: of the peak, for gradients that peers of this host read; at most, as it depends on who is ahead.
        mapped_bytes: memory of other ranks of this host that this rank maps (shared memory).
        owners: where owned parameters and those in blocks lie; None if there are none.
        values_read: where data of tensors was asked for.
        dtypes: of parameters and of the optimizer's state.
    """

    trace: Trace
    sizes: Sizes
    blocks: list[Sizes]
    mapped_bytes: int
    outbox_bytes: int
    owners: Owners | None
    values_read: tuple[str, ...]
    dtypes: dict[str, str]


def simulate(
    job: TrainingJob, axes: Mapping[str, int], rank: int, machine: Machine, repeated: str | None = None
) -> Recording:
    """Runs two iterations and records the second, when the order of groups is known and the optimizer has its state.

    Of the machine only matters which ranks share a host, and how they move bytes. With `repeated`, the FQN of a list of
    blocks, the trace tells the blocks apart.

    Raises:
        EstimateError: for a job that cannot run with fake tensors, saying where and why.
    """
    fake = FakeTensors()
    observer = Observer(machine.ranks_per_host, fake, repeated)
    transports: dict[dist.ProcessGroup, SimulatedTransport] = {}

    def stand_in(group: dist.ProcessGroup, device: torch.device) -> Transport:
        if group not in transports:
            several = neighbourhood(group, machine.ranks_per_host).hosts > 1
            kind: Kind = "pairwise" if several and machine.transport == "shared" else machine.transport
            transports[group] = simulated(group, device, kind, machine.ranks_per_host, observer.announce)
        return transports[group]

    with fake_world(axes, rank) as mesh, fake, stand_ins(stand_in), observer:
        model, optimizer = _run(job, mesh, observer)
        trace = observer.stop()  # before everything is freed
        return _recorded(model, optimizer, trace, observer, list(transports.values()))


def _run(job: TrainingJob, mesh: DeviceMesh, observer: Observer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds a job and runs two iterations, of which the observer keeps the second."""
    with users_code("building the model", "the factory runs with tensors that have no data, on 'cpu'", EstimateError):
        model = job.build(mesh)
    observer.adopt(model)
    with users_code("making the optimizer", "it gets the parameters of the sharded model", EstimateError):
        optimizer = job.make_optimizer(model)
    for recording in (False, True):
        observer.where.set_phase = "inputs"
        with users_code("making the inputs", "the function is called without arguments", EstimateError):
            batches = [job.inputs() for _ in range(job.policies.accumulate)]
        observer.where.set_phase = "between"
        if recording:
            # Not before: DTensor finds out shapes in the first step, with fake tensors as large as whole parameters.
            observer.start()
        with users_code("an iteration", "it ran with tensors on 'cpu' that have no data", EstimateError):
            job.run(model, optimizer, batches)
        del batches
    return model, optimizer


def _recorded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trace: Trace,
    observer: Observer,
    transports: Sequence[SimulatedTransport],
) -> Recording:
    blocks: list[Sizes] = []
    if observer.repeated is not None and not observer.mixed:
        blocks = [_sizes(block, optimizer) for block in model.get_submodule(observer.repeated).children()]
    states = _tensors_of(optimizer, model.parameters())
    return Recording(
        trace=trace,
        sizes=_sizes(model, optimizer),
        blocks=blocks,
        outbox_bytes=sum(one.outbox_bytes for one in transports),
        mapped_bytes=sum(one.mapped_bytes for one in transports),
        owners=_owners(model),
        values_read=tuple(observer.values_read),
        dtypes={"parameters": _dtypes(model.parameters()), "optimizer state": _dtypes(states)},
    )


def _tensors_of(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    values = (value for one in parameters if one in optimizer.state for value in optimizer.state[one].values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """Of most bytes first."""
    held: Counter[str] = Counter()
    for one in tensors:
        if one.dim():
            held[str(one.dtype).removeprefix("torch.")] += one.numel() * one.itemsize
    return " and ".join(name for name, _ in held.most_common()) or "none"


def _sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sizes:
    parameters = list(model.parameters())
    weights = _bytes([*parameters, *model.buffers()])
    states = _bytes(_tensors_of(optimizer, parameters))
    return Sizes(sum(parameter.numel() for parameter in parameters), *weights, *states)


def _bytes(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Of this rank's parts, and of all ranks'."""
    own = [local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.itemsize for tensor in own), sum(t.numel() * t.itemsize for t in tensors)
