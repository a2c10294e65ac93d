"""An estimate as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    if estimate.short_of:
        console.print(f"DOES NOT FIT: {estimate.short_of}", style="bold")
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
    fits = "fits" if estimate.reserved_bytes <= machine.memory else "DOES NOT FIT"
    reserved = f"{'resident' if machine.device == 'cpu' else 'reserved'} ({fits}"
    table.add_row(f"{reserved} in {show(machine.memory, 'bytes')})", show(estimate.reserved_bytes, "bytes"), "")
    table.add_row("tensors between iterations", show(estimate.idle_bytes, "bytes"), "")
    yield table

    if estimate.host_bytes:
        table = grid("category", "device", "host", "files", title="memory by tier, each where this rank has most")
        for category in CATEGORIES:
            in_files = estimate.file_bytes if category == "optimizer" else 0
            tiers = peak.by_category[category], estimate.host_by_category[category], in_files
            if any(tiers):
                table.add_row(category.replace("_", " "), *(show(one, "bytes") for one in tiers))
        sums = (peak.bytes, estimate.host_bytes, estimate.file_bytes)
        table.add_row("all", *(show(one, "bytes") for one in sums), style="bold")
        ranks, room = min(machine.ranks_per_host, estimate.world_size), (machine.host_memory, machine.storage)
        held = (
            f"{show(ranks * one, 'bytes')} of {show(all_, 'bytes')}" for one, all_ in zip(sums[1:], room, strict=True)
        )
        table.add_row(f"the {ranks} ranks of a host", "", *held)
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
    if line.host_step:
        table.add_row("step on the host", show(line.host_step, "seconds"))
        table.add_row("  not hidden", show(line.host_exposed, "seconds"))
    if line.copies:
        table.add_row("copies to and from the host", show(line.copies, "seconds"))
    if estimate.mfu is not None:
        table.add_row("MFU", show(estimate.mfu, "share"))
    written = f"checkpoint of {show(saved.whole, 'bytes')}, {show(saved.own, 'bytes')} by this rank"
    table.add_row(written, show(saved.seconds, "seconds"))
    yield table


def _sent(rows: Sequence[TrafficRow]) -> tuple[str, str, str]:
    inside, between = sum(row.inside for row in rows), sum(row.between for row in rows)
    return str(sum(row.calls for row in rows)), show(inside, "bytes"), show(between, "bytes")
