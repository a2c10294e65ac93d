"""An estimate, and sweeps over settings of it, as tables for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardkit.tools.estimating.job import EstimateError, Policies
from shardkit.tools.estimating.result import Estimate, OwnerShares, TrafficRow
from shardkit.tools.estimating.trace import CATEGORIES
from shardkit.tools.files import InputError
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid, progress

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
    owners = () if estimate.owners is None else (_owners(estimate.owners),)
    for table in (_memory(estimate), _traffic(estimate), _times(estimate), *owners):
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


def _owners(shares: OwnerShares) -> Table:
    table = grid("parameters by rank of the shard group", "", title="placements")
    least, most = min(shares.bytes), max(shares.bytes)
    table.add_row(f"most, rank {shares.bytes.index(most)}", show(most, "bytes"))
    table.add_row("mean", show(sum(shares.bytes) / len(shares.bytes), "bytes"))
    table.add_row(f"least, rank {shares.bytes.index(least)}", show(least, "bytes"))
    table.add_row("work on owned matrices, largest over mean", f"{shares.imbalance:.3f}")
    table.add_row(f"optimizer of the slowest rank, {shares.slowest}", show(shares.optimizer_seconds, "seconds"))
    return table


DTYPES: Mapping[str, torch.dtype | None] = {
    "own": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

RESHARD: Mapping[str, bool | None] = {"default": None, "true": True, "false": False}

# Setting -> what it takes when the command line does not say.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "world-size": ("8", "16", "32", "64"),
    "reshard": ("true", "false"),
    "dtype": ("own", "bfloat16"),
    "prefetch": ("0", "1", "2"),
    "micro-batch": ("1", "2", "4"),
}


@dataclass(frozen=True)
class Point:
    """One combination of settings, and what it takes; None with the reason where it cannot be estimated."""

    settings: Mapping[str, str]
    estimate: Estimate | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The settings in words."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def settings_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`world-size=8,64`, or names alone (`dtype,prefetch`) for the usual values.

    Raises:
        EstimateError: for settings that there are not.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, given, values = text.partition("=")
        for one in [name] if given else name.split(","):
            if one not in SETTINGS:
                raise EstimateError(f"'{one}' cannot be swept; expected {', '.join(SETTINGS)}, with or without =VALUES")
            chosen[one] = tuple(values.split(",")) if given else SETTINGS[one]
    return chosen


def count_of(name: str, text: str, least: int) -> int:
    """A whole number from `least` on."""
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise EstimateError(f"{name} is '{text}'; expected a whole number from {least} on")
    return int(text)


def _dtype(text: str) -> torch.dtype | None:
    if text not in DTYPES:
        raise EstimateError(f"'{text}' is not a dtype to compute in; expected {', '.join(DTYPES)}")
    return DTYPES[text]


def changed(policies: Policies, settings: Mapping[str, str]) -> Policies:
    """The policies with settings that are given as texts.

    Raises:
        EstimateError: for a text that is no such setting.
    """
    changes: dict[str, Any] = {}
    if "reshard" in settings:
        text = settings["reshard"]
        changes["reshard_after_forward"] = RESHARD[text] if text in RESHARD else count_of("reshard", text, 1)
    for setting, name in (("dtype", "param_dtype"), ("reduce-dtype", "reduce_dtype")):
        if setting in settings:
            changes[name] = _dtype(settings[setting])
    if "prefetch" in settings:
        changes["prefetch_depth"] = count_of("prefetch", settings["prefetch"], 0)
    return replace(policies, **changes)


def sweep(values: Mapping[str, Sequence[str]], run: Callable[[Mapping[str, str]], Estimate]) -> list[Point]:
    """Estimates every combination of the values; one that fails says why in the table and does not end the others."""
    points = []
    total = math.prod(map(len, values.values()))
    with progress("estimating") as done:
        for number, combination in enumerate(itertools.product(*values.values())):
            done(number, total)
            settings = dict(zip(values, combination, strict=True))
            try:
                points.append(Point(settings, run(settings)))
            except InputError as error:
                points.append(Point(settings, None, str(error)))
    return points


def print_sweep(points: Sequence[Point], console: Console) -> None:
    """One line for each point, in the order of the sweep."""
    names = list(points[0].settings)
    table = grid(*names, "peak", "reserved", "fits", "sent", "step", "exposed", left=0)
    for point in points:
        found = point.estimate
        cells = ["-"] * 6
        if found is not None:
            sent = sum(row.inside + row.between for row in found.traffic)
            cells = [
                show(found.peak.bytes, "bytes"),
                show(found.reserved_bytes, "bytes"),
                "yes" if found.fits else "no",
            ]
            cells += [
                show(sent, "bytes"),
                show(found.timeline.step, "seconds"),
                show(found.timeline.exposed, "seconds"),
            ]
        table.add_row(*point.settings.values(), *cells)
    console.print(table)
    for point in points:
        if point.problem:
            console.print(f"{point.name}: {point.problem}")
