"""shardkit profile: runs a training command with every rank recorded, and writes the report."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardkit.tools.command import run_command
from shardkit.tools.profiling.recorder import Extent
from shardkit.tools.profiling.session import ACTIVATIONS, DEFAULT_STEPS, DEFAULT_WARMUP, STEPS, TARGET, WARMUP
from shardkit.tools.report.files import ReportError, check_targets, read_records, write_report, write_text
from shardkit.tools.report.merge import merge
from shardkit.tools.report.page import page_html
from shardkit.tools.report.tables import print_report
from shardkit.tools.report.trace import trace_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns that of the training command, or 2 if there is nothing to report."""
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        extent = Extent(options.warmup, options.steps)
        if not command:
            raise ValueError(
                "no command was given; write it behind the options: shardkit profile torchrun ... train.py"
            )
        check_targets(options.out, options.html, options.trace)
    except ValueError as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    with tempfile.TemporaryDirectory(prefix="shardkit-profile-") as directory:
        records = options.records or Path(directory)
        status = _run(command, extent, records, activations=not options.no_activations)
        recorded = any(records.glob("rank-*.json"))
        if status != 0:
            told = "reporting what was recorded" if recorded else "nothing was recorded"
            errors.print(f"the command ended with status {status}; {told}", markup=False)
            if not recorded:
                return status
        try:
            report = merge(read_records(records), command)
            write_report(report, options.out)
            if options.html is not None:
                write_text(options.html, page_html(report))
            if options.trace is not None:
                write_text(options.trace, trace_json(report))
        except (ReportError, OSError) as error:
            errors.print(f"error: {error}", markup=False, soft_wrap=True)
            if not recorded:
                hint = "a rank records from its first fully_shard call on; does the command call it?"
                errors.print(hint, markup=False, soft_wrap=True)
            return status or 2
    print_report(report, Console())
    written = ", ".join(str(path) for path in (options.out, options.html, options.trace) if path is not None)
    Console().print(f"\nwritten to {written}", markup=False)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardkit profile",
        description="Runs a training command, records some steps of every rank, and writes a report. The script needs "
        "no change: it has to call shardkit's fully_shard.",
        epilog="example: shardkit profile --steps 5 --html run.html torchrun --nproc-per-node 2 train.py",
    )
    parser.add_argument("--out", type=Path, default=Path("report.json"), help="the report (default: report.json)")
    parser.add_argument("--html", type=Path, help="also write it as one HTML page")
    parser.add_argument("--trace", type=Path, help="also write a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--warmup", type=int, default=DEFAULT_WARMUP, help="steps to leave out (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="steps to record (default: %(default)s)")
    parser.add_argument("--no-activations", action="store_true", help="do not count what autograd saves; costs less")
    parser.add_argument(
        "--records", type=Path, help="keep the records of the ranks in this directory, which all hosts share"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _run(command: list[str], extent: Extent, records: Path, *, activations: bool) -> int:
    """Runs the command with the observer asked for; returns its exit status."""
    for old in records.glob("rank-*.json"):
        old.unlink()
    environment = os.environ | {
        TARGET: str(records.resolve()),
        WARMUP: str(extent.warmup),
        STEPS: str(extent.steps),
        ACTIVATIONS: str(int(activations)),
    }
    return run_command(command, environment)
