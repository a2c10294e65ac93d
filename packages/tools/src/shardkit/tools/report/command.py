"""shardkit report: shows a run, compares two, and fails when a limit is broken."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shardkit.tools.report.files import ReportError, read_estimate, read_report, write_report, write_text
from shardkit.tools.report.measures import MEASURES, Limit, parse_limit
from shardkit.tools.report.page import page_html
from shardkit.tools.report.schema import Report
from shardkit.tools.report.tables import print_comparison, print_report
from shardkit.tools.report.trace import trace_json

_EPILOG = f"""limits: MEASURE>+5%, MEASURE>+100MiB (against the first report), MEASURE>2GiB. Measures:
{", ".join(measure.name for measure in MEASURES)}.

exit status: 0, 1 when a limit is broken, 2 for input that cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        if len(options.reports) > 2:
            raise ReportError(f"{len(options.reports)} reports were given; expected one, or two to compare")
        limits = [parse_limit(text) for text in options.fail_on]
        reports = [read_report(path) for path in options.reports]
        if options.estimate is not None:
            reports[-1] = replace(reports[-1], estimate=read_estimate(options.estimate))
        for limit in limits:
            if limit.needs_base and len(reports) < 2:
                raise ReportError(f"'{limit.text}' compares with another run; give two reports, the one before first")
        if limits and not all(report.run.recorded_steps for report in reports):
            raise ReportError(
                "a report holds no whole step, so no limit can be checked; record steps behind the warm-up"
            )
        _write(options, reports[-1])
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    if len(reports) == 2:
        print_comparison(reports[0], reports[1], console)
    else:
        print_report(reports[0], console)
    return _check(limits, reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardkit report",
        description="Shows a report of `shardkit profile`, or compares two.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", metavar="REPORT", type=Path, nargs="+", help="one report, or two to compare")
    parser.add_argument("--html", type=Path, help="write the (last) report as one HTML page")
    parser.add_argument("--trace", type=Path, help="write it as a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--estimate", type=Path, help="a result of `shardkit estimate --json` to stand beside it")
    parser.add_argument("--json", type=Path, help="write it as JSON again, with the estimate in it")
    parser.add_argument("--fail-on", action="append", default=[], metavar="LIMIT", help="exit with 1 if it is broken")
    return parser


def _write(options: argparse.Namespace, report: Report) -> None:
    if options.html is not None:
        write_text(options.html, page_html(report))
    if options.trace is not None:
        write_text(options.trace, trace_json(report))
    if options.json is not None:
        write_report(report, options.json)


def _check(limits: list[Limit], reports: list[Report]) -> int:
    base = reports[0] if len(reports) == 2 else None
    violations = [found for limit in limits if (found := limit.violation(reports[-1], base)) is not None]
    for found in violations:
        Console(stderr=True).print(f"limit broken: {found}", markup=False, soft_wrap=True)
    return 1 if violations else 0
