"""What one rank leaves behind: its part of a report, in its own host's clock, before the ranks are merged."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shardkit.tools.report.decoding import decode
from shardkit.tools.report.files import ReportError, write_text
from shardkit.tools.report.schema import Group, Rank, Run

__all__ = ["RECORD_VERSION", "RankRecord", "read_records", "write_record"]

RECORD_VERSION = 1
_SCHEMA = "shardkit.record"


@dataclass(frozen=True)
class RankRecord:
    """One rank. Times are those of `time.perf_counter`; `wall` is what `time.time` was ahead of it."""

    schema: str
    version: int
    run: Run
    wall: float
    groups: list[Group]
    rank: Rank

    @staticmethod
    def of(run: Run, wall: float, groups: list[Group], rank: Rank) -> RankRecord:
        """A record of this version."""
        return RankRecord(_SCHEMA, RECORD_VERSION, run, wall, groups, rank)


def write_record(record: RankRecord, directory: Path) -> None:
    """Writes `rank-<rank>.json` into the directory, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(record), separators=(",", ":"), allow_nan=False)
    write_text(directory / f"rank-{record.rank.rank}.json", text + "\n")


def read_records(directory: Path) -> list[RankRecord]:
    """The records of a run, by rank.

    Raises:
        ReportError: there are none, or one of them cannot be used.
    """
    records = []
    for path in directory.glob("rank-*.json"):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict) or (value.get("schema"), value.get("version")) != (_SCHEMA, RECORD_VERSION):
                raise ValueError("it is no record of this version of shardkit-tools")
            records.append(decode(RankRecord, value))
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} cannot be used: {error}; record the run again") from error
    if not records:
        raise ReportError(f"{directory} holds no records (rank-*.json): no rank has come to the end of its recording")
    return sorted(records, key=lambda record: record.rank.rank)
