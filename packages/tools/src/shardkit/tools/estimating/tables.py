"""An estimate as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardkit.tools.estimating.memory import CATEGORIES
from shardkit.tools.estimating.result import Estimate, TrafficRow
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid

__all__ = ["print_estimate"]

_SHOWN = 12
_SENT = ("collective", "of", "phase", "calls", "in host", "between hosts")


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Prints what an estimate says, table by table."""
    axes = " x ".join(f"{name} {length}" for name, length in estimate.axes.items())
    console.print(
        f"{show(estimate.parameters, 'count')} parameters, rank {estimate.rank} of {estimate.world_size} ({axes}), on "
        f"{estimate.machine.name}"
    )
    console.print("dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in estimate.dtypes.items()))
    for table in (_memory(estimate), _traffic(estimate), _times(estimate)):
        console.print()
        console.print(table)
    console.print()
    for note in estimate.notes:
        console.print(f"note: {note}", style="italic")


def _memory(estimate: Estimate) -> Table:
    peak = estimate.peak
    table = grid("category", "bytes", "share", title=f"memory at the peak, {peak.place}")
    for category in CATEGORIES:
        nbytes = peak.by_category[category]
        table.add_row(category.replace("_", " "), show(nbytes, "bytes"), f"{nbytes / max(1, peak.bytes):.0%}")
    table.add_row("all tensors", show(peak.bytes, "bytes"), "", style="bold")
    table.add_row("the process without tensors", show(estimate.machine.process_bytes, "bytes"), "")
    of = "resident" if estimate.machine.device == "cpu" else "reserved"
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    table.add_row(
        f"{of} ({verdict} in {show(estimate.machine.memory, 'bytes')})", show(estimate.reserved_bytes, "bytes"), ""
    )
    table.add_row("tensors between iterations", show(estimate.idle_bytes, "bytes"), "")
    return table


def _traffic(estimate: Estimate) -> Table:
    table = grid(*_SENT, title="sent by this rank in one iteration", left=3)
    rows = sorted(estimate.traffic, key=lambda row: -(row.inside + row.between))
    for row in rows[:_SHOWN]:
        table.add_row(*_cells(row))
    if rest := rows[_SHOWN:]:
        table.add_row(*_cells(_sum(rest, f"{len(rest)} more")))
    table.add_row(*_cells(_sum(rows, "all")), style="bold")
    return table


def _sum(rows: Sequence[TrafficRow], name: str) -> TrafficRow:
    calls, nbytes = sum(row.calls for row in rows), sum(row.bytes for row in rows)
    inside, between = sum(row.inside for row in rows), sum(row.between for row in rows)
    return TrafficRow(name, "", "", calls, nbytes, inside, between, of_core=False)


def _cells(row: TrafficRow) -> tuple[str, ...]:
    return row.collective, row.fqn, row.phase, str(row.calls), show(row.inside, "bytes"), show(row.between, "bytes")


def _times(estimate: Estimate) -> Table:
    line, saved = estimate.timeline, estimate.checkpoint
    table = grid("what", "predicted", title="time")
    table.add_row("step", show(line.step, "seconds"), style="bold")
    table.add_row("computation", show(line.compute, "seconds"))
    table.add_row("communication", show(line.communication, "seconds"))
    table.add_row("exposed communication", show(line.exposed, "seconds"))
    for fqn, seconds in sorted(line.exposed_by_fqn.items(), key=lambda one: -one[1])[:3]:
        if seconds >= 0.01 * line.step:
            table.add_row(f"  of '{fqn}'", show(seconds, "seconds"))
    table.add_row(
        f"checkpoint of {show(saved.whole, 'bytes')}, {show(saved.own, 'bytes')} by this rank",
        show(saved.seconds, "seconds"),
    )
    return table
