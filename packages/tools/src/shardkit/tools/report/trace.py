"""A report in the Trace Event Format that chrome://tracing and ui.perfetto.dev read.

One process for each rank, with threads for modules, gathers, reductions and waits, and a counter of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardkit.tools.report.schema import Rank, Report

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
