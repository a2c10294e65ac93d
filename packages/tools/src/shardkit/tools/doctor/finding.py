"""One finding: what is wrong, what it costs, what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit.tools.report.measures import Unit
from shardkit.tools.report.quantities import show

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """`cost` is in seconds a step or in bytes; `share` is what that is of a step, or of the peak of memory.

    `rule` names the kind of finding, `seen` says what was measured, `change` what to do about it.
    """

    rule: str
    unit: Literal["seconds", "bytes"]
    cost: float
    share: float
    seen: str
    change: str

    @property
    def price(self) -> str:
        """The cost in words."""
        unit: Unit = self.unit
        per = " a step" if self.unit == "seconds" else ""
        of = "of the step" if self.unit == "seconds" else "of the peak"
        return f"{show(self.cost, unit)}{per}, {self.share:.1%} {of}"
