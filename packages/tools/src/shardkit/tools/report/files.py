"""Report files, the records of ranks that they are made from, and estimates to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from shardkit.tools.files import InputError, json_text, read_json, write_text
from shardkit.tools.report.schema import SCHEMA, VERSION, Estimate, Group, Rank, Report, Run

_RECORD_SCHEMA, _RECORD_VERSION = "shardkit.record", 1


class ReportError(InputError):
    """A file that is not a report for this version; the message says why and what to do."""


class _Head(msgspec.Struct):
    schema: str = ""
    version: int = 0


def write_report(report: Report, path: Path) -> None:
    """Writes a report as JSON. Raises `OSError` if the file system refuses."""
    write_text(path, json_text(report))


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        ReportError: if the file cannot be read, is truncated, or is not a report of this version.
    """
    head = read_json(path, _Head, "a report of `shardkit profile`", ReportError)
    if head.schema != SCHEMA:
        raise ReportError(
            f'{path} is not a report of `shardkit profile`: its "schema" is not "{SCHEMA}"; choose another file'
        )
    if head.version != VERSION:
        newer = head.version > VERSION
        advice = "read it with a newer shardkit-tools" if newer else "record the run again with this shardkit-tools"
        raise ReportError(
            f"{path} is a report of version {head.version}; this shardkit-tools reads version {VERSION}: {advice}"
        )
    return read_json(path, Report, "a complete report", ReportError)


@dataclass(frozen=True)
class RankRecord:
    """The record that one rank writes, before the ranks are merged.

    Times are those of `time.perf_counter`; `wall` is the difference of `time.time` to it.
    """

    run: Run
    wall: float
    groups: list[Group]
    rank: Rank
    schema: str = _RECORD_SCHEMA
    version: int = _RECORD_VERSION


def is_record(path: Path) -> bool:
    """Whether a file is a rank's record, of any version."""
    try:
        return read_json(path, _Head, "a record of a rank", ReportError).schema == _RECORD_SCHEMA
    except ReportError:
        return False


def write_record(record: RankRecord, directory: Path) -> None:
    """Writes `rank-<rank>.json` into the directory, which is created if missing. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / f"rank-{record.rank.rank}.json", json_text(record))


def read_records(directory: Path) -> list[RankRecord]:
    """The records of a run, by rank.

    Raises:
        ReportError: if there are none, or one of them cannot be used.
    """
    records = []
    for path in directory.glob("rank-*.json"):
        head = read_json(path, _Head, "a record of a rank", ReportError)
        if (head.schema, head.version) != (_RECORD_SCHEMA, _RECORD_VERSION):
            raise ReportError(f"{path} is not a record of this version of shardkit-tools; record the run again")
        records.append(read_json(path, RankRecord, "a complete record of a rank", ReportError))
    if not records:
        raise ReportError(
            f"{directory} holds no records (rank-*.json): no rank has come to the end of its recording; "
            "run longer, or record fewer steps"
        )
    return sorted(records, key=lambda record: record.rank.rank)


class _Peak(msgspec.Struct):
    bytes: int
    by_category: dict[str, int]


class _Row(msgspec.Struct):
    calls: int
    inside: int
    between: int
    of_core: bool


class _Machine(msgspec.Struct):
    device: str
    process_bytes: int


class _Timeline(msgspec.Struct):
    step: float
    exposed: float


class _Predicted(msgspec.Struct):
    """The parts of an estimate that have a counterpart in a report."""

    kind: Literal["estimate"]
    schema: Literal[1]
    machine: _Machine
    peak: _Peak
    reserved_bytes: int
    traffic: list[_Row]
    timeline: _Timeline


def read_estimate(path: Path) -> Estimate:
    """The prediction of `shardkit estimate --json`, per step and for the estimated rank.

    Raises:
        ReportError: if the file cannot be read, or is not an estimate of this version.
    """
    found = read_json(path, _Predicted, "one estimate of `shardkit estimate --json`", ReportError)
    collectives = [row for row in found.traffic if row.of_core]
    # The figures of a device's allocator leave out the context.
    beside = 0 if found.machine.device == "cpu" else found.machine.process_bytes
    return Estimate(
        source=str(path),
        peak_memory=found.peak.bytes,
        resident_memory=found.reserved_bytes - beside,
        step_time=found.timeline.step,
        exposed=found.timeline.exposed,
        wire_bytes=sum(row.inside + row.between for row in collectives),
        collectives=sum(row.calls for row in collectives),
        categories=found.peak.by_category,
    )
