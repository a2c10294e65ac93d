"""When the ranks of a collective met: it cannot end before the last one has started it."""

from __future__ import annotations

from collections import defaultdict

from shardkit.tools.report.schema import Operation, Rank, Report

__all__ = ["last_starts", "skew_by_rank", "waited_for_ranks"]


def last_starts(ranks: list[Rank]) -> dict[tuple[int, str, int], float]:
    """When the last rank started each collective, by group, kind and number."""
    starts: dict[tuple[int, str, int], float] = defaultdict(float)
    for rank in ranks:
        for one in rank.operations:
            key = (one.group, one.kind, one.number)
            starts[key] = max(starts[key], one.start)
    return starts


def waited_for_ranks(one: Operation, last_start: float) -> float:
    """The seconds of an operation's wait that lie before the last rank's start: skew, which no bandwidth can help."""
    return max(0.0, min(one.blocked, last_start - (one.end - one.exposed)))


def skew_by_rank(report: Report) -> dict[int, float]:
    """Seconds a step that each rank waited for ranks that came later."""
    starts = last_starts(report.ranks)
    return {
        rank.rank: sum(waited_for_ranks(one, starts[one.group, one.kind, one.number]) for one in rank.operations)
        / max(1, len(rank.steps))
        for rank in report.ranks
    }
