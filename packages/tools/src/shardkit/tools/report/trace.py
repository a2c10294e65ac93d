"""A report in the Trace Event Format that chrome://tracing and ui.perfetto.dev read.

One process for each rank, with threads for modules, gathers, reductions and waits, and a counter of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardkit.tools.report.schema import Rank, Report

__all__ = ["trace_json"]

_THREADS = ("steps", "modules", "all-gather", "reduce-scatter", "all-reduce", "waiting")


def trace_json(report: Report) -> str:
    """The trace as JSON text; times in microseconds, as the format wants them."""
    events = [event for rank in report.ranks for event in _of_rank(rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _of_rank(rank: Rank) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {pid} ({rank.place.host})"}}
    for tid, name in enumerate(_THREADS):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    for step in rank.steps:
        yield _slice(pid, "steps", f"step {step.index}", step.begin, step.end, {"exposed": step.exposed})
    for span in rank.spans:
        yield _slice(pid, "modules", f"{span.fqn or 'optimizer'} ({span.phase})", span.begin, span.end, {})
    for one in rank.operations:
        about = {"bytes": one.bytes, "wire_bytes": one.wire_bytes, "transport": one.transport, "exposed": one.exposed}
        yield _slice(pid, one.kind, f"{one.fqn} ({one.phase})", one.start, one.end, about)
        if one.exposed:
            name = f"{one.waited_by} waits for {one.kind} of {one.fqn}"
            yield _slice(pid, "waiting", name, max(one.start, one.end - one.exposed), one.end, {})
    for wait in rank.waits:
        name = f"{wait.module}: {wait.operation} of {wait.fqn}"
        yield _slice(pid, "waiting", name, wait.begin, wait.begin + wait.seconds, {})
    for category, series in rank.memory.categories.items():
        for time, value in zip(series.times, series.values, strict=True):
            yield {"ph": "C", "pid": pid, "name": f"memory: {category}", "ts": time * 1e6, "args": {"bytes": value}}


def _slice(pid: int, thread: str, name: str, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": _THREADS.index(thread),
        "name": name,
        "cat": thread,
        "ts": begin * 1e6,
        "dur": max(0.0, end - begin) * 1e6,
        "args": about,
    }
