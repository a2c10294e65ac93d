"""An estimate as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardkit.tools.estimating.ledger import CATEGORIES
from shardkit.tools.estimating.result import Estimate, TrafficRow

__all__ = ["render", "size", "time"]

_SHOWN = 12


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def count(number: int) -> str:
    """A number of things in thousands, millions or billions."""
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def time(seconds: float) -> str:
    """Seconds, or thousandths of them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def render(estimate: Estimate, console: Console) -> None:
    """Prints an estimate."""
    parts: list[RenderableType] = [_head(estimate), _memory(estimate), _traffic(estimate), _times(estimate)]
    parts += _notes(estimate)
    console.print(Group(*(line for part in parts for line in (part, Text()))))


def _head(estimate: Estimate) -> Text:
    axes = " x ".join(f"{name} {length}" for name, length in estimate.axes.items())
    return Text(
        f"{count(estimate.parameters)} parameters, rank {estimate.rank} of {estimate.world_size} ({axes}), "
        f"on {estimate.machine.name}"
    )


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _memory(estimate: Estimate) -> Table:
    peak = estimate.peak
    table = _grid(escape(f"memory at the peak, {peak.place}"), "category", "bytes", "share")
    for category in CATEGORIES:
        nbytes = peak.by_category[category]
        table.add_row(category.replace("_", " "), size(nbytes), f"{nbytes / max(1, peak.bytes):.0%}")
    table.add_row("all tensors", size(peak.bytes), "", style="bold")
    table.add_row("the process without tensors", size(estimate.machine.process_bytes), "")
    of = "resident" if estimate.machine.device == "cpu" else "reserved"
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    table.add_row(f"{of} ({verdict} in {size(estimate.machine.memory)})", size(estimate.reserved_bytes), "")
    table.add_row("tensors between iterations", size(estimate.idle_bytes), "")
    return table


def _traffic(estimate: Estimate) -> Table:
    table = _grid(
        "sent by this rank in one iteration", "collective", "of", "phase", "calls", "in host", "between hosts"
    )
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
    return row.collective, escape(row.fqn), row.phase, str(row.calls), size(row.inside), size(row.between)


def _times(estimate: Estimate) -> Table:
    line, saved = estimate.timeline, estimate.checkpoint
    table = _grid("time", "what", "predicted")
    table.add_row("step", time(line.step), style="bold")
    table.add_row("computation", time(line.compute))
    table.add_row("communication", time(line.communication))
    table.add_row("exposed communication", time(line.exposed))
    for fqn, seconds in sorted(line.exposed_by_fqn.items(), key=lambda one: -one[1])[:3]:
        if seconds >= 0.01 * line.step:
            table.add_row(escape(f"  of '{fqn}'"), time(seconds))
    table.add_row(f"checkpoint of {size(saved.whole)}, {size(saved.own)} by this rank", time(saved.seconds))
    return table


def _notes(estimate: Estimate) -> list[Text]:
    return [Text(f"note: {note}", style="italic") for note in estimate.notes]
