"""An estimate: what a training job will take, from a recording and a machine."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools.estimating.job import Policies, TensorParallel, TrainingJob
from shardkit.tools.estimating.memory import Memory, Peak, memory_of
from shardkit.tools.estimating.repetition import record
from shardkit.tools.estimating.simulation import Owners, Recording, axes_of
from shardkit.tools.estimating.timeline import OperatorCosts, Roofline, Timeline, replay
from shardkit.tools.estimating.trace import Transfer
from shardkit.tools.machine import Machine, preset

SCHEMA = 1


@dataclass(frozen=True)
class TrafficRow:
    """What one parameter group, or module, sends in one iteration with one kind of collective in one phase.

    Attributes:
        calls: how many collectives.
        bytes: of the full tensors that are gathered or reduced.
        inside: bytes that this rank sends to ranks of its own host.
        between: bytes that it sends to other hosts.
        of_core: whether `fully_shard` sends them, or the model itself.
    """

    collective: str
    fqn: str
    phase: str
    calls: int
    bytes: int
    inside: int
    between: int
    of_core: bool


@dataclass(frozen=True)
class Checkpoint:
    """Weights and optimizer state: bytes of this rank's part and of the whole; seconds to write the part."""

    own: int
    whole: int
    seconds: float


@dataclass(frozen=True)
class OwnerShares:
    """Placements `Owned` and `Blocks`: bytes of parameters by rank of the shard group, and the optimizer's time.

    Attributes:
        bytes: of all parameters, by rank.
        imbalance: most work of a rank on owned matrices over the mean; 1 if there are none.
        slowest: the rank with most work.
        optimizer_seconds: the optimizer's predicted time on that rank; on the estimated rank until that is known.
        largest: FQNs of the parameters that the slowest rank owns.
    """

    bytes: tuple[int, ...]
    imbalance: float
    slowest: int
    optimizer_seconds: float
    largest: tuple[str, ...]


def _shares(owners: Owners, timeline: Timeline) -> OwnerShares:
    total, ranks = sum(owners.work), len(owners.bytes)
    return OwnerShares(
        owners.bytes,
        max(owners.work) * ranks / total if total else 1.0,
        owners.slowest,
        sum(one.end - one.begin for one in timeline.spans if (one.lane, one.phase) == ("compute", "optimizer")),
        tuple(fqn for fqn, rank in owners.by_fqn.items() if rank == owners.slowest),
    )


@dataclass(frozen=True)
class Estimate:
    """What one rank of a training job takes, in one iteration after the first.

    Attributes:
        axes: the mesh, sizes by name.
        rank: whose view this is.
        machine: what it runs on.
        policies: how the model is sharded, if it did not come sharded.
        parameters: elements of the whole model.
        peak: most bytes of tensors, by category, and where.
        idle_bytes: bytes of tensors between iterations.
        reserved_bytes: memory of the process at the peak: on a GPU what the allocator takes from it, on a CPU the bytes
            of tensors, those of peers that are mapped included.
        traffic: communication by module.
        timeline: predicted times.
        checkpoint: predicted size and time of a checkpoint.
        dtypes: of parameters, computation, reduction and optimizer state.
        notes: what the estimate had to leave out or assume.
        owners: how unevenly parameters lie, with `Owned` or `Blocks` placements.
    """

    axes: dict[str, int]
    rank: int
    machine: Machine
    policies: Policies
    parameters: int
    peak: Peak
    idle_bytes: int
    reserved_bytes: int
    traffic: tuple[TrafficRow, ...]
    timeline: Timeline
    checkpoint: Checkpoint
    dtypes: dict[str, str]
    notes: tuple[str, ...]
    owners: OwnerShares | None
    memory: Memory = dataclasses.field(repr=False)
    recording: Recording = dataclasses.field(repr=False)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.axes.values())

    @property
    def fits(self) -> bool:
        """Whether the reserved memory is no more than the device has."""
        return self.reserved_bytes <= self.machine.memory

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON values; `schema` counts incompatible changes of it."""
        policies = {
            name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for name, value in vars(self.policies).items()
            if name != "placements"
        }
        return {
            "schema": SCHEMA,
            "kind": "estimate",
            "axes": self.axes,
            "rank": self.rank,
            "machine": self.machine.to_json(),
            "policies": policies,
            "parameters": self.parameters,
            "peak": dataclasses.asdict(self.peak),
            "idle_bytes": self.idle_bytes,
            "reserved_bytes": self.reserved_bytes,
            "fits": self.fits,
            "traffic": [dataclasses.asdict(row) for row in self.traffic],
            "timeline": {
                name: value for name, value in vars(self.timeline).items() if name not in ("spans", "moments")
            },
            "checkpoint": dataclasses.asdict(self.checkpoint),
            "dtypes": self.dtypes,
            "owners": self.owners and dataclasses.asdict(self.owners),
            "notes": list(self.notes),
        }


def estimate(
    model_factory: Callable[..., nn.Module],
    inputs: Callable[[], Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    mesh: int | Mapping[str, int] = 1,
    policies: Policies | None = None,
    *,
    machine: Machine | str = "h100",
    rank: int = 0,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    step: Callable[[nn.Module, torch.optim.Optimizer, Any], None] | None = None,
    costs: OperatorCosts | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> Estimate:
    """Runs one iteration with fake tensors as one rank of a world that does not exist, and says what it takes.

    Args:
        model_factory: makes the model; with an argument it gets the mesh and shards the model itself.
        inputs: makes one micro-batch.
        optimizer: makes the optimizer.
        mesh: number of ranks, or sizes of the axes by name; 16,384 ranks at most.
        policies: how `fully_shard` is applied, if the model does not come sharded.
        machine: a description, or the name of a preset.
        rank: as which rank to run.
        loss: makes a scalar of output and micro-batch; see `TrainingJob`.
        step: runs one iteration, in place of forward, backward and step.
        costs: times of operators; by default from the machine's description.
        tensor_parallel: cuts the model over the axis "tp" of the mesh; see `TrainingJob`.

    Raises:
        EstimateError: if the job cannot run with fake tensors.
        MachineError: if the machine's description does not suffice.

    Not collective: it needs a process without a process group.
    """
    job = TrainingJob(model_factory, inputs, optimizer, loss, step, policies or Policies(), tensor_parallel)
    return estimate_job(job, mesh, machine, rank=rank, costs=costs)


def estimate_job(
    job: TrainingJob,
    mesh: int | Mapping[str, int],
    machine: Machine | str = "h100",
    *,
    rank: int = 0,
    costs: OperatorCosts | None = None,
) -> Estimate:
    """`estimate` for a `TrainingJob`."""
    described = preset(machine) if isinstance(machine, str) else machine
    axes = axes_of(mesh)
    recording = record(job, axes, rank, described)
    found = assess(recording, axes, rank, job.policies, described, costs)
    if found.owners is None or found.owners.slowest == rank % len(found.owners.bytes):
        return found
    slowest = record(job, axes, found.owners.slowest, described)  # the shard group's ranks come first
    return dataclasses.replace(found, owners=assess(slowest, axes, rank, job.policies, described, costs).owners)


def assess(
    recording: Recording,
    axes: dict[str, int],
    rank: int,
    policies: Policies,
    machine: Machine,
    costs: OperatorCosts | None = None,
) -> Estimate:
    """What a recording means on a machine."""
    sizes, timeline = recording.sizes, replay(recording.trace, machine, costs or Roofline(machine))
    state = sizes.own_weights + sizes.own_optimizer
    memory = memory_of(recording.trace, machine.expandable_segments)
    tensors = memory.peak.bytes + recording.mapped_bytes if machine.device == "cpu" else memory.reserved
    return Estimate(
        axes=axes,
        rank=rank,
        machine=machine,
        policies=policies,
        parameters=sizes.parameters,
        peak=memory.peak,
        idle_bytes=memory.idle,
        reserved_bytes=tensors + machine.process_bytes,
        traffic=_rows(recording.trace.transfers),
        timeline=timeline,
        owners=None if recording.owners is None else _shares(recording.owners, timeline),
        checkpoint=Checkpoint(state, sizes.whole_weights + sizes.whole_optimizer, state / machine.storage_bandwidth),
        dtypes=_dtypes(recording, policies),
        notes=_notes(recording, policies, machine),
        memory=memory,
        recording=recording,
    )


def _rows(transfers: Iterable[Transfer]) -> tuple[TrafficRow, ...]:
    by_place: dict[tuple[str, str, str, bool], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_place[transfer.collective, transfer.fqn, transfer.phase, transfer.of_core].append(transfer)
    return tuple(
        TrafficRow(
            collective,
            fqn,
            phase,
            calls=len(some),
            bytes=sum(one.bytes for one in some),
            inside=sum(one.inside for one in some),
            between=sum(one.between for one in some),
            of_core=of_core,
        )
        for (collective, fqn, phase, of_core), some in by_place.items()
    )


def _dtypes(recording: Recording, policies: Policies) -> dict[str, str]:
    own = recording.dtypes["parameters"]
    reduced = policies.reduce_dtype or (None if GRAD_DTYPE_DECIDES else policies.param_dtype)
    told = {"computation": policies.param_dtype, "reduction": reduced}
    return recording.dtypes | {
        name: own if one is None else str(one).removeprefix("torch.") for name, one in told.items()
    }


def _notes(recording: Recording, policies: Policies, machine: Machine) -> tuple[str, ...]:
    notes = []
    if recording.values_read:
        places = ", ".join(recording.values_read)
        notes.append(f"the data of a tensor was read in {places}; fake tensors have none, so it got 1 (or True)")
    if machine.device == "cpu":
        notes.append("resident memory is larger: free memory that the C library's heap keeps is not counted")
    if machine.device != "cpu":
        notes.append("operators are those that torch runs on a CPU; kernels of a GPU may save other tensors")
        if policies.offload:
            notes.append("CPU offload: shards, their gradients and optimizer state are counted as if on the device")
    return tuple(notes)
