"""Records become one report, with one clock and groups matched; it is read back unchanged, other files are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.tools.report.files import ReportError, read_records, read_report, write_record, write_report
from shardkit.tools.report.measures import lateness, skew_by_rank, times_last
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Group, PlaceOfRank
from tests.tools.synthetic import MIB, operation, rank, record


@pytest.fixture
def written(tmp_path) -> Path:
    path = tmp_path / "report.json"
    write_report(merge([record(rank(0)), record(rank(1))]), path)
    return path


def change(path: Path, *keys: str | int, to: Any) -> None:
    """Puts another value in one place of a JSON file."""
    value = json.loads(path.read_text())
    place = value
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    path.write_text(json.dumps(value))


def test_a_report_comes_back_as_it_was(written: Path) -> None:
    assert read_report(written) == merge([record(rank(0)), record(rank(1))])
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize(("version", "advice"), [(2, "newer shardkit-tools"), (0, "record the run again")])
def test_another_version_is_refused_with_advice(written: Path, version: int, advice: str) -> None:
    change(written, "version", to=version)
    with pytest.raises(ReportError, match=rf"version {version}; .* reads version 1: .*{advice}"):
        read_report(written)


def test_other_json_is_no_report(tmp_path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": "estimate"}')
    with pytest.raises(ReportError, match="not a report of `shardkit profile`"):
        read_report(path)
    with pytest.raises(ReportError, match=r"absent\.json cannot be read as a report .*: No such file"):
        read_report(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("ranks", 1, "steps", 0, "forward"), "fast", r"got `str` - at `\$\.ranks\[1\]\.steps\[0\]\.forward`"),
        (("ranks", 0, "operations", 0, "kind"), "gather", r"Invalid enum value 'gather' - at"),
        (("run", "world_size"), None, r"Expected `int`, got `null` - at `\$\.run\.world_size`"),
        (("run", "world_size"), True, r"Expected `int`, got `bool` - at `\$\.run\.world_size`"),
        (("run",), {}, r"missing required field `created` - at `\$\.run`"),
        (("ranks",), {}, r"Expected `array`, got `object` - at `\$\.ranks`"),
        (("ranks",), [], "there are no ranks"),
        (("groups",), [], "an operation is of a group that is none of the 0 groups"),
        (("ranks", 0, "memory", "resident", "times"), [], "a series has 0 times and"),
        (("ranks", 0, "memory", "peak_categories"), {}, "peak_categories lack activations"),
    ],
)
def test_a_damaged_report_is_told_by_the_place_of_the_damage(
    written: Path, place: tuple[str | int, ...], value: Any, words: str
) -> None:
    change(written, *place, to=value)
    with pytest.raises(ReportError, match=words):
        read_report(written)


def test_records_are_read_in_the_order_of_ranks(tmp_path) -> None:
    for number in (10, 9, 0):
        write_record(record(rank(number), 11), tmp_path / "records")
    assert [one.rank.rank for one in read_records(tmp_path / "records")] == [0, 9, 10]


def test_records_that_are_missing_or_damaged_are_refused(tmp_path) -> None:
    with pytest.raises(ReportError, match="holds no records"):
        read_records(tmp_path)
    (tmp_path / "rank-0.json").write_text("{}")
    with pytest.raises(ReportError, match=r"rank-0\.json is not a record of this version"):
        read_records(tmp_path)


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
