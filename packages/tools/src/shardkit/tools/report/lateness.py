"""Stragglers: how late each rank starts its collectives."""

from __future__ import annotations

from collections import Counter, defaultdict

from shardkit.tools.report.schema import Report

__all__ = ["lateness", "times_last"]


def lateness(report: Report) -> dict[int, float]:
    """Mean seconds from the first rank's start of a collective to this rank's, over those that several ranks saw."""
    starts: dict[tuple[int, str, int], dict[int, float]] = defaultdict(dict)
    for rank in report.ranks:
        for one in rank.operations:
            starts[one.group, one.kind, one.number][rank.rank] = one.start
    late: dict[int, list[float]] = {rank.rank: [] for rank in report.ranks}
    for by_rank in starts.values():
        if len(by_rank) > 1:
            first = min(by_rank.values())
            for number, start in by_rank.items():
                late[number].append(start - first)
    return {number: sum(values) / len(values) if values else 0.0 for number, values in late.items()}


def times_last(report: Report) -> Counter[int]:
    """How often each rank was the last to start a collective."""
    last: Counter[int] = Counter({rank.rank: 0 for rank in report.ranks})
    for one in report.collectives:
        last.update({int(rank): count for rank, count in one.last.items()})
    return last
