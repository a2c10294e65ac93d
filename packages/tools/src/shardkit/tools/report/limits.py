"""Limits for CI: `peak_memory>+5%` fails when a run's peak is more than 5 % above the other run's.

MEASURE OP LIMIT      MEASURE: a name of `MEASURES`;  OP: > or >=;  LIMIT: one of
    +5%               above the first run's figure by more than so many percent
    +100MiB           above it by more than so much
    2GiB              above this, whatever the first run had
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardkit.tools.report.measures import MEASURES, Measure
from shardkit.tools.report.quantities import parse_quantity, show
from shardkit.tools.report.schema import Report

__all__ = ["Limit", "parse_limit"]

_LIMIT = re.compile(r"\s*(\w+)\s*(>=|>)\s*(\+?)\s*(.+)")


@dataclass(frozen=True)
class Limit:
    """One limit: `kind` says what `amount` is: "relative" (a share), "more" or "absolute" (in the measure's unit)."""

    text: str
    measure: Measure
    inclusive: bool
    kind: Literal["relative", "more", "absolute"]
    amount: float

    @property
    def needs_base(self) -> bool:
        """Whether it compares with another run."""
        return self.kind != "absolute"

    def violation(self, report: Report, base: Report | None) -> str | None:
        """Why `report` breaks the limit, None if it does not. `base` is the run to compare with."""
        value = self.measure.of(report)
        bound = self.amount
        if self.needs_base:
            assert base is not None
            before = self.measure.of(base)
            bound = before * (1 + self.amount) if self.kind == "relative" else before + self.amount
        if not (value >= bound if self.inclusive else value > bound):
            return None
        unit = self.measure.unit
        return f"{self.measure.name} is {show(value, unit)}, the limit '{self.text}' allows {show(bound, unit)}"


def parse_limit(text: str) -> Limit:
    """The limit that `text` describes.

    Raises:
        ValueError: with the part that cannot be read and what may stand there.
    """
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no limit: expected MEASURE>LIMIT, such as peak_memory>+5% or step_time>=1.5s")
    name, operator, plus, amount = match.groups()
    measure = next((one for one in MEASURES if one.name == name), None)
    if measure is None:
        raise ValueError(
            f"'{text}': there is no measure '{name}'; expected one of {', '.join(m.name for m in MEASURES)}"
        )
    try:
        if plus and amount.strip().endswith("%"):
            return Limit(text, measure, operator == ">=", "relative", parse_quantity(amount, "share"))
        return Limit(
            text, measure, operator == ">=", "more" if plus else "absolute", parse_quantity(amount, measure.unit)
        )
    except ValueError as error:
        raise ValueError(f"'{text}': {error}") from error
