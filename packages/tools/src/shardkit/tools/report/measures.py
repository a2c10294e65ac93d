"""The figures of a run that fit on one line each: what runs are compared by and what limits are set on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardkit.tools.report.meetings import skew_by_rank
from shardkit.tools.report.schema import Rank, Report

__all__ = ["MEASURES", "Measure", "Unit", "exposed_by_rank", "step_times"]

Unit: TypeAlias = Literal["bytes", "seconds", "count", "share"]


@dataclass(frozen=True)
class Measure:
    """A figure of a run; less is better for all of them."""

    name: str
    unit: Unit
    meaning: str
    of: Callable[[Report], float]


def step_times(report: Report) -> list[float]:
    """Seconds of each recorded step, of the rank that took longest."""
    steps = [[step.end - step.begin for step in rank.steps] for rank in report.ranks]
    return [max(times) for times in zip(*steps, strict=False)]


def exposed_by_rank(report: Report) -> dict[int, float]:
    """Seconds a step that each rank spent waiting for communication, and on local work for what had arrived."""
    return {rank.rank: _mean([step.exposed for step in rank.steps]) for rank in report.ranks}


def _step_time(report: Report) -> float:
    times = step_times(report)
    return statistics.median(times) if times else 0.0


def _peak(report: Report) -> float:
    return max(rank.memory.peak for rank in report.ranks)


def _resident(report: Report) -> float:
    return max(rank.memory.resident_peak for rank in report.ranks)


def _exposed(report: Report) -> float:
    return max(exposed_by_rank(report).values())


def _exposed_share(report: Report) -> float:
    return max(
        sum(step.exposed for step in rank.steps) / max(sum(step.end - step.begin for step in rank.steps), 1e-9)
        for rank in report.ranks
    )


def _per_step(report: Report, of_rank: Callable[[Rank], float]) -> float:
    return max(of_rank(rank) / max(1, len(rank.steps)) for rank in report.ranks)


def _wire(report: Report) -> float:
    return _per_step(report, lambda rank: sum(one.wire_bytes for one in rank.operations))


def _collectives(report: Report) -> float:
    return _per_step(report, lambda rank: len(rank.operations))


def _misses(report: Report) -> float:
    return _per_step(report, lambda rank: sum(module.prefetch_misses for module in rank.modules))


def _skew(report: Report) -> float:
    return max(skew_by_rank(report).values())


def _padding(report: Report) -> float:
    by_group: dict[tuple[str, int], int] = {}
    for one in report.collectives:
        if one.kind == "all-gather":
            key = (one.fqn, one.group)
            by_group[key] = max(by_group.get(key, 0), one.padding_bytes)
    return sum(by_group.values())


def _imbalance(report: Report) -> float:
    held = [sum(rank.shard_bytes.values()) for rank in report.ranks]
    return max(held) / _mean([float(size) for size in held]) - 1 if any(held) else 0.0


def _overhead(report: Report) -> float:
    return max(rank.overhead.share for rank in report.ranks)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


MEASURES: tuple[Measure, ...] = (
    Measure("step_time", "seconds", "a step, median over the steps of the slowest rank", _step_time),
    Measure("peak_memory", "bytes", "counted tensors at their peak, most of any rank", _peak),
    Measure("resident_memory", "bytes", "resident (CPU) or reserved (device) memory, most of any rank", _resident),
    Measure("exposed", "seconds", "communication that nothing hid, a step, most of any rank", _exposed),
    Measure("exposed_share", "share", "the same as a share of the step", _exposed_share),
    Measure("skew", "seconds", "the part of it spent before the last rank came", _skew),
    Measure("wire_bytes", "bytes", "bytes that a rank sends a step", _wire),
    Measure("collectives", "count", "collectives a step", _collectives),
    Measure("prefetch_misses", "count", "gathers that had to be launched when they were needed, a step", _misses),
    Measure("padding", "bytes", "memory of unsharded parameters that holds no element, all groups", _padding),
    Measure("imbalance", "share", "by how much the largest rank's shards exceed the average", _imbalance),
    Measure("profiler_overhead", "share", "what recording cost, as a share of the recorded time", _overhead),
)
