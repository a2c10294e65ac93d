"""The search for ways to shard that fit a memory limit, and the fastest of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from itertools import product
from typing import Any, Literal, TypeAlias

from torch import nn

from shardkit.commands.users_code import users_code
from shardkit.core.parameters.adapters import ADAPTERS
from shardkit.tools.estimating.job import (
    EstimateError,
    Policies,
    TensorParallel,
    TrainingJob,
    blocks_of,
    micro_batch_of,
    tokens_of,
    with_micro_batch,
)
from shardkit.tools.estimating.repetition import repetition_of
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.estimating.workers import Workers
from shardkit.tools.machine import Machine, MachineError
from shardkit.tools.quantities import show
from shardkit.tools.torch_compat import FakeTensors

Axes: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""

# Number of best candidates to try with replicas, larger micro-batches, more prefetching, and tensor parallelism.
_REPLICATED, _GROWN, _PREFETCHED, _CUT = 3, 6, 3, 2
# To prefetch more, this part of a step must be exposed communication.
_EXPOSED = 0.01
_RECOMPUTED: tuple[bool | Literal["selective"], ...] = (False, "selective", True)
# The largest micro-batch, as a multiple of the smallest.
_MOST_TIMES = 8
_MIB = 2**20


@dataclass(frozen=True)
class Candidate:
    """One way to shard and run a model: mesh, policies, samples of a micro-batch."""

    axes: Axes
    policies: Policies
    micro_batch: int

    @property
    def samplers(self) -> int:
        """Ranks with samples of their own: ranks along "tp" share theirs."""
        return math.prod(size for name, size in self.axes if name != "tp")

    def changed(self, **policies: Any) -> Candidate:
        return replace(self, policies=replace(self.policies, **policies))

    def describe(self) -> str:
        policies = self.policies
        mesh = " x ".join(f"{name} {length}" for name, length in self.axes)
        parts = [mesh, f"micro-batch {self.micro_batch}"]
        parts.append(f"prefetch {policies.prefetch_depth}")
        parts.append("keep" if policies.reshard_after_forward is False else "reshard")
        if policies.checkpoint:
            parts.append("recompute" if policies.checkpoint is True else "recompute selectively")
        if policies.offload_activations:
            parts.append("activations on the host")
        if policies.offload:
            parts.append("shards on the host" + (", overlapped step" if policies.overlap_step else ""))
        if policies.resident is not None:
            parts.append(f"optimizer state in files but {show(policies.resident, 'bytes')}")
        return ", ".join(parts)


def meshes(world_size: int, machine: Machine) -> list[Axes]:
    """Sharding over all ranks; then over a few hosts or one, with replicas: each takes more memory than the last."""
    found: list[Axes] = [(("dp_shard", world_size),)]
    together = machine.ranks_per_host
    while together < world_size:
        if world_size % together == 0:
            found.insert(1, (("dp_replicate", world_size // together), ("dp_shard", together)))
        together *= 4
    return found


def tensor_parallel_meshes(world_size: int, machine: Machine) -> list[Axes]:
    """Two, four and eight ranks of a host that share the work on each sample, with sharding over the other ranks."""
    together = [size for size in (2, 4, 8) if machine.ranks_per_host % size == 0 and world_size % size == 0]
    return [(("dp_shard", world_size // size), ("tp", size)) for size in together]


class NothingFits(EstimateError):
    """Raised if no candidate stays under the limit."""


@dataclass(frozen=True)
class Proposal:
    """A candidate that fits, its estimate, and the reasons to propose it.

    Attributes:
        estimate: the estimate, without its trace.
        blocks: FQNs of the modules that get a `fully_shard` call of their own, innermost first.
        lists: FQNs of the lists whose modules are all among the blocks.
        sample_seconds: predicted time of an iteration divided by the samples of all ranks.
        reasons: sentences.
        tensor_parallel: cuts the model over an axis "tp", if the mesh has one.
        classes: names of the classes of `blocks`.
        accumulate: micro-batches of an iteration.
        nbytes: predicted memory of a rank.
        step_seconds: predicted time of an iteration.
        rate: tokens in a second, divided by the ranks; samples if micro-batches do not begin with token ids.
        mfu: the model's operations in a second, relative to the machine's peak; None if that is unknown.
    """

    candidate: Candidate
    estimate: Estimate
    blocks: tuple[str, ...]
    lists: tuple[str, ...]
    sample_seconds: float
    reasons: tuple[str, ...]
    tensor_parallel: TensorParallel | None
    classes: tuple[str, ...]
    accumulate: int
    nbytes: int
    step_seconds: float
    rate: float
    mfu: float | None


@dataclass
class _Search:
    """Estimates candidates, each at most once."""

    job: TrainingJob
    machine: Machine
    limit: int
    global_batch: int | None
    tell: Callable[[str], None]
    progress: Callable[[int, int], None]
    known: dict[Candidate, Estimate] = field(default_factory=dict)
    planned: set[Candidate] = field(default_factory=set)
    problem: str = ""

    def __post_init__(self) -> None:
        self.workers = Workers(self._estimated)

    def _estimated(self, candidate: Candidate) -> Estimate:
        job = with_micro_batch(replace(self.job, policies=candidate.policies), candidate.micro_batch)
        return estimate_job(job, dict(candidate.axes), self.machine)

    def begin(self, candidates: Iterable[Candidate]) -> None:
        """Starts estimates that are certain to be attempted."""
        some = [one for one in candidates if self.accumulate(one)]
        self.planned.update(some)
        self.workers.begin(some)

    def attempt(self, candidate: Candidate) -> None:
        """Estimates a candidate; if that fails, reports why."""
        if candidate in self.known:
            return
        if not self.accumulate(candidate):
            each = candidate.micro_batch * candidate.samplers
            self.problem = f"a global batch of {self.global_batch} cannot be made of micro-batches of {each} in all"
            return
        self.planned.add(candidate)
        self.progress(len(self.known), len(self.planned))
        try:
            self.known[candidate] = self.workers.estimate(candidate)
        except (EstimateError, MachineError) as error:
            self.problem = str(error)
            self.tell(f"gave up {candidate.describe()}: {error}")

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate stays below the limit; False if it cannot be estimated."""
        self.attempt(candidate)
        return candidate in self.ranked()

    def accumulate(self, candidate: Candidate) -> int:
        """Micro-batches of an iteration; 0 if the global batch cannot be divided into them."""
        if self.global_batch is None:
            return candidate.policies.accumulate
        times, rest = divmod(self.global_batch, candidate.micro_batch * candidate.samplers)
        return 0 if rest else times

    def nbytes(self, candidate: Candidate) -> int:
        """Memory of a rank; between the micro-batches of a global batch the shards of the gradients stay."""
        found = self.known[candidate]
        stay = self.repeated(candidate) > 1 and not candidate.policies.offload
        return found.reserved_bytes + (found.recording.sizes.own_weights if stay else 0)

    def step_seconds(self, candidate: Candidate) -> float:
        """Time of an iteration."""
        line = self.known[candidate].timeline
        once = max(line.optimizer, line.host_exposed)  # a step under the next forward has no span of its own
        return self.repeated(candidate) * (line.step - once) + once

    def repeated(self, candidate: Candidate) -> int:
        """How often the estimated iteration, without its optimizer, is repeated for the global batch."""
        return 1 if self.global_batch is None else self.accumulate(candidate)

    def sample_seconds(self, candidate: Candidate) -> float:
        samples = candidate.micro_batch * self.accumulate(candidate) * candidate.samplers
        return self.step_seconds(candidate) / samples

    def ranked(self) -> list[Candidate]:
        """Candidates that fit, fastest first; for equal times (to four digits), least reserved memory first."""
        fitting = [one for one, found in self.known.items() if self.nbytes(one) <= self.limit and not found.short_of]
        return sorted(fitting, key=lambda one: (float(f"{self.sample_seconds(one):.4g}"), self.nbytes(one)))

    def apart(self, error: float) -> list[Candidate]:
        """The same without those that are, within this error, no faster than one before them and no smaller."""
        chosen: list[Candidate] = []
        for one in self.ranked():
            seconds, nbytes = self.sample_seconds(one), self.nbytes(one)
            if all(
                seconds > (1 + error) * self.sample_seconds(other) or nbytes < (1 - error) * self.nbytes(other)
                for other in chosen
            ):
                chosen.append(one)
        return chosen


def propose(
    job: TrainingJob,
    world_size: int,
    machine: Machine,
    limit: int,
    *,
    micro_batch: int | None = None,
    most_micro_batch: int | None = None,
    count: int = 5,
    margin: float = 0.0,
    error: float = 0.0,
    global_batch: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Proposal]:
    """Ways to run a job on `world_size` ranks with at most `limit` bytes each, fastest per sample first.

    Every combination of reshard policy and recomputation is estimated with the smallest micro-batch; parameters are
    kept for backward only if the model fits without that. If none fits, memory of the host and then files are added,
    as `_tiers` says. The best that fit are also tried with replicas, which take more memory, and with tensor
    parallelism if the job has a plan for it. The best of all then get larger micro-batches as long as they fit, and the
    best of these one more prefetched group. By default the smallest micro-batch is the job's own and the largest eight
    times that. `margin` is the part of the limit that stays free, because estimates err; proposals differ by more than
    `error` in time or memory. `global_batch` is the number of samples of all ranks in an iteration, in as many
    micro-batches as that takes. `tell` receives messages about candidates that could not be tried, `progress` the
    numbers of estimates made and planned so far.

    Raises:
        NothingFits: if no candidate fits; names the one that comes closest.
        EstimateError: if the job cannot be estimated, or its factory shards the model.
    """
    plain = _build(job, machine)
    micro_batch = micro_batch or micro_batch_of(job)
    most_micro_batch = most_micro_batch or _MOST_TIMES * micro_batch
    search = _Search(job, machine, int(limit * (1 - margin)), global_batch, tell, progress)
    with search.workers:
        _explore(search, world_size, micro_batch, most_micro_batch)
        if not search.ranked():
            raise NothingFits(_closest(search, limit, margin))
    chosen = search.apart(error) if error else search.ranked()
    return [_proposal(search, candidate, plain) for candidate in chosen[:count]]


def _explore(search: _Search, world_size: int, micro_batch: int, most_micro_batch: int) -> None:
    """Attempts candidates in the order that `propose` describes."""
    job = search.job
    first, *other = meshes(world_size, search.machine)
    recomputed = (job.policies.checkpoint,) if job.policies.checkpoint else _RECOMPUTED
    for policies in _tiers(job.policies, search.machine):
        plain = [
            Candidate(first, replace(policies, reshard_after_forward=True, checkpoint=recompute), micro_batch)
            for recompute in recomputed
        ]
        search.begin(plain)
        for candidate in plain:
            if search.fits(candidate):  # keeping parameters from forward to backward reserves no less
                search.attempt(candidate.changed(reshard_after_forward=False))
        if search.ranked():
            break
    replicated = [[replace(one, axes=axes) for axes in other] for one in search.ranked()[:_REPLICATED]]
    search.begin(ways[0] for ways in replicated if ways)
    for ways in replicated:
        for wider in ways:
            if not search.fits(wider):
                break
    if not search.known:
        raise EstimateError(
            f"none of the ways to shard this model could be estimated. Correct the last: {search.problem}"
        )
    _cut_further(search, world_size)
    grown = [replace(one, micro_batch=2 * one.micro_batch) for one in search.ranked()[:_GROWN]]
    search.begin(one for one in grown if one.micro_batch <= most_micro_batch)
    for one in grown:
        while one.micro_batch <= most_micro_batch and search.fits(one):
            one = replace(one, micro_batch=2 * one.micro_batch)
    lines = ((one, search.known[one].timeline) for one in search.ranked()[:_PREFETCHED])
    exposed = [one for one, line in lines if line.exposed > _EXPOSED * line.step]
    search.begin(one.changed(prefetch_depth=one.policies.prefetch_depth + 1) for one in exposed)
    for one in exposed:
        search.attempt(one.changed(prefetch_depth=one.policies.prefetch_depth + 1))


def _tiers(policies: Policies, machine: Machine) -> Iterator[Policies]:
    """The job's own policies, and if these do not fit, more and more in slower memory."""
    yield policies
    if machine.device == "cpu" or policies.offload or policies.offload_activations:
        return
    yield replace(policies, offload_activations=True)
    yield (stepped := replace(policies, offload=True, overlap_step=True))
    yield replace(stepped, offload_activations=True)
    yield (filed := replace(stepped, resident=machine.host_memory // machine.ranks_per_host // 8))
    yield replace(filed, offload_activations=True)


def _build(job: TrainingJob, machine: Machine) -> nn.Module:
    if job.takes_mesh:
        raise EstimateError("a plan shards the model itself, so its factory must not ask for the mesh")
    known = repetition_of(job) if machine.transport == "nccl" else None
    if known is not None:
        return known.model
    with (
        FakeTensors(),
        users_code("building the model", "the factory runs with tensors that have no data", EstimateError),
    ):
        return job.model()


def _cut_further(search: _Search, world_size: int) -> None:
    """Replaces some data parallelism by tensor parallelism, for the best that fit, else for the smallest."""
    cut = tensor_parallel_meshes(world_size, search.machine)
    if search.job.tensor_parallel is None or not cut:
        return
    if not entry_points(group=ADAPTERS):
        search.tell("fewer ways: tensor parallelism needs the package shardkit-tp-adapter, which is not installed")
        return
    best = search.ranked() or sorted(search.known, key=search.nbytes)
    ways = [replace(candidate, axes=axes) for candidate, axes in product(best[:_CUT], cut)]
    search.begin(ways)
    for candidate in ways:
        search.attempt(candidate)


def _proposal(search: _Search, candidate: Candidate, plain: nn.Module) -> Proposal:
    wrapped = blocks_of(plain, candidate.policies.wrap)
    blocks = tuple(fqn for fqn, _ in wrapped)
    found, seconds, times = search.known[candidate], search.step_seconds(candidate), search.accumulate(candidate)
    lists = []
    for parent in dict.fromkeys(fqn.rpartition(".")[0] for fqn in blocks):
        module, prefix = plain.get_submodule(parent), f"{parent}." if parent else ""
        inside = {prefix + name for name, _ in module.named_children()}
        if isinstance(module, nn.ModuleList | nn.Sequential) and inside <= {*blocks}:
            lists.append(parent)
    return Proposal(
        candidate,
        found,
        blocks,
        tuple(lists),
        search.sample_seconds(candidate),
        tuple(_reasons(search, candidate)),
        search.job.tensor_parallel,
        tuple(dict.fromkeys(type(block).__name__ for _, block in wrapped)),
        times,
        search.nbytes(candidate),
        seconds,
        (tokens_of(search.job) or 1) / search.sample_seconds(candidate) / found.world_size,
        found.mfu and found.mfu * search.repeated(candidate) * found.timeline.step / seconds,
    )


def _reasons(search: _Search, candidate: Candidate) -> Iterator[str]:
    """The savings and costs of each choice, compared with the candidate that differs only in it."""
    found = search.known[candidate]
    line, nbytes, times = found.timeline, search.nbytes(candidate), search.accumulate(candidate)
    yield f"takes {show(nbytes, 'bytes')}, {nbytes / search.limit:.0%} of the limit; its peak is {found.peak.place}"
    yield f"waits {show(line.exposed, 'seconds')} of a {show(line.step, 'seconds')} step for communication"
    if line.host_step:
        hidden = show(line.host_step - line.host_exposed, "seconds")
        yield f"steps on the host in {show(line.host_step, 'seconds')}, {hidden} of it under forward"
    if search.global_batch is not None:
        yield f"makes {times} micro-batches for each step of the optimizer, and reduces gradients after each"
    for what, other in _other_ways(candidate):
        if other not in search.known or other == candidate:
            continue
        memory = nbytes - search.nbytes(other)
        seconds = line.step - search.known[other].timeline.step
        held = (
            f"{'costs' if memory > 0 else 'saves'} {show(abs(memory), 'bytes')}" if memory else "takes the same memory"
        )
        spent = f"{'costs' if seconds > 0 else 'saves'} {show(abs(seconds), 'seconds')} a step"
        missed = search.nbytes(other) > search.limit
        yield f"{what} {held} and {spent}{' (without it the limit is missed)' if missed else ''}"


def _other_ways(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Each choice of a candidate, and the candidate without it."""
    policies, world_size = candidate.policies, math.prod(length for _, length in candidate.axes)
    if policies.reshard_after_forward is False:
        yield "keeping parameters from forward to backward", candidate.changed(reshard_after_forward=True)
    else:
        yield "resharding after forward", candidate.changed(reshard_after_forward=False)
    if policies.checkpoint:
        yield "recomputing activations", candidate.changed(checkpoint=False)
    if policies.prefetch_depth != Policies.prefetch_depth:
        yield f"prefetching {policies.prefetch_depth} groups", candidate.changed(prefetch_depth=Policies.prefetch_depth)
    if candidate.samplers < world_size:
        what = f"tensor parallelism (with 1/{world_size // candidate.samplers} of the samples in a step)"
        yield what, replace(candidate, axes=(("dp_shard", world_size),))


def _closest(search: _Search, limit: int, margin: float) -> str:
    best = min(search.known, key=lambda one: (search.nbytes(one) > search.limit, search.nbytes(one)))
    found = search.known[best]
    if search.nbytes(best) <= search.limit:
        return (
            f"none of {len(search.known)} ways fits: with {show(search.nbytes(best), 'bytes')} on the device "
            f"({best.describe()}), {found.short_of}. Use more hosts, or --param-dtype bfloat16"
        )
    biggest = max(found.peak.by_category, key=lambda name: found.peak.by_category[name])
    size, process = found.peak.by_category[biggest], search.machine.process_bytes
    if process < size:
        part = f"{biggest.replace('_', ' ')} ({show(size, 'bytes')})"
        smaller = "a smaller micro-batch, " if best.micro_batch > 1 else ""
        advice = f"Use more ranks, {smaller}or shorter sequences"
    else:
        part = f"the process without a model ({show(process, 'bytes')}, process_bytes of the machine)"
        enough = math.ceil(search.nbytes(best) / (1 - margin) / _MIB)
        advice = f"No way to shard makes that smaller; give at least {enough} MiB"
    return (
        f"none of {len(search.known)} ways fits {below(limit, margin)}; the smallest takes "
        f"{show(search.nbytes(best), 'bytes')} ({best.describe()}), the largest part of it {part}. {advice}"
    )


def below(limit: int, margin: float) -> str:
    less = f" ({show(limit, 'bytes')} less {margin:.0%} for errors)" if margin else ""
    return show(limit * (1 - margin), "bytes") + less
