"""A report as one HTML page that needs nothing else: charts, filters and data are inside.

The charts are drawn by uPlot (MIT licence, in `assets/`). All data is embedded as JSON in which no character can end
the element that holds it, and the page puts it in place as text.
"""

from __future__ import annotations

import bisect
import json
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from shardkit.tools.quantities import show, show_bandwidth
from shardkit.tools.report.measures import (
    MEASURES,
    compare_with_estimate,
    exposed_by_rank,
    last_starts,
    lateness,
    owners,
    times_last,
    waited_for_ranks,
)
from shardkit.tools.report.schema import CATEGORIES, MemoryOfRank, Rank, Report, Series

_MOST_RANKS = 16
_MOST_MODULES = 12
_MOST_POINTS = 1500


def view_of(report: Report) -> dict[str, Any]:
    """A JSON-able summary. Of many ranks those that are shown one by one are chosen evenly, the notes say so."""
    shown = _chosen(report.ranks)
    notes = list(report.notes)
    if len(shown) < len(report.ranks):
        notes.append(f"this page shows {len(shown)} of {len(report.ranks)} ranks one by one; sums are of all of them")
    run = report.run
    return {
        "run": f"{run.world_size} ranks on {run.device} ({run.backend}), {run.recorded_steps} steps recorded, "
        f"{run.created}; shardkit {run.shardkit}, torch {run.torch}",
        "command": shlex.join(run.command),
        "notes": notes,
        "figures": [
            {"name": one.name, "value": show(one.of(report), one.unit), "meaning": one.meaning} for one in MEASURES
        ],
        "categories": list(CATEGORIES),
        "phases": sorted({one.phase for one in report.collectives}),
        "memory": [_memory_view(rank) for rank in shown],
        "exposed": _exposed_rows(report, shown),
        "ranks": _rank_rows(report, shown),
        "owners": _owner_rows(report),
        "predictions": _prediction_rows(report),
        "modules": _module_rows(report),
        "collectives": _collective_rows(report),
    }


def _chosen(ranks: list[Rank]) -> list[Rank]:
    if len(ranks) <= _MOST_RANKS:
        return ranks
    return [ranks[index * (len(ranks) - 1) // (_MOST_RANKS - 1)] for index in range(_MOST_RANKS)]


# -- memory ------------------------------------------------------------------------------------------------------------


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
    """Those modules that hold most, and the sum of the others."""
    by_peak = sorted(memory.modules, key=lambda name: -max(memory.modules[name].values, default=0))
    found = {name: _levels(memory.modules[name], times) for name in by_peak[:_MOST_MODULES]}
    rest = [_levels(memory.modules[name], times) for name in by_peak[_MOST_MODULES:]]
    if rest:
        found[f"({len(rest)} more)"] = [sum(levels) for levels in zip(*rest, strict=True)]
    return found


def _times(memory: MemoryOfRank) -> list[float]:
    """Moments at which some level changes; where there are too many, every so many of them, and always the peak."""
    times = sorted(
        {time for series in memory.categories.values() for time in series.times} | set(memory.resident.times)
    )
    stride = -(-len(times) // _MOST_POINTS)
    return sorted({*times[::stride], *times[-1:], *(time for time in times if time == memory.peak_time)})


def _levels(series: Series, times: list[float]) -> list[int]:
    """The level at each of `times`, 0 before the first that is known."""
    positions = (bisect.bisect_right(series.times, time) for time in times)
    return [series.values[position - 1] if position else 0 for position in positions]


# -- communication -----------------------------------------------------------------------------------------------------


def _exposed_rows(report: Report, shown: list[Rank]) -> list[dict[str, Any]]:
    """Seconds a step that each module of each rank waited, by phase."""
    starts = last_starts(report.ranks)
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank in shown:
        steps = max(1, len(rank.steps))
        for one in rank.operations:
            if one.exposed:
                skew = waited_for_ranks(one, starts[one.group, one.kind, one.number])
                sums[rank.rank, one.waited_by, one.phase][0] += one.exposed / steps
                sums[rank.rank, one.waited_by, one.phase][1] += skew / steps
        for wait in rank.waits:
            sums[rank.rank, wait.module, wait.phase][0] += wait.seconds / steps
    return [
        {"rank": rank, "module": module, "phase": phase, "seconds": seconds, "skew": skew}
        for (rank, module, phase), (seconds, skew) in sums.items()
    ]


def _collective_rows(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "fqn": one.fqn,
            "kind": one.kind,
            "phase": one.phase,
            "waited_by": one.waited_by,
            "per_step": f"{one.count / max(1, report.run.recorded_steps):.3g}",
            "bytes": one.bytes,
            "wire_bytes": one.wire_bytes,
            "exposed": one.exposed,
            "skew": one.exposed_by_skew,
            "bandwidth": show_bandwidth(one.bus_bandwidth),
            "transport": one.transport,
        }
        for one in report.collectives
    ]


# -- ranks, modules, estimate ------------------------------------------------------------------------------------------


def _rank_rows(report: Report, shown: list[Rank]) -> list[dict[str, Any]]:
    late, last, exposed = lateness(report), times_last(report), exposed_by_rank(report)
    return [
        {
            "rank": rank.rank,
            "host": rank.place.host,
            "steps": [step.end - step.begin for step in rank.steps],
            "step": statistics.median([step.end - step.begin for step in rank.steps] or [0.0]),
            "exposed": exposed[rank.rank],
            "peak": rank.memory.peak,
            "last": last[rank.rank],
            "late": late[rank.rank],
            "overhead": show(rank.overhead.share, "share"),
        }
        for rank in shown
    ]


def _owner_rows(report: Report) -> list[dict[str, Any]]:
    """What those ranks own whose optimizers take longest, against the mean of all ranks."""
    found = sorted(owners(report), key=lambda one: -one.optimizer)
    bytes_mean = statistics.fmean(one.bytes for one in found) if found else 0.0
    seconds_mean = statistics.fmean(one.optimizer for one in found) if found else 0.0
    return [
        {
            "rank": one.rank,
            "bytes": one.bytes,
            "over": show(one.bytes / bytes_mean - 1 if bytes_mean else 0.0, "share"),
            "optimizer": one.optimizer,
            "slower": show(one.optimizer / seconds_mean - 1 if seconds_mean else 0.0, "share"),
            "owned": [{"fqn": fqn, "bytes": size} for fqn, size in one.owned.items()],
        }
        for one in found[:_MOST_RANKS]
    ]


def _module_rows(report: Report) -> list[dict[str, Any]]:
    """Every module once: prefetches of the first rank, peaks of the rank that had most."""
    names = dict.fromkeys(module.fqn for rank in report.ranks for module in rank.modules)
    found = {name: [one for rank in report.ranks for one in rank.modules if one.fqn == name] for name in names}
    return [
        {
            "fqn": name,
            "hits": modules[0].prefetch_hits,
            "misses": modules[0].prefetch_misses,
            "unsharded": max(one.unsharded_peak for one in modules),
            "gradients": max(one.gradients_peak for one in modules),
            "communication": max(one.communication_peak for one in modules),
            "activations": max(one.activations_peak for one in modules),
        }
        for name, modules in found.items()
    ]


def _prediction_rows(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name.replace("_", " "),
            "predicted": show(one.predicted, one.unit),
            "measured": show(one.measured, one.unit),
            "error": "-" if one.error is None else f"{one.error:+.1%}",
            "bars": [value / (max(one.predicted, one.measured) or 1) for value in (one.predicted, one.measured)],
        }
        for one in compare_with_estimate(report)
    ]


_DANGEROUS = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(report: Report) -> str:
    """The page's text."""
    parts = {
        "chart-css": _asset("uPlot.min.css"),
        "page-css": _asset("page.css"),
        "chart-js": f"/*\n{_asset('uPlot.LICENSE')}*/\n{_asset('uPlot.iife.min.js')}",
        "page-js": _asset("page.js"),
        "data": embedded(json.dumps(view_of(report), allow_nan=False, separators=(",", ":"))),
    }
    before, *rest = _asset("page.html").split("/*{")
    pieces = [before]
    for piece in rest:
        name, after = piece.split("}*/", 1)
        pieces += [parts[name], after]
    return "".join(pieces)


def embedded(text: str) -> str:
    """JSON text that may stand inside a `script` element."""
    for character, escape in _DANGEROUS.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return files("shardkit.tools.report").joinpath("assets", name).read_text(encoding="utf-8")


_THREADS = ("steps", "modules", "all-gather", "reduce-scatter", "all-reduce", "waiting")
# Slices of one thread must not overlap, and several gathers may be under way: each takes a free thread of its kind.
_AT_ONCE = 8


def trace_json(report: Report) -> str:
    """The trace as JSON text; times in microseconds, as the format wants them."""
    events = [event for rank in report.ranks for event in _of_rank(rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _of_rank(rank: Rank) -> Iterator[dict[str, Any]]:
    pid, threads = rank.rank, _Threads()
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {pid} ({rank.place.host})"}}
    for step in rank.steps:
        yield _slice(pid, threads, "steps", f"step {step.index}", (step.begin, step.end), {"exposed": step.exposed})
    for span in rank.spans:
        yield _slice(pid, threads, "modules", f"{span.fqn or 'optimizer'} ({span.phase})", (span.begin, span.end), {})
    for one in sorted(rank.operations, key=lambda one: one.start):
        about = {"bytes": one.bytes, "wire_bytes": one.wire_bytes, "transport": one.transport, "exposed": one.exposed}
        yield _slice(pid, threads, one.kind, f"{one.fqn} ({one.phase})", (one.start, one.end), about)
        if one.exposed:
            name = f"{one.waited_by} waits for {one.kind} of {one.fqn}"
            yield _slice(pid, threads, "waiting", name, (max(one.start, one.end - one.exposed), one.end), {})
    for wait in rank.waits:
        name = f"{wait.module}: {wait.operation} of {wait.fqn}"
        yield _slice(pid, threads, "waiting", name, (wait.begin, wait.begin + wait.seconds), {})
    for category, series in rank.memory.categories.items():
        for time, value in zip(series.times, series.values, strict=True):
            yield {"ph": "C", "pid": pid, "name": f"memory: {category}", "ts": time * 1e6, "args": {"bytes": value}}
    for tid, name in threads.names():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


class _Threads:
    """The threads of a rank, by kind, and until when each is taken."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {kind: [] for kind in _THREADS}

    def take(self, kind: str, begin: float, end: float) -> int:
        """A thread of a kind that is free from `begin` on; slices of modules and steps nest, and share theirs."""
        taken = self._taken[kind]
        free = 0 if kind in ("steps", "modules") else next((i for i, until in enumerate(taken) if until <= begin), None)
        number = min(len(taken) if free is None else free, _AT_ONCE - 1)
        if number == len(taken):
            taken.append(end)
        taken[number] = max(taken[number], end)
        return _THREADS.index(kind) * _AT_ONCE + number

    def names(self) -> Iterator[tuple[int, str]]:
        """Number and name of each thread."""
        for index, kind in enumerate(_THREADS):
            for number in range(max(1, len(self._taken[kind]))):
                yield index * _AT_ONCE + number, f"{kind} {number + 1}" if number else kind


def _slice(
    pid: int, threads: _Threads, kind: str, name: str, extent: tuple[float, float], about: dict[str, Any]
) -> dict[str, Any]:
    begin, end = extent
    return {
        "ph": "X",
        "pid": pid,
        "tid": threads.take(kind, begin, end),
        "name": name,
        "cat": kind,
        "ts": begin * 1e6,
        "dur": max(0.0, end - begin) * 1e6,
        "args": about,
    }
