"""Reads what `shardkit estimate --json` predicted, for it to stand beside what was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.tools.report.decoding import decode
from shardkit.tools.report.files import ReportError
from shardkit.tools.report.schema import Estimate

__all__ = ["read_estimate"]

_KIND, _SCHEMA = "estimate", 1


@dataclass(frozen=True)
class _Peak:
    bytes: int
    by_category: dict[str, int]


@dataclass(frozen=True)
class _Row:
    collective: str
    calls: int
    inside: int
    between: int
    of_core: bool


@dataclass(frozen=True)
class _Machine:
    device: str
    process_bytes: int


@dataclass(frozen=True)
class _Timeline:
    step: float
    exposed: float


@dataclass(frozen=True)
class _Predicted:
    """What of an estimate has a counterpart in a report."""

    machine: _Machine
    peak: _Peak
    reserved_bytes: int
    traffic: list[_Row]
    timeline: _Timeline


def read_estimate(path: Path) -> Estimate:
    """The figures of an estimate, per step and for the rank that was estimated.

    Raises:
        ReportError: the file cannot be read, or is no estimate of this version.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read as an estimate: {error}") from error
    if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (_KIND, _SCHEMA):
        raise ReportError(
            f"{path} is no estimate of schema {_SCHEMA}; write one with `shardkit estimate ... --json {path.name}` "
            "(of a sweep, choose one)"
        )
    try:
        found = decode(_Predicted, value)
    except ValueError as error:
        raise ReportError(f"{path} is a damaged estimate: {error}") from error
    collectives = [row for row in found.traffic if row.of_core]
    # What a device's allocator counts leaves out the context.
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
