"""A report as one self-contained HTML page with charts, filters and data.

The charts are drawn by uPlot (MIT licence, in `assets/`). All data is embedded as JSON without characters that could
end its element, and the page inserts it as text.
"""

from __future__ import annotations

import bisect
import json
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from shardkit.tools.quantities import show
from shardkit.tools.report.measures import (
    MEASURES,
    Owner,
    exposed_by_rank,
    lateness,
    meetings,
    owners,
    times_last,
    waited_for_ranks,
)
from shardkit.tools.report.schema import CATEGORIES, MemoryOfRank, ModuleOfRank, Rank, Report, Series

_MOST_RANKS = 16
_MOST_MODULES = 12
_MOST_POINTS = 1500


def view_of(report: Report) -> dict[str, Any]:
    """A JSON-able summary. If there are many ranks, evenly chosen ones are shown, and the notes say so."""
    shown, notes, last = report.ranks, list(report.notes), len(report.ranks) - 1
    if len(shown) > _MOST_RANKS:
        shown = [report.ranks[index * last // (_MOST_RANKS - 1)] for index in range(_MOST_RANKS)]
        notes.append(f"this page shows {len(shown)} of {len(report.ranks)} ranks one by one; sums are of all of them")
    run, late = report.run, lateness(report)
    owning = sorted(owners(report), key=lambda one: -one.optimizer)
    return {
        "run": f"{title_of(report)}; shardkit {run.shardkit}, torch {run.torch}",
        "command": shlex.join(run.command),
        "notes": notes,
        "figures": [
            {"name": one.name, "value": show(one.of(report), one.unit), "meaning": one.meaning} for one in MEASURES
        ],
        "phases": sorted({one.phase for one in report.collectives}),
        "memory": [_memory_view(rank) for rank in shown],
        "exposed": _exposed_rows(report, shown),
        "steps": [[step.end - step.begin for step in rank.steps] for rank in shown],
        "lateness": [late[rank.rank] for rank in shown],
        "ranks": rank_rows(report, shown),
        "owners": owner_rows(owning)[:_MOST_RANKS],
        "owned": [
            [{"parameter": fqn, "bytes": show(size, "bytes")} for fqn, size in one.owned.items()]
            for one in owning[:_MOST_RANKS]
        ],
        "predictions": [row | {"figure": row["figure"].replace("_", " ")} for row in prediction_rows(report)],
        "modules": _module_rows(report),
        "collectives": collective_rows(report),
    }


def title_of(report: Report) -> str:
    run = report.run
    return f"{run.world_size} ranks on {run.device} ({run.backend}), {run.recorded_steps} steps recorded, {run.created}"


# -- rows of the page and of the output of `shardkit report`, as text by column ----------------------------------------


def rank_rows(report: Report, shown: list[Rank]) -> list[dict[str, str]]:
    late, last, exposed = lateness(report), times_last(report), exposed_by_rank(report)
    return [
        {
            "rank": str(rank.rank),
            "host": rank.place.host,
            "step": show(statistics.median([step.end - step.begin for step in rank.steps] or [0.0]), "seconds"),
            "exposed": show(exposed[rank.rank], "seconds"),
            "peak memory": show(rank.memory.peak, "bytes"),
            "came last": str(last[rank.rank]),
            "late by": show(late[rank.rank], "seconds"),
            "profiler": show(rank.overhead.share, "share"),
        }
        for rank in shown
    ]


def owner_rows(everyone: list[Owner]) -> list[dict[str, str]]:
    """The parameters that each rank owns and its optimizer time, compared with the mean of all ranks."""
    bytes_mean = statistics.fmean(one.bytes for one in everyone) if everyone else 0.0
    seconds_mean = statistics.fmean(one.optimizer for one in everyone) if everyone else 0.0
    return [
        {
            "rank": str(one.rank),
            "owned": show(one.bytes, "bytes"),
            "over the mean": show(one.bytes / bytes_mean - 1 if bytes_mean else 0.0, "share"),
            "optimizer": show(one.optimizer, "seconds"),
            "slower than the mean": show(one.optimizer / seconds_mean - 1 if seconds_mean else 0.0, "share"),
            "parameters": str(len(one.owned)),
            "largest": next(iter(one.owned), "-"),
        }
        for one in everyone
    ]


def collective_rows(report: Report) -> list[dict[str, str]]:
    return [
        {
            "of": one.fqn,
            "what": one.kind,
            "phase": one.phase,
            "a step": f"{one.count / max(1, report.run.recorded_steps):.3g}",
            "bytes": show(one.bytes, "bytes"),
            "on the wire": show(one.wire_bytes, "bytes"),
            "exposed": show(one.exposed, "seconds"),
            "of it skew": show(one.exposed_by_skew, "seconds"),
            "waited by": one.waited_by,
            "bus bandwidth": "-" if one.bus_bandwidth is None else f"{one.bus_bandwidth / 1e9:.2f} GB/s",
            "through": one.transport,
        }
        for one in report.collectives
    ]


def prediction_rows(report: Report) -> list[dict[str, Any]]:
    """Predictions beside measurements; empty without an estimate."""
    estimate = report.estimate
    if estimate is None:
        return []
    at_peak = max(report.ranks, key=lambda rank: rank.memory.peak).memory.peak_categories
    figures = [(one.name, one.unit, getattr(estimate, one.name, None), one.of(report)) for one in MEASURES]
    for name, size in estimate.categories.items():
        if name in CATEGORIES:  # inputs are predicted, but not measured
            figures.append((f"at the peak: {name}", "bytes", size, at_peak[name]))
    return [
        {
            "figure": name,
            "predicted": show(predicted, unit),
            "measured": show(measured, unit),
            "error": f"{(predicted - measured) / measured:+.1%}" if measured else "-" if predicted else "+0.0%",
            "bars": [value / (max(predicted, measured) or 1) for value in (predicted, measured)],
        }
        for name, unit, predicted, measured in figures
        if predicted is not None
    ]


# -- what only the page shows ------------------------------------------------------------------------------------------


def _exposed_rows(report: Report, shown: list[Rank]) -> list[dict[str, Any]]:
    """Seconds per step that each module of each rank waited, by phase."""
    met = meetings(report.ranks).items()
    last_starts = {key: max(one.start for one in meeting.values()) for key, meeting in met}
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank in shown:
        steps = max(1, len(rank.steps))
        for one in rank.operations:
            if one.exposed:
                skew = waited_for_ranks(one, last_starts[one.group, one.kind, one.number])
                sums[rank.rank, one.waited_by, one.phase][0] += one.exposed / steps
                sums[rank.rank, one.waited_by, one.phase][1] += skew / steps
        for wait in rank.waits:
            sums[rank.rank, wait.module, wait.phase][0] += wait.seconds / steps
    return [
        {"rank": rank, "module": module, "phase": phase, "seconds": seconds, "skew": skew}
        for (rank, module, phase), (seconds, skew) in sums.items()
    ]


def _module_rows(report: Report) -> list[dict[str, str]]:
    """Each module once: prefetches of the first rank, peaks of the rank with the most memory."""
    found: dict[str, list[ModuleOfRank]] = defaultdict(list)
    for rank in report.ranks:
        for module in rank.modules:
            found[module.fqn].append(module)
    return [
        {
            "module": name,
            "prefetch hits": str(modules[0].prefetch_hits),
            "misses": str(modules[0].prefetch_misses),
            "unsharded peak": show(max(one.unsharded_peak for one in modules), "bytes"),
            "gradients": show(max(one.gradients_peak for one in modules), "bytes"),
            "communication": show(max(one.communication_peak for one in modules), "bytes"),
            "activations": show(max(one.activations_peak for one in modules), "bytes"),
        }
        for name, modules in found.items()
    ]


def _memory_view(rank: Rank) -> dict[str, Any]:
    memory = rank.memory
    times = _times(memory)
    made_of = ", ".join(
        f"{name.replace('_', ' ')} {show(size, 'bytes')}" for name, size in memory.peak_categories.items() if size
    )
    return {
        "rank": rank.rank,
        "times": times,
        "categories": {name: _levels(memory.categories[name], times) for name in CATEGORIES},
        "modules": _modules_over_time(memory, times),
        "resident": _levels(memory.resident, times),
        "peak": f"Peak of rank {rank.rank}: {show(memory.peak, 'bytes')} after {show(memory.peak_time, 'seconds')}, in "
        f"{memory.peak_phase} of {memory.peak_module}: {made_of}.",
    }


def _modules_over_time(memory: MemoryOfRank, times: list[float]) -> dict[str, list[int]]:
    """The modules that hold most, and the sum of the others."""
    by_peak = sorted(memory.modules, key=lambda name: -max(memory.modules[name].values, default=0))
    found = {name: _levels(memory.modules[name], times) for name in by_peak[:_MOST_MODULES]}
    rest = [_levels(memory.modules[name], times) for name in by_peak[_MOST_MODULES:]]
    if rest:
        found[f"({len(rest)} more)"] = [sum(levels) for levels in zip(*rest, strict=True)]
    return found


def _times(memory: MemoryOfRank) -> list[float]:
    """Times at which a level changes; if there are too many, a selection that includes the peak."""
    times = sorted(
        {time for series in memory.categories.values() for time in series.times} | set(memory.resident.times)
    )
    stride = -(-len(times) // _MOST_POINTS)
    return sorted({*times[::stride], *times[-1:], *(time for time in times if time == memory.peak_time)})


def _levels(series: Series, times: list[float]) -> list[int]:
    """The level at each of `times`, 0 before the first known one."""
    positions = (bisect.bisect_right(series.times, time) for time in times)
    return [series.values[position - 1] if position else 0 for position in positions]


# JSON text without these may stand inside a `script` element.
_DANGEROUS = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(report: Report) -> str:
    parts = {
        "chart-css": _asset("uPlot.min.css"),
        "page-css": _asset("page.css"),
        "chart-js": f"/*\n{_asset('uPlot.LICENSE')}*/\n{_asset('uPlot.iife.min.js')}",
        "page-js": _asset("page.js"),
        "data": json.dumps(view_of(report), allow_nan=False, separators=(",", ":")).translate(_DANGEROUS),
    }
    return re.sub(r"/\*\{([\w-]+)\}\*/", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("shardkit.tools.report").joinpath("assets", name).read_text(encoding="utf-8")


_THREADS = ("steps", "modules", "all-gather", "reduce-scatter", "all-reduce", "waiting")
# Slices of one thread must not overlap, and several gathers may be in flight: each uses a free thread of its kind.
_AT_ONCE = 8


def trace_json(report: Report) -> str:
    """The trace as JSON text; times in microseconds, as the format requires."""
    events = [event for rank in report.ranks for event in _of_rank(rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _of_rank(rank: Rank) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    taken: dict[str, list[float]] = {kind: [] for kind in _THREADS}  # end time of the last slice of each thread

    def piece(kind: str, name: str, begin: float, end: float, **about: Any) -> dict[str, Any]:
        """A slice, on a free thread of its kind; slices of modules and steps nest, and share one."""
        until = taken[kind]
        free = (number for number, then in enumerate(until) if then <= begin)
        number = min(0 if kind in ("steps", "modules") else next(free, len(until)), _AT_ONCE - 1)
        if number == len(until):
            until.append(end)
        until[number] = max(until[number], end)
        tid, ts, dur = _THREADS.index(kind) * _AT_ONCE + number, begin * 1e6, max(0.0, end - begin) * 1e6
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": ts, "dur": dur, "args": about}

    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {pid} ({rank.place.host})"}}
    for step in rank.steps:
        yield piece("steps", f"step {step.index}", step.begin, step.end, exposed=step.exposed)
    for span in rank.spans:
        yield piece("modules", f"{span.fqn or 'optimizer'} ({span.phase})", span.begin, span.end)
    for one in sorted(rank.operations, key=lambda one: one.start):
        about = {"bytes": one.bytes, "wire_bytes": one.wire_bytes, "transport": one.transport, "exposed": one.exposed}
        yield piece(one.kind, f"{one.fqn} ({one.phase})", one.start, one.end, **about)
        if one.exposed:
            name = f"{one.waited_by} waits for {one.kind} of {one.fqn}"
            yield piece("waiting", name, max(one.start, one.end - one.exposed), one.end)
    for wait in rank.waits:
        name = f"{wait.module}: {wait.operation} of {wait.fqn}"
        yield piece("waiting", name, wait.begin, wait.begin + wait.seconds)
    for category, series in rank.memory.categories.items():
        for time, value in zip(series.times, series.values, strict=True):
            yield {"ph": "C", "pid": pid, "name": f"memory: {category}", "ts": time * 1e6, "args": {"bytes": value}}
    for index, kind in enumerate(_THREADS):
        for number in range(max(1, len(taken[kind]))):
            tid, name = index * _AT_ONCE + number, f"{kind} {number + 1}" if number else kind
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
