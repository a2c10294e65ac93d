"""Reports as files: written so that a reader never sees half of one, read with errors that say what is wrong."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.tools.report.decoding import decode
from shardkit.tools.report.schema import SCHEMA, VERSION, Report

__all__ = ["ReportError", "check_targets", "read_report", "write_report", "write_text"]


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
