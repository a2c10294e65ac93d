"""One clock for several hosts: the bounds that collectives set on each pair, directly and through other hosts."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.merge import common_clock, merge
from shardkit.tools.report.schema import Group, Operation, PlaceOfRank
from tests.tools.synthetic import operation, rank, record

Bounds = dict[tuple[int, int], tuple[float, float]]


def on_hosts(bounds: Bounds, walls: list[float]) -> list[RankRecord]:
    """A rank on each host. By pairs: by how much the second's clock may be moved ahead of the first's, least and most.

    Each pair meets in one gather, in ms: the first sees its end after the second has started it, and vice versa.
    """
    groups = [Group(str(index), list(pair)) for index, pair in enumerate(bounds)]
    operations: list[list[Operation]] = [[] for _ in walls]
    for index, ((first, second), (least, most)) in enumerate(bounds.items()):
        lasts = (most - least) / 2
        starts = {first: -walls[first], second: (lasts - most) / 1e3 - walls[second]}
        ends = {first: lasts / 1e3 - walls[first], second: -least / 1e3 - walls[second]}
        for host in (first, second):
            operations[host].append(operation(group=index, start=starts[host], end=ends[host]))
    ranks = [rank(number, some) for number, some in enumerate(operations)]
    return [
        record(replace(one, place=PlaceOfRank(f"{one.rank}", f"boot {one.rank}", 9)), len(walls), wall, groups)
        for one, wall in zip(ranks, walls, strict=True)
    ]


def moved(bounds: Bounds, hosts: int = 3) -> tuple[list[float], str]:
    """Corrections in ms of clocks that say the same, and the note about them."""
    report = merge(on_hosts(bounds, [0.0] * hosts))
    return [(one.begin - report.ranks[0].begin) * 1e3 for one in report.ranks], report.notes[0]


def test_what_two_hosts_demand_of_each_other_is_not_lost_behind_a_third() -> None:
    corrections, note = moved({(0, 1): (-5, 5), (0, 2): (-5, 5), (1, 2): (3, 4)})
    assert corrections == pytest.approx([0, 0, 3])
    assert "moved by up to 3.0 ms" in note and "wrong by up to 7.0 ms" in note


def test_a_host_leaves_room_for_those_that_are_placed_after_it() -> None:
    corrections, note = moved({(0, 1): (-5, 5), (0, 2): (-5, 5), (1, 2): (7, 8)})
    assert corrections == pytest.approx([0, -2, 5])
    assert "moved by up to 5.0 ms" in note and "wrong by up to 3.0 ms" in note


def test_room_adds_up_along_a_chain() -> None:
    corrections, note = moved({(0, 1): (-5, 5), (1, 2): (-10, 10)})
    assert corrections == pytest.approx([0, 0, 0])
    assert "no collective contradicts their clocks" in note and "wrong by up to 30.0 ms" in note


def test_no_clock_is_moved_where_three_contradict_of_which_each_two_agree() -> None:
    corrections, note = moved({(0, 1): (-1, 1), (0, 2): (-1, 1), (1, 2): (3, 4), (0, 3): (40, 50)}, hosts=4)
    assert corrections == pytest.approx([0, 0, 0, 0])
    assert "none was moved" in note and "as exact as their clocks agree" in note


def test_hosts_that_share_no_collective_with_others_are_moved_among_themselves() -> None:
    corrections, note = moved({(0, 1): (1, 2), (2, 3): (3, 4)}, hosts=4)
    assert corrections == pytest.approx([0, 1, 0, 3])
    assert "moved by up to 3.0 ms" in note and "across some of them are as exact as their clocks agree" in note


PAIRS = list(combinations(range(4), 2))
MILLISECONDS = st.floats(0.01, 20)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-50, 50), min_size=4, max_size=4),
    st.lists(st.tuples(MILLISECONDS, MILLISECONDS), min_size=len(PAIRS), max_size=len(PAIRS)),
    st.sets(st.sampled_from(PAIRS), min_size=1),
)
def test_clocks_meet_all_bounds_and_are_no_further_off_than_is_told(
    true: list[float], slack: list[tuple[float, float]], meeting: set[tuple[int, int]]
) -> None:
    bounds = {
        (first, second): (true[second] - true[first] - below, true[second] - true[first] + above)
        for (first, second), (below, above) in zip(PAIRS, slack, strict=True)
        if (first, second) in meeting
    }
    walls = [100.0, 200.0, 300.0, 400.0]
    clocks = common_clock(on_hosts(bounds, walls))
    found = [(ahead - wall) * 1e3 for ahead, wall in zip(clocks.ahead, walls, strict=True)]
    assert not clocks.contradicted
    for (first, second), (least, most) in bounds.items():
        assert least - 1e-6 <= found[second] - found[first] <= most + 1e-6
    for first, second in PAIRS:
        assert abs(found[second] - found[first] - (true[second] - true[first])) <= clocks.room * 1e3 + 1e-6
