"""What if: the same job with one setting after another changed, as a table and as a drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardkit.tools.estimating.job import EstimateError, Policies
from shardkit.tools.estimating.result import Estimate
from shardkit.tools.files import InputError
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid, progress

__all__ = ["DTYPES", "Point", "changed", "check_drawing", "count_of", "draw", "print_sweep", "settings_of", "sweep"]

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
            console.print(f"{', '.join(f'{name}={value}' for name, value in point.settings.items())}: {point.problem}")


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
