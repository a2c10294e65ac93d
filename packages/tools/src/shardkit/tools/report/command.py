"""`shardkit report`: shows a run, compares two, and fails when a limit is broken."""

from __future__ import annotations

import shlex
import statistics
import webbrowser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from shardkit.tools.files import InputError, check_targets, write_text
from shardkit.tools.quantities import show, show_bandwidth
from shardkit.tools.report.files import read_estimate, read_report, write_report
from shardkit.tools.report.measures import (
    MEASURES,
    Limit,
    compare_with_estimate,
    exposed_by_rank,
    lateness,
    owners,
    parse_limit,
    times_last,
)
from shardkit.tools.report.page import page_html, trace_json
from shardkit.tools.report.schema import CATEGORIES, Report
from shardkit.tools.terminal import grid, terminal

__all__ = ["print_comparison", "print_report", "run", "write_outputs"]


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


_ROWS = 12


def print_report(report: Report, console: Console) -> None:
    """Prints the figures of a run, its ranks, what it waited for most, its memory, and the estimate if there is one."""
    run = report.run
    console.print(
        f"{run.world_size} ranks on {run.device} ({run.backend}), {run.recorded_steps} steps recorded, {run.created}",
        markup=False,
    )
    console.print(shlex.join(run.command), style="dim", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")
    tables = [_figures(report), _ranks(report), *_owners(report), _collectives(report), _memory(report)]
    if report.estimate is not None:
        tables.append(_predictions(report))
    for table in tables:
        console.print()
        console.print(table)


def print_comparison(before: Report, after: Report, console: Console) -> None:
    """Prints the figures of two runs side by side."""
    table = grid("measure", "first", "second", "change")
    for measure in MEASURES:
        old, new = measure.of(before), measure.of(after)
        change = f"{(new - old) / old:+.1%}" if old else ("-" if not new else "new")
        table.add_row(measure.name, show(old, measure.unit), show(new, measure.unit), change)
    console.print(table)


def _figures(report: Report) -> Table:
    table = grid("measure", "value", "is", left=3)
    for measure in MEASURES:
        table.add_row(measure.name, show(measure.of(report), measure.unit), measure.meaning)
    return table


def _ranks(report: Report) -> Table:
    late, last, exposed = lateness(report), times_last(report), exposed_by_rank(report)
    table = grid("rank", "step", "exposed", "came last", "late by", "peak memory", "profiler", title="ranks")
    for rank in report.ranks:
        table.add_row(
            str(rank.rank),
            show(statistics.median([step.end - step.begin for step in rank.steps] or [0.0]), "seconds"),
            show(exposed[rank.rank], "seconds"),
            str(last[rank.rank]),
            show(late[rank.rank], "seconds"),
            show(rank.memory.peak, "bytes"),
            show(rank.overhead.share, "share"),
        )
    return table


def _owners(report: Report) -> list[Table]:
    table = grid("rank", "owned", "optimizer", "largest", title="parameters that lie whole on one rank")
    table.columns[-1].justify = "left"
    for one in owners(report):
        table.add_row(
            str(one.rank), show(one.bytes, "bytes"), show(one.optimizer, "seconds"), next(iter(one.owned), "-")
        )
    return [table] if table.rows else []


def _collectives(report: Report) -> Table:
    transports = ", ".join(dict.fromkeys(one.transport for one in report.collectives))
    title = f"most waited for, a step (through: {transports})"
    table = grid("group", "collective", "bytes", "exposed", "of it skew", "waited by", "bus", title=title, left=2)
    for one in report.collectives[:_ROWS]:
        table.add_row(
            one.fqn,
            f"{one.kind}, {one.phase}",
            show(one.bytes, "bytes"),
            show(one.exposed, "seconds"),
            show(one.exposed_by_skew, "seconds"),
            one.waited_by,
            show_bandwidth(one.bus_bandwidth),
        )
    return table


def _memory(report: Report) -> Table:
    worst = max(report.ranks, key=lambda rank: rank.memory.peak)
    memory = worst.memory
    where = f"{memory.peak_phase} of {memory.peak_module}"
    table = grid("category", "bytes", title=f"memory at the peak: rank {worst.rank}, in {where}")
    for name in CATEGORIES:
        table.add_row(name, show(memory.peak_categories[name], "bytes"))
    table.add_row("all", show(memory.peak, "bytes"))
    return table


def _predictions(report: Report) -> Table:
    table = grid("figure", "predicted", "measured", "error", title="estimate against measurement")
    for one in compare_with_estimate(report):
        error = "-" if one.error is None else f"{one.error:+.1%}"
        table.add_row(one.name, show(one.predicted, one.unit), show(one.measured, one.unit), error)
    return table
