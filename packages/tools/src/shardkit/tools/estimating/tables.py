"""Estimates and sweeps as tables for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardkit.tools.estimating.job import EstimateError, Policies
from shardkit.tools.estimating.memory import CATEGORIES
from shardkit.tools.estimating.result import Estimate, TrafficRow
from shardkit.tools.machine import MachineError

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


def reshard_of(text: str) -> bool | int | None:
    """true, false, default, or a number of ranks."""
    if text in RESHARD:
        return RESHARD[text]
    if text.isdigit():
        return int(text)
    raise EstimateError(f"'{text}' is no reshard policy; expected true, false, default or a number of ranks")


def dtype_of(text: str) -> torch.dtype | None:
    """A dtype by its name; `own` leaves parameters what they are."""
    if text not in DTYPES:
        raise EstimateError(f"'{text}' is no dtype to compute in; expected {', '.join(DTYPES)}")
    return DTYPES[text]


def number_of(name: str, text: str, least: int) -> int:
    """A whole number from `least` on."""
    if not text.isdigit() or int(text) < least:
        raise EstimateError(f"{name}={text}; expected a whole number from {least} on")
    return int(text)


def changed(policies: Policies, settings: Mapping[str, str]) -> Policies:
    """The policies with the settings of one point."""
    if "reshard" in settings:
        policies = replace(policies, reshard_after_forward=reshard_of(settings["reshard"]))
    if "dtype" in settings:
        policies = replace(policies, param_dtype=dtype_of(settings["dtype"]))
    if "prefetch" in settings:
        policies = replace(policies, prefetch_depth=number_of("prefetch", settings["prefetch"], 0))
    return policies


def sweep(
    values: Mapping[str, Sequence[str]], run: Callable[[Mapping[str, str]], Estimate], console: Console
) -> list[Point]:
    """Runs every combination of the values; one that fails is reported and does not end the others."""
    points = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        try:
            points.append(Point(settings, run(settings)))
        except (EstimateError, MachineError) as error:
            points.append(Point(settings, None, str(error)))
            console.print(f"{settings}: {error}", markup=False)
    return points


def print_sweep(points: Sequence[Point], console: Console) -> None:
    """One line for each point, in the order of the sweep."""
    table = Table(box=None, pad_edge=False)
    names = list(points[0].settings)
    for name in (*names, "peak", "reserved", "fits", "sent", "step", "exposed"):
        table.add_column(name, justify="right")
    for point in points:
        found = point.estimate
        cells: list[str] = ["-"] * 6
        if found is not None:
            sent = sum(row.inside + row.between for row in found.traffic)
            line = found.timeline
            fits = "yes" if found.fits else "no"
            cells = [
                size(found.peak.bytes),
                size(found.reserved_bytes),
                fits,
                size(sent),
                time(line.step),
                time(line.exposed),
            ]
        table.add_row(*point.settings.values(), *cells)
    console.print(table)


def check_drawing(path: Path) -> None:
    """Before minutes of work: whether `draw` can write this file.

    Raises:
        EstimateError: without matplotlib, or for a suffix that it does not know.
    """
    known = _figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise EstimateError(f"{path}: there are no drawings of this kind; expected one of {', '.join(sorted(known))}")


def _figure(**layout: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EstimateError("drawings need matplotlib; install shardkit-tools[plot]") from error
    return Figure(**layout)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draws memory by category and step time of each point to an image file (needs matplotlib).

    Raises:
        EstimateError: without matplotlib.
    """
    shown = [(point, point.estimate) for point in points if point.estimate is not None]
    labels = ["\n".join(f"{name} {value}" for name, value in point.settings.items()) for point, _ in shown]
    figure = _figure(figsize=(max(6.0, 1.1 * len(shown) + 2), 7.0), layout="constrained")
    memory, times = figure.subplots(2, 1)
    _stack(memory, labels, [_gibibytes(found) for _, found in shown], "GiB of tensors at the peak")
    _stack(times, labels, [_milliseconds(found) for _, found in shown], "ms of a step")
    figure.savefig(path)


def _gibibytes(estimate: Estimate) -> dict[str, float]:
    return {name.replace("_", " "): nbytes / 2**30 for name, nbytes in estimate.peak.by_category.items()}


def _milliseconds(estimate: Estimate) -> dict[str, float]:
    line = estimate.timeline
    return {"computation": line.compute * 1e3, "exposed communication": line.exposed * 1e3}


def _stack(axes: Any, labels: list[str], parts: list[dict[str, float]], title: str) -> None:
    below = [0.0] * len(labels)
    for name in parts[0] if parts else ():
        heights = [one[name] for one in parts]
        axes.bar(range(len(labels)), heights, bottom=below, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(title)
    axes.legend(fontsize=8)
