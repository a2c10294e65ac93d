"""Reports as files: written so that a reader never sees half of one, read with errors that say what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import types
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardkit.tools.report.schema import SCHEMA, VERSION, Estimate, Group, Rank, Report, Run

_T = TypeVar("_T")


def decode(kind: type[_T], value: Any, path: str = "") -> _T:
    """`value`, as `json.load` gives it, as a dataclass of type `kind`.

    Raises:
        ValueError: with the path of the first entry that is missing or of another type, and both types.
    """
    result: _T = _decode(kind, value, path)
    return result


def _decode(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        _expect(list, value, path, "a list")
        return [_decode(arguments[0], entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    if origin is dict:
        _expect(dict, value, path, "an object")
        return {key: _decode(arguments[1], entry, f"{path}.{key}") for key, entry in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(
                f"{path or 'the report'}: found {value!r}, expected one of {', '.join(map(repr, arguments))}"
            )
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (one for one in arguments if one is not types.NoneType)
        return _decode(inner, value, path)
    return _decode_plain(kind, value, path)


def _decode_plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    _expect(kind, value, path, {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind])
    return value


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    _expect(dict, value, path, "an object")
    hints = _hints(kind)
    missing = [name for name in hints if name not in value]
    if missing:
        raise ValueError(f"{path or 'the report'}: '{missing[0]}' is missing")
    prefix = f"{path}." if path else ""
    return kind(**{name: _decode(hint, value[name], prefix + name) for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _expect(kind: type, value: Any, path: str, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise ValueError(f"{path or 'the report'}: found {found}, expected {words}")


class ReportError(ValueError):
    """A file that is no report this version can read; the text says why and what to do."""


def check_targets(*paths: Path | None) -> None:
    """Before a long run: whether files can be written where they are asked for.

    Raises:
        ReportError: for a directory that does not exist.
    """
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ReportError(
                f"{path} cannot be written: there is no directory {path.absolute().parent}; make it first"
            )


def write_report(report: Report, path: Path) -> None:
    """Writes a report as JSON. Raises `OSError` where the file system refuses."""
    write_text(path, json.dumps(asdict(report), separators=(",", ":"), allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file under another name first, then renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        ReportError: the file cannot be read, is cut short, is no report, or one of another version.
    """
    value = _load(path)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ReportError(f'{path} is JSON, but no report of `shardkit profile` (its "schema" is not "{SCHEMA}")')
    version = value.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "read it with a newer shardkit-tools" if newer else "record the run again with this shardkit-tools"
        raise ReportError(
            f"{path} is a report of version {version}; this shardkit-tools reads version {VERSION}: {advice}"
        )
    try:
        return decode(Report, value)
    except ValueError as error:
        raise ReportError(f"{path} is a damaged report: {error}; record the run again") from error


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ReportError(f"{path} cannot be read: {reason}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno} of {len(text)} characters"
        raise ReportError(f"{path} is no complete JSON ({error.msg} at {at}); was its writer interrupted?") from error


RECORD_VERSION = 1
_RECORD_SCHEMA = "shardkit.record"


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
        return RankRecord(_RECORD_SCHEMA, RECORD_VERSION, run, wall, groups, rank)


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
            if not isinstance(value, dict) or (value.get("schema"), value.get("version")) != (
                _RECORD_SCHEMA,
                RECORD_VERSION,
            ):
                raise ValueError("it is no record of this version of shardkit-tools")
            records.append(decode(RankRecord, value))
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} cannot be used: {error}; record the run again") from error
    if not records:
        raise ReportError(f"{directory} holds no records (rank-*.json): no rank has come to the end of its recording")
    return sorted(records, key=lambda record: record.rank.rank)


_ESTIMATE_KIND, _ESTIMATE_SCHEMA = "estimate", 1


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
    if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (_ESTIMATE_KIND, _ESTIMATE_SCHEMA):
        raise ReportError(
            f"{path} is no estimate of schema {_ESTIMATE_SCHEMA}; write one with "
            f"`shardkit estimate ... --json {path.name}` (of a sweep, choose one)"
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
