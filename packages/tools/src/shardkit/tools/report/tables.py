"""A report in the terminal."""

from __future__ import annotations

import shlex
import statistics

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardkit.tools.quantities import show, show_bandwidth
from shardkit.tools.report.measures import MEASURES, compare_with_estimate, exposed_by_rank, lateness, times_last
from shardkit.tools.report.schema import CATEGORIES, Report

_ROWS = 12


def print_report(report: Report, console: Console) -> None:
    """Prints the figures of a run, its ranks, what it waited for most, its memory, and the estimate if there is one."""
    run = report.run
    console.print(
        f"{run.world_size} ranks on {run.device} ({run.backend}), {run.recorded_steps} steps recorded, {run.created}",
        markup=False,
    )
    console.print(shlex.join(run.command), markup=False, style="dim", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, style="yellow")
    for table in (_figures(report), _ranks(report), _collectives(report), _memory(report)):
        _print_table(table, console)
    if report.estimate is not None:
        _print_table(_predictions(report), console)


def print_comparison(before: Report, after: Report, console: Console) -> None:
    """Prints the figures of two runs side by side."""
    table = _table("measure", "first", "second", "change")
    for measure in MEASURES:
        old, new = measure.of(before), measure.of(after)
        change = f"{(new - old) / old:+.1%}" if old else ("-" if not new else "new")
        table.add_row(measure.name, show(old, measure.unit), show(new, measure.unit), change)
    console.print(table)


def _print_table(table: Table, console: Console) -> None:
    """A title may be wider than its table."""
    console.print()
    title, table.title = table.title, None
    if title:
        console.print(title, style="italic", highlight=False)
    console.print(table)


def _table(*heads: str, title: str | None = None) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _figures(report: Report) -> Table:
    table = _table("measure", "value", "is")
    table.columns[2].justify = "left"
    for measure in MEASURES:
        table.add_row(measure.name, show(measure.of(report), measure.unit), measure.meaning)
    return table


def _ranks(report: Report) -> Table:
    late, last, exposed = lateness(report), times_last(report), exposed_by_rank(report)
    table = _table("rank", "step", "exposed", "came last", "late by", "peak memory", "profiler", title="ranks")
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


def _collectives(report: Report) -> Table:
    transports = ", ".join(dict.fromkeys(one.transport for one in report.collectives))
    title = f"most waited for, a step (through: {transports})"
    table = _table("group", "collective", "bytes", "exposed", "of it skew", "waited by", "bus", title=title)
    table.columns[1].justify = "left"
    for one in report.collectives[:_ROWS]:
        table.add_row(
            escape(one.fqn),
            f"{one.kind}, {one.phase}",
            show(one.bytes, "bytes"),
            show(one.exposed, "seconds"),
            show(one.exposed_by_skew, "seconds"),
            escape(one.waited_by),
            show_bandwidth(one.bus_bandwidth),
        )
    return table


def _memory(report: Report) -> Table:
    worst = max(report.ranks, key=lambda rank: rank.memory.peak)
    memory = worst.memory
    where = f"{memory.peak_phase} of {memory.peak_module}"
    table = _table("category", "bytes", title=escape(f"memory at the peak: rank {worst.rank}, in {where}"))
    for name in CATEGORIES:
        table.add_row(name, show(memory.peak_categories[name], "bytes"))
    table.add_row("all", show(memory.peak, "bytes"))
    return table


def _predictions(report: Report) -> Table:
    table = _table("figure", "predicted", "measured", "error", title="estimate against measurement")
    for one in compare_with_estimate(report):
        error = "-" if one.error is None else f"{one.error:+.1%}"
        table.add_row(escape(one.name), show(one.predicted, one.unit), show(one.measured, one.unit), error)
    return table
