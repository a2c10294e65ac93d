"""Rules about ranks: who is late, who holds more than others, where host and optimizer take their time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from shardkit.tools.doctor.facts import Facts
from shardkit.tools.doctor.finding import Finding
from shardkit.tools.report.lateness import lateness, times_last
from shardkit.tools.report.meetings import skew_by_rank
from shardkit.tools.report.quantities import show

__all__ = ["host_bound", "late_rank", "slow_optimizer", "uneven_ranks"]

_LEAST = 0.01


def late_rank(facts: Facts) -> Iterator[Finding]:
    """A rank that the others wait for, again and again; or ranks that wait for each other in turn."""
    report = facts.report
    waited, last = skew_by_rank(report), times_last(report)
    cost, met = max(waited.values()), sum(last.values())
    if len(report.ranks) < 2 or not met or cost < _LEAST * facts.step:
        return
    rank, count = last.most_common(1)[0]
    if count >= max(0.7, 1.5 / len(report.ranks)) * met:
        yield Finding(
            "late-rank",
            "seconds",
            cost,
            cost / facts.step,
            f"rank {rank} ({_host(facts, rank)}) came last to {count} of "
            f"{met} collectives, {show(lateness(report)[rank], 'seconds')} after the first on average",
            "look at what only this rank does: its input pipeline, longer samples, logging or checkpoints, other load "
            "on its host, a slower device",
        )
        return
    yield Finding(
        "ranks-in-turn",
        "seconds",
        cost,
        cost / facts.step,
        f"ranks wait for each other, no rank in particular is late (last: {dict(sorted(last.items()))})",
        "balance the work of each step: pack samples to equal length, keep evaluation and logging alike on all ranks, "
        "and see that ranks do not share processor cores",
    )


def uneven_ranks(facts: Facts) -> Iterator[Finding]:
    """Modules whose dims do not divide, so that some ranks hold much more of them."""
    ranks = facts.report.ranks
    uneven: dict[str, float] = {}
    for module in dict.fromkeys(name for rank in ranks for name in rank.shard_bytes):
        # Stages of a pipeline hold different modules.
        held = [rank.shard_bytes[module] for rank in ranks if module in rank.shard_bytes]
        excess = max(held) - statistics.fmean(held)
        if excess > 0.1 * max(1.0, statistics.fmean(held)):
            uneven[module] = excess
    # Gradient and two states of an optimizer follow the shards.
    cost = 4 * sum(uneven.values())
    if cost < _LEAST * facts.peak:
        return
    worst = max(uneven, key=lambda name: uneven[name])
    yield Finding(
        "uneven-shards",
        "bytes",
        cost,
        cost / facts.peak,
        f"the ranks' shards of {len(uneven)} modules differ in size by more than a tenth, most of '{worst}'; gradients "
        "and optimizer state differ with them",
        "choose a dim that the ranks divide, with shard_placement_fn=lambda p: Shard(1), or make the dim a multiple",
    )


def host_bound(facts: Facts) -> Iterator[Finding]:
    """Starting communication takes the host long."""
    cost = max(sum(step.launch for step in rank.steps) / max(1, len(rank.steps)) for rank in facts.report.ranks)
    if cost < 0.05 * facts.step:
        return
    count = len(facts.first_rank) / facts.steps
    yield Finding(
        "launch",
        "seconds",
        cost,
        cost / facts.step,
        f"the host spends {show(cost, 'seconds')} a step on starting {count:.0f} collectives: packing small ones, "
        "copying gradients for other ranks",
        "use fewer, larger groups; a larger micro-batch makes the step longer and this share smaller",
    )


def slow_optimizer(facts: Facts) -> Iterator[Finding]:
    """The optimizer takes a large part of a step."""
    cost = max(statistics.fmean(step.optimizer for step in rank.steps) for rank in facts.report.ranks if rank.steps)
    if cost < 0.2 * facts.step:
        return
    yield Finding(
        "optimizer",
        "seconds",
        cost,
        cost / facts.step,
        f"the optimizer's steps take {show(cost, 'seconds')}",
        "fused=True, and shardkit.core.optimizer_step_on_shards(optimizer) if it is element-wise (as Adam is) and does "
        "not step on shards yet; a larger batch needs fewer steps",
    )


def _host(facts: Facts, number: int) -> str:
    return next(rank.place.host for rank in facts.report.ranks if rank.rank == number)
