"""An estimate, and sweeps over settings of it, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from shardkit.tools.estimating.result import Estimate, TrafficRow
from shardkit.tools.estimating.trace import CATEGORIES
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid

_SHOWN = 12


def print_estimate(estimate: Estimate, console: Console) -> None:
    axes = " x ".join(f"{name} {length}" for name, length in estimate.axes.items())
    console.print(
        f"{show(estimate.parameters, 'count')} parameters, rank {estimate.rank} of {estimate.world_size} ({axes}), on "
        f"{estimate.machine.name}"
    )
    console.print("dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in estimate.dtypes.items()))
    for table in _tables(estimate):
        console.print()
        console.print(table)
    console.print()
    for note in estimate.notes:
        console.print(f"note: {note}", style="italic")


def _tables(estimate: Estimate) -> Iterator[Table]:
    peak, machine = estimate.peak, estimate.machine
    table = grid("category", "bytes", "share", title=f"memory at the peak, {peak.place}")
    for category in CATEGORIES:
        nbytes = peak.by_category[category]
        table.add_row(category.replace("_", " "), show(nbytes, "bytes"), f"{nbytes / max(1, peak.bytes):.0%}")
    table.add_row("all tensors", show(peak.bytes, "bytes"), "", style="bold")
    table.add_row("the process without tensors", show(machine.process_bytes, "bytes"), "")
    reserved = f"{'resident' if machine.device == 'cpu' else 'reserved'} ({'fits' if estimate.fits else 'DOES NOT FIT'}"
    table.add_row(f"{reserved} in {show(machine.memory, 'bytes')})", show(estimate.reserved_bytes, "bytes"), "")
    if estimate.host_bytes:
        table.add_row("offloaded to host memory", show(estimate.host_bytes, "bytes"), "")
    table.add_row("tensors between iterations", show(estimate.idle_bytes, "bytes"), "")
    yield table

    heads = "collective", "of", "phase", "calls", "in host", "between hosts"
    table = grid(*heads, title="sent by this rank in one iteration", left=3)
    alike: dict[object, list[TrafficRow]] = {}  # the blocks of a model send the same
    for row in estimate.traffic:
        alike.setdefault((row.collective, row.phase, row.calls, row.inside, row.between), []).append(row)
    rows = sorted(alike.values(), key=lambda some: -sum(row.inside + row.between for row in some))
    for some in rows[:_SHOWN]:
        name = some[0].fqn + (f" and {len(some) - 1} alike" if len(some) > 1 else "")
        table.add_row(some[0].collective, name, some[0].phase, *_sent(some))
    if rest := [row for some in rows[_SHOWN:] for row in some]:
        table.add_row(f"{len(rest)} more", "", "", *_sent(rest))
    table.add_row("all", "", "", *_sent(estimate.traffic), style="bold")
    yield table

    line, saved = estimate.timeline, estimate.checkpoint
    table = grid("what", "predicted", title="time")
    table.add_row("step", show(line.step, "seconds"), style="bold")
    table.add_row("computation", show(line.compute, "seconds"))
    table.add_row("communication", show(line.communication, "seconds"))
    table.add_row("exposed communication", show(line.exposed, "seconds"))
    for fqn, seconds in sorted(line.exposed_by_fqn.items(), key=lambda one: -one[1])[:3]:
        if seconds >= 0.01 * line.step:
            table.add_row(f"  of '{fqn}'", show(seconds, "seconds"))
    if estimate.mfu is not None:
        table.add_row("MFU", show(estimate.mfu, "share"))
    written = f"checkpoint of {show(saved.whole, 'bytes')}, {show(saved.own, 'bytes')} by this rank"
    table.add_row(written, show(saved.seconds, "seconds"))
    yield table

    if shares := estimate.owners:
        table = grid("parameters by rank of the shard group", "", title="placements")
        least, most = min(shares.bytes), max(shares.bytes)
        table.add_row(f"most, rank {shares.bytes.index(most)}", show(most, "bytes"))
        table.add_row("mean", show(sum(shares.bytes) / len(shares.bytes), "bytes"))
        table.add_row(f"least, rank {shares.bytes.index(least)}", show(least, "bytes"))
        table.add_row("work on owned matrices, largest over mean", f"{shares.imbalance:.3f}")
        table.add_row(f"optimizer of the slowest rank, {shares.slowest}", show(shares.optimizer_seconds, "seconds"))
        yield table


def _sent(rows: Sequence[TrafficRow]) -> tuple[str, str, str]:
    inside, between = sum(row.inside for row in rows), sum(row.between for row in rows)
    return str(sum(row.calls for row in rows)), show(inside, "bytes"), show(between, "bytes")


class Point(NamedTuple):
    """One combination of settings and its estimate, or None with the error."""

    settings: Mapping[str, str]
    estimate: Estimate | None
    problem: str = ""

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def print_sweep(points: Sequence[Point], console: Console) -> None:
    """One line for each point, in the order of the sweep."""
    table = grid(*points[0].settings, "peak", "reserved", "fits", "sent", "step", "exposed", left=0)
    for settings, found, _ in points:
        cells = ["-"] * 6
        if found is not None:
            sent, line = sum(row.inside + row.between for row in found.traffic), found.timeline
            memory = show(found.peak.bytes, "bytes"), show(found.reserved_bytes, "bytes"), "yes" if found.fits else "no"
            cells = [*memory, show(sent, "bytes"), show(line.step, "seconds"), show(line.exposed, "seconds")]
        table.add_row(*settings.values(), *cells)
    console.print(table)
    for point in points:
        if point.problem:
            console.print(f"{point.name}: {point.problem}")
