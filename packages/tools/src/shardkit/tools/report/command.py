"""`shardkit report`: shows a run, compares two, and fails when a limit is broken."""

from __future__ import annotations

import webbrowser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from shardkit.tools.files import InputError, check_targets, write_text
from shardkit.tools.report.files import read_estimate, read_report, write_report
from shardkit.tools.report.measures import Limit, parse_limit
from shardkit.tools.report.page import page_html, trace_json
from shardkit.tools.report.schema import Report
from shardkit.tools.report.tables import print_comparison, print_report
from shardkit.tools.terminal import terminal

__all__ = ["run", "write_outputs"]


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit report`; the exit status is 1 if a limit is broken."""
    check_targets(options.html, options.trace, options.json)
    limits = [parse_limit(text) for text in options.fail_on]
    reports = [read_report(path) for path in options.reports]
    if options.estimate is not None:
        reports[-1] = replace(reports[-1], estimate=read_estimate(options.estimate))
    for limit in limits:
        if limit.needs_base and len(reports) < 2:
            raise InputError(f"'{limit.text}' compares with another run; give two reports, the one before first")
    if limits and not all(report.run.recorded_steps for report in reports):
        raise InputError("a report holds no whole step, so no limit can be checked; record steps after the warm-up")
    write_outputs(reports[-1], options.json, options.html, options.trace)
    if options.open_page and not webbrowser.open(options.html.absolute().as_uri()):
        terminal(stderr=True).print(f"no browser could be started; open {options.html} yourself")
    if len(reports) == 2:
        print_comparison(reports[0], reports[1], terminal())
    else:
        print_report(reports[0], terminal())
    return _check(limits, reports)


def write_outputs(report: Report, json: Path | None, html: Path | None, trace: Path | None) -> None:
    """Writes a report in those forms for which there is a path."""
    if json is not None:
        write_report(report, json)
    if html is not None:
        write_text(html, page_html(report))
    if trace is not None:
        write_text(trace, trace_json(report))


def _check(limits: list[Limit], reports: list[Report]) -> int:
    base = reports[0] if len(reports) == 2 else None
    violations = [found for limit in limits if (found := limit.violation(reports[-1], base)) is not None]
    for found in violations:
        terminal(stderr=True).print(f"limit broken: {found}")
    return 1 if violations else 0
