"""`shardkit report`: shows a run, compares two, and fails when a limit is broken."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from shardkit.tools.files import InputError, check_targets, write_text
from shardkit.tools.quantities import show
from shardkit.tools.report.files import read_estimate, read_report, write_report
from shardkit.tools.report.measures import MEASURES, owners, parse_limit
from shardkit.tools.report.page import (
    collective_rows,
    owner_rows,
    page_html,
    prediction_rows,
    rank_rows,
    title_of,
    trace_json,
)
from shardkit.tools.report.schema import CATEGORIES, Report
from shardkit.tools.terminal import grid, terminal


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit report`; the exit status is 1 if a limit is broken. Raises `InputError` and `ReportError`."""
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
    if len(reports) == 2:
        _print_comparison(*reports)
    else:
        print_report(reports[0])
    say_written(options.json, options.html, options.trace)
    base = reports[0] if len(reports) == 2 else None
    broken = [found for limit in limits if (found := limit.violation(reports[-1], base)) is not None]
    for found in broken:
        terminal(stderr=True).print(f"limit broken: {found}")
    return 1 if broken else 0


def say_written(*outputs: Path | None) -> None:
    """Prints which files were written, if any."""
    if written := [str(path) for path in outputs if path is not None]:
        terminal().print(f"\nwritten to {', '.join(written)}")


def write_outputs(report: Report, json: Path | None, html: Path | None, trace: Path | None) -> None:
    if json is not None:
        write_report(report, json)
    if html is not None:
        write_text(html, page_html(report))
    if trace is not None:
        write_text(trace, trace_json(report))


_ROWS = 12


def print_report(report: Report) -> None:
    """Prints the figures of a run, its ranks, its longest waits, its memory, and the estimate if there is one."""
    console = terminal()
    console.print(title_of(report))
    console.print(shlex.join(report.run.command), style="dim", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")
    for table in _tables(report):
        console.print()
        console.print(table)


def _print_comparison(before: Report, after: Report) -> None:
    table = grid("measure", "first", "second", "change")
    for measure in MEASURES:
        old, new = measure.of(before), measure.of(after)
        change = f"{(new - old) / old:+.1%}" if old else ("-" if not new else "new")
        table.add_row(measure.name, show(old, measure.unit), show(new, measure.unit), change)
    terminal().print(table)


def _tables(report: Report) -> Iterator[Table]:
    table = grid("measure", "value", "is")
    table.columns[-1].justify = "left"
    for measure in MEASURES:
        table.add_row(measure.name, show(measure.of(report), measure.unit), measure.meaning)
    yield table
    names = ["rank", "step", "exposed", "came last", "late by", "peak memory", "profiler"]
    yield _filled(grid(*names, title="ranks"), rank_rows(report, report.ranks), names)
    if owned := owner_rows(owners(report)):
        names = ["rank", "owned", "optimizer", "largest"]
        table = grid(*names, title="parameters that lie whole on one rank")
        table.columns[-1].justify = "left"
        yield _filled(table, owned, names)
    transports = ", ".join(dict.fromkeys(one.transport for one in report.collectives))
    title = f"most waited for, a step (through: {transports})"
    table = grid("group", "collective", "bytes", "exposed", "of it skew", "waited by", "bus", title=title, left=2)
    rows = [row | {"what": f"{row['what']}, {row['phase']}"} for row in collective_rows(report)[:_ROWS]]
    yield _filled(table, rows, ["of", "what", "bytes", "exposed", "of it skew", "waited by", "bus bandwidth"])
    worst = max(report.ranks, key=lambda rank: rank.memory.peak)
    where = f"{worst.memory.peak_phase} of {worst.memory.peak_module}"
    table = grid("category", "bytes", title=f"memory at the peak: rank {worst.rank}, in {where}")
    for name in CATEGORIES:
        table.add_row(name, show(worst.memory.peak_categories[name], "bytes"))
    table.add_row("all", show(worst.memory.peak, "bytes"))
    yield table
    if report.estimate is not None:
        table = grid("figure", "predicted", "measured", "error", title="estimate against measurement")
        yield _filled(table, prediction_rows(report), ["figure", "predicted", "measured", "error"])


def _filled(table: Table, rows: list[dict[str, Any]], names: Sequence[str]) -> Table:
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table
