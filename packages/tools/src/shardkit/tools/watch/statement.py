"""What a rank says about itself when an alarm is raised; it travels through the store as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shardkit.tools.report.decoding import decode

__all__ = ["Started", "Statement", "WaitingFor", "from_text", "to_text"]


@dataclass(frozen=True)
class WaitingFor:
    """What a rank waits for.

    Attributes:
        group: name of the process group: several may have the same ranks. Empty for no collective.
        ranks: its global ranks.
        number: counts the `kind` on the group, -1 for no collective.
    """

    operation: str
    kind: str
    fqn: str
    group: str
    ranks: list[int]
    number: int
    seconds: float


@dataclass(frozen=True)
class Started:
    """The collectives of one kind that a rank has started on one group: how many, and the labels of the last ones."""

    kind: str
    group: str
    ranks: list[int]
    count: int
    last: list[str]

    def label(self, number: int) -> str | None:
        """The label of number `number`, None if it has not been started or is forgotten."""
        index = number - (self.count - len(self.last))
        return self.last[index] if 0 <= index < len(self.last) else None


@dataclass(frozen=True)
class Statement:
    """Where a rank is: `stack` are the frames of its main thread, innermost last; `failure` the error it is raising."""

    rank: int
    step: int
    phase: str
    module: str
    waiting: WaitingFor | None
    started: list[Started]
    stack: list[str]
    failure: str | None


def to_text(statement: Statement) -> str:
    """The statement as JSON."""
    return json.dumps(asdict(statement))


def from_text(text: str) -> Statement:
    """The statement again. Raises `ValueError` for anything else."""
    return decode(Statement, json.loads(text))
