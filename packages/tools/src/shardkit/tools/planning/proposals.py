"""The search: which candidates fit a memory limit, and which of them are fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from shardkit.tools.estimating.costs import OperatorCosts
from shardkit.tools.estimating.errors import EstimateError
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.estimating.render import size, time
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.machine import Machine
from shardkit.tools.planning.candidates import Candidate, candidates, meshes, with_setting, wrappings
from shardkit.tools.torch_compat import FakeTensors

__all__ = ["NothingFits", "Proposal", "propose"]

_GROWN = 6
_PREFETCHED = 3
_EXPOSED = 0.01


class NothingFits(EstimateError):
    """No candidate stays under the limit."""


@dataclass(frozen=True)
class Proposal:
    """A candidate that fits, what it takes, and why it is proposed.

    Attributes:
        blocks: FQNs of the modules that get a `fully_shard` call of their own, innermost first.
        sample_seconds: predicted time of a step divided by the samples of all ranks.
        reasons: sentences.
    """

    candidate: Candidate
    estimate: Estimate
    blocks: tuple[str, ...]
    sample_seconds: float
    reasons: tuple[str, ...]


class _Search:
    """Estimates candidates, each once."""

    def __init__(
        self,
        job: TrainingJob,
        machine: Machine,
        limit: int,
        costs: OperatorCosts | None,
        progress: Callable[[str], None],
    ) -> None:
        self.limit = limit
        self.known: dict[Candidate, Estimate] = {}
        self._job, self._machine, self._costs, self._progress = job, machine, costs, progress

    def run(self, candidate: Candidate) -> Estimate:
        if candidate not in self.known:
            self._progress(candidate.describe())
            job = candidate.job(self._job)
            self.known[candidate] = estimate_job(job, dict(candidate.axes), self._machine, costs=self._costs)
        return self.known[candidate]

    def fits(self, candidate: Candidate) -> bool:
        return self.run(candidate).reserved_bytes <= self.limit

    def sample_seconds(self, candidate: Candidate) -> float:
        samples = candidate.micro_batch * candidate.policies.accumulate * candidate.world_size
        return self.run(candidate).timeline.step / samples

    def ranked(self) -> list[Candidate]:
        return sorted(filter(self.fits, self.known), key=self.sample_seconds)


def propose(
    job: TrainingJob,
    world_size: int,
    machine: Machine,
    limit: int,
    *,
    micro_batch: int = 1,
    most_micro_batch: int = 8,
    count: int = 5,
    costs: OperatorCosts | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Proposal]:
    """Ways to run a job on so many ranks below `limit` bytes of reserved memory each, fastest per sample first.

    Every combination of mesh, wrapping, reshard policy and recomputation is estimated with the smallest micro-batch.
    The best of those that fit get larger micro-batches as long as they fit, and the best of these more prefetching.

    Raises:
        NothingFits: with the candidate that comes closest.
        EstimateError: if the job cannot be estimated, or comes sharded.
    """
    plain = _build(job)
    search = _Search(job, machine, limit, costs, progress)
    for candidate in candidates(
        job.policies, wrappings(plain, job.policies.wrap), meshes(world_size, machine), micro_batch
    ):
        search.run(candidate)
    if not search.ranked():
        raise NothingFits(_closest(search))
    for candidate in search.ranked()[:_GROWN]:
        grown = replace(candidate, micro_batch=2 * candidate.micro_batch)
        while grown.micro_batch <= most_micro_batch and search.fits(grown):
            grown = replace(grown, micro_batch=2 * grown.micro_batch)
    for candidate in search.ranked()[:_PREFETCHED]:
        line = search.run(candidate).timeline
        if line.exposed > _EXPOSED * line.step:
            search.run(with_setting(candidate, prefetch_depth=candidate.policies.prefetch_depth + 1))
    return [_proposal(search, candidate, plain) for candidate in search.ranked()[:count]]


def _build(job: TrainingJob) -> nn.Module:
    with FakeTensors():
        try:
            model = job.model()
        except TypeError as error:
            raise EstimateError(
                f"a plan shards the model itself, so its factory must not ask for the mesh: {error}"
            ) from error
    return model


def _proposal(search: _Search, candidate: Candidate, plain: nn.Module) -> Proposal:
    from shardkit.tools.estimating.policies import blocks_of

    blocks = tuple(fqn for fqn, _ in blocks_of(plain, candidate.policies.wrap))
    return Proposal(
        candidate, search.run(candidate), blocks, search.sample_seconds(candidate), tuple(_reasons(search, candidate))
    )


def _reasons(search: _Search, candidate: Candidate) -> list[str]:
    """What each choice saves and costs against the candidate that differs in nothing else."""
    found = search.run(candidate)
    line = found.timeline
    peak = [found.peak.phase, *([f"'{found.peak.fqn}'"] if found.peak.fqn else [])]
    share = found.reserved_bytes / search.limit
    reasons = [
        f"takes {size(found.reserved_bytes)}, {share:.0%} of the limit; the peak is in {' of '.join(peak)}",
        f"waits {time(line.exposed)} of a {time(line.step)} step for communication",
    ]
    policies = candidate.policies
    flips = [
        ("keeping parameters from forward to backward", with_setting(candidate, reshard_after_forward=True))
        if policies.reshard_after_forward is False
        else ("resharding after forward", with_setting(candidate, reshard_after_forward=False)),
        ("recomputing activations", with_setting(candidate, checkpoint=False)) if policies.checkpoint else None,
        (f"prefetching {policies.prefetch_depth} groups", with_setting(candidate, prefetch_depth=1))
        if policies.prefetch_depth != 1
        else None,
    ]
    for what, other in filter(None, flips):
        if other in search.known and other != candidate:
            reasons.append(_difference(what, found, search.known[other], search.limit))
    return reasons


def _difference(what: str, this: Estimate, other: Estimate, limit: int) -> str:
    memory = this.reserved_bytes - other.reserved_bytes
    seconds = this.timeline.step - other.timeline.step
    texts = [
        f"{'costs' if memory > 0 else 'saves'} {size(abs(memory))}" if memory else "takes the same memory",
        f"{'costs' if seconds > 0 else 'saves'} {time(abs(seconds))} a step",
    ]
    without = " (without it the limit is missed)" if other.reserved_bytes > limit else ""
    return f"{what} {' and '.join(texts)}{without}"


def _closest(search: _Search) -> str:
    best = min(search.known, key=lambda one: search.known[one].reserved_bytes)
    found = search.known[best]
    biggest = max(found.peak.by_category, key=lambda name: found.peak.by_category[name])
    return (
        f"none of {len(search.known)} ways fits {size(search.limit)}; the smallest takes {size(found.reserved_bytes)} "
        f"({best.describe()}), most of it {biggest.replace('_', ' ')} ({size(found.peak.by_category[biggest])}). Use "
        "more ranks, a smaller micro-batch, or shorter sequences"
    )
