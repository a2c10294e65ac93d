"""An estimate of a training job's needs, from a recording and a machine."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools.estimating.job import Policies, TensorParallel, TrainingJob
from shardkit.tools.estimating.memory import Memory, Peak, memory_of
from shardkit.tools.estimating.repetition import record
from shardkit.tools.estimating.simulation import Recording, axes_of
from shardkit.tools.estimating.tiers import activations_on_host
from shardkit.tools.estimating.timeline import OperatorCosts, Roofline, Timeline, replay
from shardkit.tools.estimating.trace import Category, Transfer
from shardkit.tools.machine import Machine, preset
from shardkit.tools.quantities import show

SCHEMA = 1


@dataclass(frozen=True)
class TrafficRow:
    """The traffic of one parameter group, or module, in one iteration, with one kind of collective in one phase.

    Attributes:
        calls: number of collectives.
        bytes: bytes of the full tensors that are gathered or reduced.
        inside: bytes that this rank sends to ranks of its own host.
        between: bytes that it sends to other hosts.
        of_core: whether `fully_shard` sends them; otherwise the model itself does.
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
class Estimate:
    """The needs of one rank of a training job, in one iteration after the first.

    Attributes:
        axes: the mesh: sizes by axis name.
        rank: the rank that is estimated.
        machine: the machine it runs on.
        policies: how the model is sharded, unless its factory shards it.
        parameters: elements of the whole model.
        peak: most bytes of tensors at a time, by category, and where this occurs.
        idle_bytes: bytes of tensors between iterations.
        reserved_bytes: memory of the process at the peak: on a GPU the allocator's reserved bytes, on a CPU the bytes
            of tensors, including mapped memory of peers.
        host_bytes: most bytes of this rank in host memory, and `host_by_category` what they are.
        file_bytes: bytes of optimizer state in files.
        traffic: communication by module.
        timeline: predicted times.
        checkpoint: predicted size and time of a checkpoint.
        dtypes: dtypes of parameters, computation, reduction and optimizer state.
        notes: parts that the estimate had to leave out or assume.
    """

    axes: dict[str, int]
    rank: int
    machine: Machine
    policies: Policies
    parameters: int
    peak: Peak
    idle_bytes: int
    reserved_bytes: int
    host_bytes: int
    host_by_category: dict[Category, int]
    file_bytes: int
    traffic: tuple[TrafficRow, ...]
    timeline: Timeline
    checkpoint: Checkpoint
    dtypes: dict[str, str]
    notes: tuple[str, ...]
    memory: Memory = dataclasses.field(repr=False)
    recording: Recording = dataclasses.field(repr=False)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def fits(self) -> bool:
        """Whether the reserved memory does not exceed the device's, and what it offloads not what its host has."""
        return self.reserved_bytes <= self.machine.memory and not self.short_of

    @property
    def short_of(self) -> str:
        """The tier beside the device that is too small for all ranks of a host; empty if none is."""
        machine, ranks = self.machine, min(self.machine.ranks_per_host, self.world_size)
        tiers = ("host memory", self.host_bytes, machine.host_memory), ("disks", self.file_bytes, machine.storage)
        short = (
            f"{ranks} ranks need {show(nbytes * ranks, 'bytes')} of the host's {show(there, 'bytes')} of {name}"
            for name, nbytes, there in tiers
            if nbytes * ranks > there
        )
        return next(short, "")

    @property
    def mfu(self) -> float | None:
        """The part of the machine's peak that `timeline.flops` take; None if its description has none for the dtype."""
        peak = self.machine.flops.get(self.dtypes["computation"])
        return self.timeline.flops / (self.timeline.step * peak) if peak else None

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON values; `schema` is incremented by incompatible changes."""
        told = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.repr} | {"fits": self.fits}
        told["machine"] = self.machine.to_json()  # includes attributes with default values
        told["policies"] = {name: value for name, value in vars(self.policies).items() if name != "placements"}
        times = vars(self.timeline).items()
        told["timeline"] = {name: value for name, value in times if name not in ("spans", "moments")}
        found = msgspec.to_builtins({"schema": SCHEMA, "kind": "estimate", **told}, enc_hook=_dtype_name)
        assert isinstance(found, dict)
        return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    """Runs one iteration with fake tensors as one rank of a simulated world, and estimates its needs.

    Args:
        model_factory: creates the model; if it takes an argument, it receives the mesh and shards the model itself.
        inputs: creates one micro-batch.
        optimizer: creates the optimizer.
        mesh: number of ranks, or sizes of the axes by name (in any order, unless the factory shards the model):
            "dp_replicate", "dp_shard" or "dp", "cp", whose ranks share the shards, and "tp"; at most 16,384 ranks.
        policies: how `fully_shard` is applied, unless the factory shards the model.
        machine: a description, or the name of a preset.
        rank: the rank to simulate.
        loss: computes a scalar from output and micro-batch; see `TrainingJob`.
        step: runs one iteration, instead of forward, backward and step.
        costs: times of operators; by default from the machine's description.
        tensor_parallel: cuts the model over the axis "tp" of the mesh; see `TrainingJob`.

    Raises:
        EstimateError: if the job cannot run with fake tensors, or the mesh or rank cannot be simulated.
        MachineError: if the machine's description lacks a number that the job needs.

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
    """`estimate` for a `TrainingJob`; the same arguments, result and errors."""
    described = preset(machine) if isinstance(machine, str) else machine
    axes = axes_of(mesh)
    sharded = job.mesh_axes(axes)
    found = assess(record(job, sharded, rank, described), axes, rank, job.policies, described, costs)
    if "cp" in axes and not job.takes_mesh:
        note = "cp: the inputs are one rank's part of a sequence; attention to the other parts is not counted"
        found = dataclasses.replace(found, notes=(*found.notes, note))
    return found


def assess(
    recording: Recording,
    axes: dict[str, int],
    rank: int,
    policies: Policies,
    machine: Machine,
    costs: OperatorCosts | None = None,
) -> Estimate:
    """The estimate of a recording. Raises `MachineError` if the description lacks a number that the job needs."""
    sizes = recording.sizes
    trace, on_host = recording.trace, policies.offload and machine.device != "cpu"
    if policies.offload_activations and machine.device != "cpu":
        trace = activations_on_host(trace)
    memory = memory_of(trace, machine.expandable_segments)
    state = in_files = 0
    host = memory.host
    if policies.resident is not None and on_host:
        state = sizes.own_optimizer
        resident = min(state, policies.resident)
        host = host | {"optimizer": max(0, host["optimizer"] - state) + resident}
        # A step reads what is not resident, and the kernel writes all of it.
        in_files = 2 * state - resident
    elif policies.overlap_step and on_host and policies.param_dtype in (torch.bfloat16, torch.float16):
        cast = 0 if "float32" not in recording.dtypes["parameters"] else sizes.own_weights // 2  # by the step
        host = host | {"sharded_parameters": host["sharded_parameters"] + cast}
    timeline = replay(
        trace, machine, costs or Roofline(machine), overlapped=policies.overlap_step and on_host, in_files=in_files
    )
    own_state = sizes.own_weights + sizes.own_optimizer
    tensors = memory.peak.bytes + recording.mapped_bytes if machine.device == "cpu" else memory.reserved
    own = recording.dtypes["parameters"]
    reduced = policies.reduce_dtype or (None if GRAD_DTYPE_DECIDES else policies.param_dtype)
    computed = {"computation": policies.param_dtype, "reduction": reduced}
    return Estimate(
        axes=axes,
        rank=rank,
        machine=machine,
        policies=policies,
        parameters=sizes.parameters,
        peak=memory.peak,
        idle_bytes=memory.idle,
        reserved_bytes=tensors + machine.process_bytes,
        host_bytes=sum(host.values()),
        host_by_category=host,
        file_bytes=state,
        traffic=_traffic(recording.trace.transfers),
        timeline=timeline,
        checkpoint=Checkpoint(
            own_state, sizes.whole_weights + sizes.whole_optimizer, own_state / machine.storage_bandwidth
        ),
        dtypes=recording.dtypes | {name: _dtype_name(one) if one else own for name, one in computed.items()},
        notes=tuple(_notes(recording, policies, machine)),
        memory=memory,
        recording=recording,
    )


def _traffic(transfers: Iterable[Transfer]) -> tuple[TrafficRow, ...]:
    sums: dict[tuple[str, str, str, bool], tuple[int, ...]] = {}
    for one in transfers:
        key = one.collective, one.fqn, one.phase, one.of_core
        sent = 1, one.bytes, one.inside, one.wire_bytes - one.inside
        sums[key] = tuple(map(operator.add, sums.get(key, (0, 0, 0, 0)), sent))
    return tuple(
        TrafficRow(collective, fqn, phase, calls, nbytes, inside, between, of_core)
        for (collective, fqn, phase, of_core), (calls, nbytes, inside, between) in sums.items()
    )


def _notes(recording: Recording, policies: Policies, machine: Machine) -> Iterator[str]:
    if recording.values_read:
        places = ", ".join(recording.values_read)
        yield f"the data of a tensor was read in {places}; fake tensors have none, so it got 1 (or True)"
    if machine.device == "cpu":
        yield "resident memory is larger: free memory that the C library's heap keeps is not counted"
        return
    yield "operators are those that torch runs on a CPU; kernels of a GPU may save other tensors"
    if policies.offload or policies.offload_activations:
        yield "a step on the host has its memory for itself: copies and files that run meanwhile are not counted"
