"""From the records of the ranks to the report of the run: one clock, one list of groups, collectives side by side."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeVar

from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.measures import waited_for_ranks
from shardkit.tools.report.schema import (
    SCHEMA,
    VERSION,
    Collective,
    Estimate,
    Group,
    MemoryOfRank,
    Operation,
    Rank,
    Report,
    Run,
    Series,
    Span,
    Step,
    Wait,
)

# Others may end on a rank that needs nothing of the one that starts last.
_KINDS = ("all-gather", "all-reduce")


@dataclass(frozen=True)
class Clocks:
    """How the times of records become those of one clock.

    Attributes:
        ahead: what to add to the times of each record, in their order.
        several_hosts: whether wall clocks were needed.
        moved: by how many seconds the farthest of them was moved.
        room: by how many seconds two clocks may still disagree; infinite if collectives do not tell of all of them.
        contradicted: whether no clocks agree with all collectives, as one runs at another speed, or was set; none is
            moved then.
    """

    ahead: list[float]
    several_hosts: bool = False
    moved: float = 0.0
    room: float = math.inf
    contradicted: bool = False


def common_clock(records: Sequence[RankRecord]) -> Clocks:
    """The clock of all records: the host's own where there is one host."""
    hosts = [record.rank.place.boot or f"rank {record.rank.rank}" for record in records]
    if len(set(hosts)) == 1 and records[0].rank.place.boot:
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
    """The bounds for all pairs, by way of other hosts where that is less; None if they contradict each other.

    These are shortest paths (Floyd-Warshall). Whatever holds against the hosts that are placed then leaves room for the
    next one.
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

    Something ends on the first when all ranks have started it, those of the second among them.
    """
    meetings: dict[tuple[str, tuple[int, ...], str, int], list[tuple[str, Operation]]] = defaultdict(list)
    for host, record in zip(hosts, records, strict=True):
        for one in record.rank.operations:
            if one.kind in _KINDS:
                group = record.groups[one.group]
                meetings[group.name, tuple(group.ranks), one.kind, one.number].append((host, one))
    most: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for found in meetings.values():
        if not all(one.wire_bytes for _, one in found):  # nobody waits for a rank that has nothing to send
            continue
        starts: dict[str, float] = defaultdict(lambda: -math.inf)
        ends: dict[str, float] = defaultdict(lambda: math.inf)
        for host, one in found:
            starts[host] = max(starts[host], one.start + walls[host])
            ends[host] = min(ends[host], one.end + walls[host])
        for first, end in ends.items():
            for second, start in starts.items():
                if first != second:
                    most[first, second] = min(most[first, second], end - start)
    return dict(most)


# Ranks that start a collective within this many seconds of each other came at the same time.
_TOGETHER = 1e-4

_Timed = TypeVar("_Timed", Step, Operation, Wait, Span)


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
    """Every group once, and for each record the index that each of its groups has among them."""
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    indices = [
        {
            own: groups.setdefault((group.name, tuple(group.ranks)), len(groups))
            for own, group in enumerate(record.groups)
        }
        for record in records
    ]
    return [Group(name, list(ranks)) for name, ranks in groups], indices


# -- one clock ---------------------------------------------------------------------------------------------------------


def _moved(rank: Rank, by: float, groups: dict[int, int]) -> Rank:
    return dataclasses.replace(
        rank,
        begin=rank.begin + by,
        end=rank.end + by,
        steps=[_shifted(one, by, "begin", "end") for one in rank.steps],
        operations=[
            dataclasses.replace(_shifted(one, by, "start", "end"), group=groups[one.group]) for one in rank.operations
        ],
        waits=[_shifted(one, by, "begin") for one in rank.waits],
        spans=[_shifted(one, by, "begin", "end") for one in rank.spans],
        memory=_shifted_memory(rank.memory, by),
    )


def _shifted(one: _Timed, by: float, *fields: str) -> _Timed:
    changes: dict[str, Any] = {name: getattr(one, name) + by for name in fields}
    return dataclasses.replace(one, **changes)


def _shifted_memory(memory: MemoryOfRank, by: float) -> MemoryOfRank:
    return dataclasses.replace(
        memory,
        categories={name: _shifted_series(series, by) for name, series in memory.categories.items()},
        modules={name: _shifted_series(series, by) for name, series in memory.modules.items()},
        resident=_shifted_series(memory.resident, by),
        peak_time=memory.peak_time + by,
    )


def _shifted_series(series: Series, by: float) -> Series:
    return Series([time + by for time in series.times], series.values)


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """One collective as all ranks saw it: their operations by rank."""

    by_rank: dict[int, Operation]

    @property
    def last_start(self) -> float:
        return max(one.start for one in self.by_rank.values())

    @property
    def skew(self) -> float:
        return self.last_start - min(one.start for one in self.by_rank.values())

    @property
    def last_rank(self) -> int | None:
        """Who came last, if anybody did by more than a moment."""
        if self.skew < _TOGETHER:
            return None
        return max(self.by_rank, key=lambda rank: self.by_rank[rank].start)

    def seconds(self) -> list[float]:
        """How long the data was on its way, on each rank that can tell."""
        times = []
        for one in self.by_rank.values():
            if one.moving > 0:
                times.append(one.moving)
            elif one.end_seen and one.end > self.last_start:
                times.append(one.end - self.last_start)
        return times


def _collectives(ranks: list[Rank], groups: list[Group], steps: int) -> tuple[list[Collective], list[str]]:
    meetings: dict[tuple[int, str, int], dict[int, Operation]] = defaultdict(dict)
    for rank in ranks:
        for one in rank.operations:
            meetings[one.group, one.kind, one.number][rank.rank] = one
    alike: dict[tuple[str, str, str, int], list[_Meeting]] = defaultdict(list)
    notes: list[str] = []
    for (group, kind, number), by_rank in sorted(meetings.items()):
        names = {one.fqn for one in by_rank.values()}
        if len(names) > 1 and not notes:
            notes.append(
                f"the ranks of group {groups[group].ranks} did not run the same: {kind} number {number} was of "
                f"{', '.join(sorted(names))}; figures across ranks are not comparable from there on"
            )
        first = by_rank[min(by_rank)]
        alike[kind, first.fqn, first.phase, group].append(_Meeting(by_rank))
    made = [_collective(found, len(groups[key[3]].ranks), steps) for key, found in alike.items()]
    return sorted(made, key=lambda one: -one.exposed), notes


def _collective(meetings: list[_Meeting], size: int, steps: int) -> Collective:
    first = next(iter(meetings[0].by_rank.values()))
    exposed: dict[int, float] = defaultdict(float)
    skewed: dict[int, float] = defaultdict(float)
    waited_by: dict[str, float] = defaultdict(float)
    for meeting in meetings:
        for rank, one in meeting.by_rank.items():
            exposed[rank] += one.exposed
            skewed[rank] += waited_for_ranks(one, meeting.last_start)
            if one.waited_by:
                waited_by[one.waited_by] += one.exposed
    worst = max(exposed, key=lambda rank: exposed[rank])
    algorithm = _bandwidth(meetings)
    factor = (2 if first.kind == "all-reduce" else 1) * (size - 1) / size
    last = Counter(str(meeting.last_rank) for meeting in meetings if meeting.last_rank is not None)
    return Collective(
        kind=first.kind,
        fqn=first.fqn,
        phase=first.phase,
        group=first.group,
        transport=first.transport,
        dtype=first.dtype,
        count=len(meetings),
        bytes=first.bytes,
        wire_bytes=max(one.wire_bytes for one in meetings[0].by_rank.values()),
        padding_bytes=max(one.padding_bytes for one in meetings[0].by_rank.values()),
        exposed=exposed[worst] / steps,
        exposed_by_skew=skewed[worst] / steps,
        waited_by=max(waited_by, key=lambda name: waited_by[name], default=""),
        skew=statistics.fmean(meeting.skew for meeting in meetings),
        last=dict(last),
        algorithm_bandwidth=algorithm,
        bus_bandwidth=None if algorithm is None else algorithm * factor,
    )


def _bandwidth(meetings: list[_Meeting]) -> float | None:
    """Bytes per second, from the median time of those that were seen."""
    times = [seconds for meeting in meetings for seconds in meeting.seconds() if seconds > 0]
    size = next(iter(meetings[0].by_rank.values())).bytes
    return size / statistics.median(times) if times and size else None


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
