"""Merges the records of the ranks to the report of the run: one clock, one list of groups, matched collectives."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.measures import meetings, waited_for_ranks
from shardkit.tools.report.schema import SCHEMA, VERSION, Collective, Estimate, Group, Operation, Rank, Report, Run

# Others may end on a rank that needs nothing from the last one to start.
_KINDS = ("all-gather", "all-reduce")


@dataclass(frozen=True)
class Clocks:
    """Offsets that convert the times of records to one clock.

    Attributes:
        ahead: the offset to add to the times of each record, in their order.
        several_hosts: whether wall clocks were needed.
        moved: the largest correction of a clock, in seconds.
        room: the seconds by which two clocks may still differ; infinite if collectives do not connect all of them.
        contradicted: whether no offsets agree with all collectives, because a clock runs at another speed or was set;
            then none is corrected.
    """

    ahead: list[float]
    several_hosts: bool = False
    moved: float = 0.0
    room: float = math.inf
    contradicted: bool = False


def common_clock(records: Sequence[RankRecord]) -> Clocks:
    """The common clock of all records: the host's own if there is one host."""
    hosts = [record.rank.place.boot.partition("/")[0] for record in records]  # containers of a host share its clock
    if len(set(hosts)) == 1:
        return Clocks([0.0] * len(records))
    walls: dict[str, float] = {}
    for host, record in zip(hosts, records, strict=True):
        walls.setdefault(host, record.wall)
    most = _closed(_most_ahead(records, hosts, walls), list(walls))
    if most is None:
        return Clocks([walls[host] for host in hosts], several_hosts=True, contradicted=True)
    corrections: dict[str, float] = {}
    for host in walls:
        least = max((placed - most[host, other] for other, placed in corrections.items()), default=0.0)
        largest = min((placed + most[other, host] for other, placed in corrections.items()), default=0.0)
        corrections[host] = min(max(0.0, least), largest)
    return Clocks(
        [walls[host] + corrections[host] for host in hosts],
        several_hosts=True,
        moved=max(map(abs, corrections.values())),
        room=max((most[first, second] + most[second, first] for first, second in combinations(walls, 2)), default=0.0),
    )


def _closed(most: dict[tuple[str, str], float], hosts: Sequence[str]) -> dict[tuple[str, str], float] | None:
    """Bounds for all pairs, through other hosts where that is tighter; None if they contradict each other.

    These are shortest paths (Floyd-Warshall). An offset that satisfies all hosts placed so far then leaves a possible
    one for the next host.
    """
    closed = {pair: 0.0 if pair[0] == pair[1] else most.get(pair, math.inf) for pair in product(hosts, hosts)}
    for via in hosts:
        for first, second in product(hosts, hosts):
            closed[first, second] = min(closed[first, second], closed[first, via] + closed[via, second])
        if any(closed[host, host] < 0 for host in hosts):
            return None
    return closed


def _most_ahead(
    records: Sequence[RankRecord], hosts: Sequence[str], walls: dict[str, float]
) -> dict[tuple[str, str], float]:
    """By pairs of hosts: how far the second's wall clock may be moved ahead of the first's, in seconds.

    An operation ends on the first host after all ranks have started it, including those of the second.
    """
    found: dict[tuple[str, tuple[int, ...], str, int], list[tuple[str, Operation]]] = defaultdict(list)
    for host, record in zip(hosts, records, strict=True):
        for one in record.rank.operations:
            if one.kind in _KINDS:
                group = record.groups[one.group]
                found[group.name, tuple(group.ranks), one.kind, one.number].append((host, one))
    most: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for meeting in found.values():
        if not all(one.wire_bytes for _, one in meeting):  # nobody waits for a rank that sends nothing
            continue
        starts: dict[str, float] = defaultdict(lambda: -math.inf)
        ends: dict[str, float] = defaultdict(lambda: math.inf)
        for host, one in meeting:
            starts[host] = max(starts[host], one.start + walls[host])
            ends[host] = min(ends[host], one.end + walls[host])
        for first, end in ends.items():
            for second, start in starts.items():
                if first != second:
                    most[first, second] = min(most[first, second], end - start)
    return dict(most)


# Ranks whose starts differ by at most this many seconds came at the same time.
TOGETHER = 1e-4


def merge(records: Sequence[RankRecord], command: list[str] | None = None, estimate: Estimate | None = None) -> Report:
    """The report of a run, from the records of its ranks (of one version, at least one), in any order."""
    records = sorted(records, key=lambda record: record.rank.rank)
    clocks = common_clock(records)
    origin = min(record.rank.begin + offset for record, offset in zip(records, clocks.ahead, strict=True))
    groups, indices = _common_groups(records)
    ranks = [
        _moved(record.rank, offset - origin, index)
        for record, offset, index in zip(records, clocks.ahead, indices, strict=True)
    ]
    first = records[0].run
    run = dataclasses.replace(
        first,
        command=command or first.command,
        missing_ranks=sorted(set(range(first.world_size)) - {rank.rank for rank in ranks}),
        recorded_steps=min(record.run.recorded_steps for record in records),
        clock="wall" if clocks.several_hosts else "host",
    )
    collectives, notes = _collectives(ranks, groups, max(1, run.recorded_steps))
    notes = [*_notes(run, ranks), *_notes_on(clocks), *notes]
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
    return notes


def _notes_on(clocks: Clocks) -> list[str]:
    if not clocks.several_hosts:
        return []
    note = "the ranks are on several hosts: "
    if clocks.contradicted:
        note += "no clocks agree with all collectives (one runs at another speed, or was set), so none was moved; "
        return [f"{note}times across hosts are as exact as their clocks agree"]
    if clocks.moved:
        note += f"their clocks were moved by up to {clocks.moved * 1e3:.1f} ms, as no collective ends before its last "
        note += "rank has started it; "
    if clocks.room == math.inf:
        return [f"{note}times across {'some of ' if clocks.moved else ''}them are as exact as their clocks agree"]
    if not clocks.moved:
        note += "no collective contradicts their clocks; "
    return [f"{note}times across hosts may still be wrong by up to {clocks.room * 1e3:.1f} ms"]
