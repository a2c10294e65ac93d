"""What the rules ask a report, worked out once."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cached_property

from shardkit.tools.report.measures import step_times
from shardkit.tools.report.schema import Collective, Operation, Report

__all__ = ["Facts"]


class Facts:
    """Sums over a report. Times are a step's."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.steps = max(1, report.run.recorded_steps)

    @cached_property
    def step(self) -> float:
        """Seconds of a step."""
        times = step_times(self.report)
        return max(statistics.median(times), 1e-9) if times else 1e-9

    @cached_property
    def peak(self) -> int:
        """Bytes of counted tensors at the peak of the rank that has most."""
        return max(1, *(rank.memory.peak for rank in self.report.ranks))

    @cached_property
    def root(self) -> str:
        """The root's name: the outermost module that runs forward."""
        for rank in self.report.ranks:
            spans = [span for span in rank.spans if span.phase == "forward"]
            if spans:
                return max(spans, key=lambda span: span.end - span.begin).fqn
        return ""

    @cached_property
    def gathers(self) -> dict[str, list[Collective]]:
        """The all-gathers of each group, by its label."""
        found: dict[str, list[Collective]] = defaultdict(list)
        for one in self.report.collectives:
            if one.kind == "all-gather":
                found[one.fqn].append(one)
        return found

    @cached_property
    def first_rank(self) -> list[Operation]:
        """The operations of the first rank, in the order of their start."""
        return self.report.ranks[0].operations

    def launch(self, fqn: str) -> float:
        """Seconds that the host of the first rank spent on starting a group's collectives."""
        return sum(one.launch for one in self.first_rank if one.fqn == fqn) / self.steps

    def exposed(self, fqn: str) -> float:
        """Seconds that were spent waiting for a group's collectives, not counting late ranks."""
        return sum(one.exposed - one.exposed_by_skew for one in self.report.collectives if one.fqn == fqn)
