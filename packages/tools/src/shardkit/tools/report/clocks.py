"""One clock for the ranks of several hosts: wall clocks, moved as little as the run's collectives demand.

Ranks of one host share a clock. Those of different hosts have wall clocks that disagree by milliseconds, as much as a
rank may be late. But no gather and no all-reduce ends anywhere before its last rank has started it, so each of them
bounds by how much two clocks can differ, from both sides; thousands of them leave little room. Clocks that never meet
are bound through those that both meet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

from shardkit.tools.report.record import RankRecord
from shardkit.tools.report.schema import Operation

__all__ = ["Clocks", "common_clock"]

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
