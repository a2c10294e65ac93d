"""From records to a report: one clock, groups matched, collectives side by side."""

from dataclasses import replace

import pytest

from shardkit.tools.report.measures import lateness, skew_by_rank, times_last
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Group, PlaceOfRank
from tests.tools.synthetic import MIB, operation, rank, record


def test_ranks_of_one_host_share_its_clock() -> None:
    report = merge([record(rank(1, begin=50.004), wall=7.0), record(rank(0, begin=50.0), wall=3.0)])
    assert [one.rank for one in report.ranks] == [0, 1]
    assert [one.begin for one in report.ranks] == pytest.approx([0.0, 0.004])
    assert report.run.clock == "host"
    assert [one.operations[1].start for one in report.ranks] == pytest.approx([0.1, 0.104])


def test_ranks_of_two_hosts_are_brought_together_by_wall_time() -> None:
    other = replace(rank(1, begin=1000.0), place=PlaceOfRank("host-b", "boot-b", 9))
    report = merge([record(rank(0, begin=50.0), wall=2000.0), record(other, wall=1050.002)])
    assert report.run.clock == "wall"
    assert [one.begin for one in report.ranks] == pytest.approx([0.0, 0.002])
    assert report.notes == ["the ranks are on several hosts: times across them are as exact as their clocks agree"]


def test_who_comes_late_is_told_and_waiting_for_it_is_skew() -> None:
    punctual = [operation(start=0.0, end=0.030, exposed=0.030, blocked=0.030)]
    late = [operation(start=0.020, end=0.030, exposed=0.010, blocked=0.010)]
    report = merge([record(rank(0, punctual)), record(rank(1, late))])
    (one,) = report.collectives
    assert one.last == {"1": 1}
    assert one.skew == pytest.approx(0.020)
    assert one.exposed == pytest.approx(0.030 / 2)  # of two recorded steps
    assert one.exposed_by_skew == pytest.approx(0.020 / 2)
    assert lateness(report) == pytest.approx({0: 0.0, 1: 0.020})
    assert times_last(report) == {0: 0, 1: 1}
    assert skew_by_rank(report) == pytest.approx({0: 0.010, 1: 0.0})


def test_bandwidth_counts_from_the_last_arrival_and_needs_an_end_that_was_seen() -> None:
    seen = [operation(start=0.0, end=0.030)]
    unseen = [operation(start=0.020, end=0.090, end_seen=False)]
    (one,) = merge([record(rank(0, seen)), record(rank(1, unseen))]).collectives
    assert one.algorithm_bandwidth == pytest.approx(8 * MIB / 0.010)
    assert one.bus_bandwidth == pytest.approx(4 * MIB / 0.010)
    (one,) = merge([record(rank(0, unseen)), record(rank(1, unseen))]).collectives
    assert one.algorithm_bandwidth is None


def test_groups_are_matched_by_their_ranks_and_not_by_their_place() -> None:
    shard, other = Group("1", [0, 1]), Group("2", [0])
    first = record(rank(0, [operation(group=1)]), groups=[other, shard])
    second = record(rank(1, [operation(group=0)]), groups=[shard])
    report = merge([first, second])
    assert report.groups == [other, shard]
    assert [one.operations[0].group for one in report.ranks] == [1, 1]
    assert report.collectives[0].count == 1


def test_ranks_that_are_missing_or_differ_are_noted() -> None:
    report = merge([record(rank(0), 3), record(rank(2, [operation(fqn="blocks.1")]), 3)])
    assert report.run.missing_ranks == [1]
    assert any("no record of ranks 1" in note for note in report.notes)
    assert any("did not run the same: all-gather number 0 was of blocks.0, blocks.1" in note for note in report.notes)
