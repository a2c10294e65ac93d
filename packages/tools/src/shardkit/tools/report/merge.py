"""Merges the records of the ranks to the report of the run: one time, one list of groups, matched collectives."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.measures import meetings, waited_for_ranks
from shardkit.tools.report.schema import SCHEMA, VERSION, Collective, Estimate, Group, Operation, Rank, Report, Run

# Ranks whose starts differ by at most this many seconds came at the same time.
TOGETHER = 1e-4


def merge(records: Sequence[RankRecord], command: list[str] | None = None, estimate: Estimate | None = None) -> Report:
    """The report of a run, from the records of its ranks (of one version, at least one), in any order."""
    records = sorted(records, key=lambda record: record.rank.rank)
    # Containers of a host share its clock; other hosts are brought together by their wall clocks.
    several_hosts = len({record.rank.place.boot.partition("/")[0] for record in records}) > 1
    ahead = [record.wall if several_hosts else 0.0 for record in records]
    origin = min(record.rank.begin + offset for record, offset in zip(records, ahead, strict=True))
    groups, indices = _common_groups(records)
    ranks = [
        _moved(record.rank, offset - origin, index)
        for record, offset, index in zip(records, ahead, indices, strict=True)
    ]
    first = records[0].run
    run = dataclasses.replace(
        first,
        command=command or first.command,
        missing_ranks=sorted(set(range(first.world_size)) - {rank.rank for rank in ranks}),
        recorded_steps=min(record.run.recorded_steps for record in records),
        clock="wall" if several_hosts else "host",
    )
    collectives, notes = _collectives(ranks, groups, max(1, run.recorded_steps))
    notes = [*_notes(run, ranks), *notes]
    return Report(SCHEMA, VERSION, run, groups, ranks, collectives, notes, estimate)


def _common_groups(records: Sequence[RankRecord]) -> tuple[list[Group], list[dict[int, int]]]:
    """Each group once, and for each record the new index of each of its groups."""
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    indices = [
        {
            own: groups.setdefault((group.name, tuple(group.ranks)), len(groups))
            for own, group in enumerate(record.groups)
        }
        for record in records
    ]
    return [Group(name, list(ranks)) for name, ranks in groups], indices


_TIMES = ("begin", "end", "start", "peak_time", "times")


def _moved(value: Any, by: float, groups: dict[int, int]) -> Any:
    """A rank, or part of one, with its times shifted by `by` seconds and with the report's indices of groups."""
    if isinstance(value, list):
        return [_moved(one, by, groups) for one in value]
    if isinstance(value, dict):
        return {name: _moved(one, by, groups) for name, one in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if field.name in _TIMES:
            changes[field.name] = [time + by for time in found] if isinstance(found, list) else found + by
        elif field.name == "group":
            changes["group"] = groups[found]
        elif dataclasses.is_dataclass(found) or isinstance(found, list | dict):
            changes[field.name] = found if field.name == "values" else _moved(found, by, groups)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def _collectives(ranks: list[Rank], groups: list[Group], steps: int) -> tuple[list[Collective], list[str]]:
    alike: dict[tuple[str, str, str, int], list[dict[int, Operation]]] = defaultdict(list)
    notes: list[str] = []
    for (group, kind, number), meeting in sorted(meetings(ranks).items()):
        names = {one.fqn for one in meeting.values()}
        if len(names) > 1 and not notes:
            notes.append(
                f"the ranks of group {groups[group].ranks} did not run the same: {kind} number {number} was of "
                f"{', '.join(sorted(names))}; figures across ranks are not comparable from there on"
            )
        first = meeting[min(meeting)]
        alike[kind, first.fqn, first.phase, group].append(meeting)
    made = [_collective(found, len(groups[key[3]].ranks), steps) for key, found in alike.items()]
    return sorted(made, key=lambda one: -one.exposed), notes


def _collective(meetings: list[dict[int, Operation]], size: int, steps: int) -> Collective:
    of_first = list(meetings[0].values())
    first = of_first[0]
    exposed: dict[int, float] = defaultdict(float)
    skewed: dict[int, float] = defaultdict(float)
    waited_by: dict[str, float] = defaultdict(float)
    last: Counter[str] = Counter()
    skews, seconds = [], []
    for meeting in meetings:
        latest = max(meeting, key=lambda rank: meeting[rank].start)
        last_start = meeting[latest].start
        skews.append(last_start - min(one.start for one in meeting.values()))
        if skews[-1] >= TOGETHER:
            last[str(latest)] += 1
        for rank, one in meeting.items():
            exposed[rank] += one.exposed
            skewed[rank] += waited_for_ranks(one, last_start)
            if one.waited_by:
                waited_by[one.waited_by] += one.exposed
            # The transfer time of the data, on each rank that knows it.
            if one.moving > 0:
                seconds.append(one.moving)
            elif one.end_seen and one.end > last_start:
                seconds.append(one.end - last_start)
    worst = max(exposed, key=lambda rank: exposed[rank])
    algorithm = first.bytes / statistics.median(seconds) if seconds and first.bytes else None
    factor = (2 if first.kind == "all-reduce" else 1) * (size - 1) / size
    return Collective(
        kind=first.kind,
        fqn=first.fqn,
        phase=first.phase,
        group=first.group,
        transport=first.transport,
        dtype=first.dtype,
        count=len(meetings),
        bytes=first.bytes,
        wire_bytes=max(one.wire_bytes for one in of_first),
        padding_bytes=max(one.padding_bytes for one in of_first),
        exposed=exposed[worst] / steps,
        exposed_by_skew=skewed[worst] / steps,
        waited_by=max(waited_by, key=lambda name: waited_by[name], default=""),
        skew=statistics.fmean(skews),
        last=dict(last),
        algorithm_bandwidth=algorithm,
        bus_bandwidth=None if algorithm is None else algorithm * factor,
    )


def _notes(run: Run, ranks: list[Rank]) -> list[str]:
    notes = []
    if not run.recorded_steps:
        notes.append(
            "no whole step was recorded, so there are no figures of a step: the run ended within its warm-up, or no "
            "forward of a sharded model was heard"
        )
    if run.missing_ranks:
        notes.append(f"no record of ranks {', '.join(map(str, run.missing_ranks))}: they did not end their recording")
    if any(rank.truncated for rank in ranks):
        notes.append("some ranks recorded more than is kept; record fewer steps")
    if run.clock == "wall":
        notes.append("the ranks are on several hosts: times across them are as exact as their clocks agree")
    return notes
