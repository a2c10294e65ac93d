"""What was predicted beside what was measured, with the error."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.tools.report.measures import MEASURES, Unit
from shardkit.tools.report.schema import CATEGORIES, Estimate, Report

__all__ = ["Comparison", "compare_with_estimate"]


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted and measured; `error` is their difference over what was measured, None if that is 0."""

    name: str
    unit: Unit
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        if not self.measured:
            return 0.0 if not self.predicted else None
        return (self.predicted - self.measured) / self.measured


def compare_with_estimate(report: Report) -> list[Comparison]:
    """Every figure that was predicted, and the categories of memory at the peak. Empty without an estimate."""
    if report.estimate is None:
        return []
    found = []
    for measure in MEASURES:
        predicted = getattr(report.estimate, measure.name, None)
        if predicted is not None:
            found.append(Comparison(measure.name, measure.unit, float(predicted), measure.of(report)))
    return found + _categories(report, report.estimate)


def _categories(report: Report, estimate: Estimate) -> list[Comparison]:
    worst = max(report.ranks, key=lambda rank: rank.memory.peak)
    return [
        Comparison(f"at the peak: {name}", "bytes", float(size), float(worst.memory.peak_categories.get(name, 0)))
        for name, size in estimate.categories.items()
        if name in CATEGORIES  # inputs are predicted, and not measured
    ]
