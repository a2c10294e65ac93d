"""Reports: from records on one clock to a file, read back unchanged; `shardkit report` with its limits."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.tools.command import main
from shardkit.tools.quantities import parse_quantity, show
from shardkit.tools.report.files import ReportError, read_records, read_report, write_record, write_report
from shardkit.tools.report.measures import lateness, parse_limit, skew_by_rank, times_last
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Group, PlaceOfRank, Report
from tests.tools.synthetic import MIB, STEPS, memory, operation, rank, record, report


@pytest.fixture
def reports(tmp_path) -> tuple[str, str]:
    """Two runs; the second one's peak is 10 % above the first one's."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, peak in zip(paths, (1000, 1100), strict=True):
        write_report(report(*(rank(number, memory=replace(memory(), peak=peak)) for number in (0, 1))), path)
    return str(paths[0]), str(paths[1])


def test_one_report_is_shown(reports: tuple[str, str], capsys) -> None:
    assert main(["report", reports[0]]) == 0
    shown = capsys.readouterr().out
    for words in ("2 ranks on cpu (gloo), 2 steps recorded", "peak_memory", "blocks.0", "sharded_parameters"):
        assert words in shown


def test_two_reports_are_compared_and_limits_decide(reports: tuple[str, str], capsys) -> None:
    assert main(["report", *reports, "--fail-on", "peak_memory>+10%", "--fail-on", "step_time>1s"]) == 0
    assert "+10.0%" in capsys.readouterr().out
    assert main(["report", *reports, "--fail-on", "peak_memory>+5%"]) == 1
    assert "limit broken: peak_memory is 1.1 KiB, the limit 'peak_memory>+5%' allows 1.0 KiB" in capsys.readouterr().err
    assert main(["report", reports[1], reports[0], "--fail-on", "peak_memory>+5%"]) == 0
    assert main(["report", reports[0], "--fail-on", "peak_memory>+5%"]) == 2
    assert "compares with another run; give two reports" in capsys.readouterr().err
    assert main(["report", reports[0], "--estimate", reports[1]]) == 2
    assert "is not one estimate of" in capsys.readouterr().err


def test_the_page_the_trace_and_an_estimate_beside_the_figures(reports: tuple[str, str], tmp_path, capsys) -> None:
    row = {"fqn": "", "phase": "forward", "bytes": 9}
    predicted = {
        "kind": "estimate",
        "schema": 1,
        "peak": {"bytes": 990, "by_category": {"activations": 3}, "fqn": "", "phase": "forward"},
        "reserved_bytes": 5000,
        "machine": {"device": "cpu", "process_bytes": 1000},
        "traffic": [
            {**row, "collective": "all-gather", "of_core": True, "calls": 2, "inside": 5, "between": 7},
            {**row, "collective": "all-reduce", "of_core": False, "calls": 1, "inside": 1, "between": 1},
        ],
        "timeline": {"step": 0.5, "exposed": 0.1},
    }
    estimate = tmp_path / "estimate.json"
    estimate.write_text(json.dumps(predicted))
    outputs = [tmp_path / name for name in ("page.html", "trace.json", "both.json")]
    flags = ["--html", str(outputs[0]), "--trace", str(outputs[1]), "--json", str(outputs[2])]
    assert main(["report", reports[0], "--estimate", str(estimate), *flags]) == 0
    found = read_report(outputs[2]).estimate
    assert found is not None
    assert (found.peak_memory, found.wire_bytes, found.collectives, found.step_time) == (990, 12, 2, 0.5)
    assert all(path.stat().st_size > 1000 for path in outputs)
    capsys.readouterr()
    assert main(["report", str(outputs[2])]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("peak_memory") and "%" in line)
    assert line.split() == ["peak_memory", "990", "B", "1000", "B", "-1.0%"]


def report_of(peak: int) -> Report:
    return report(rank(0, memory=replace(memory(), peak=peak)))


@pytest.mark.parametrize(
    ("limit", "before", "after", "broken"),
    [
        ("peak_memory>+5%", 100, 105, False),
        ("peak_memory>=+5%", 100, 105, True),
        ("peak_memory>+5%", 100, 106, True),
        ("peak_memory>+1MiB", MIB, 2 * MIB, False),
        ("peak_memory > +1 MiB", MIB, 2 * MIB + 1, True),
        ("peak_memory>1.5MiB", 9 * MIB, MIB, False),
        ("peak_memory>1.5MiB", 0, 2 * MIB, True),
        ("step_time>=100ms", 0, 0, True),
        ("exposed_share>50%", 0, 0, False),
        ("profiler_overhead>0.4%", 0, 0, True),
    ],
)
def test_a_limit_is_broken_or_not(limit: str, before: int, after: int, broken: bool) -> None:
    violation = parse_limit(limit).violation(report_of(after), report_of(before))
    assert (violation is not None) == broken
    assert violation is None or (limit in violation and parse_limit(limit).measure.name in violation)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peak_memory", "is not a limit: expected MEASURE>LIMIT"),
        ("peak_memory<5%", "is not a limit"),
        ("peak>+5%", "no measure 'peak'; expected one of step_time, peak_memory"),
        ("peak_memory>5parsecs", "'5parsecs' is not a number of bytes: expected digits and one of B, nothing, KiB"),
        ("peak_memory>5%", "'5%' is not a number of bytes"),
        ("step_time>+many", "'many' is not a number of seconds"),
    ],
)
def test_what_is_no_limit_is_told(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse_limit(text)
    assert text in str(error.value)


@given(st.sampled_from(["bytes", "seconds", "count", "share"]), st.floats(1e-6, 1e14))
def test_what_is_shown_can_be_read_again(unit: str, value: float) -> None:
    if unit == "share":
        value = min(value, 1e6)
    read = parse_quantity(show(value, unit), unit)
    # Shown with one decimal, or as whole microseconds, bytes and counts.
    step = {"bytes": 1.0, "seconds": 1e-6, "count": 0.1, "share": 0.001}[unit]
    assert math.isclose(read, value, rel_tol=0.06, abs_tol=step)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("1000", 1000), ("2kib", 2048)]
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_quantity(text, "bytes") == nbytes


@pytest.fixture
def written(tmp_path) -> Path:
    path = tmp_path / "report.json"
    write_report(report(), path)
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
    assert read_report(written) == report()
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize(("version", "advice"), [(2, "newer shardkit-tools"), (0, "record the run again")])
def test_another_version_is_refused_with_advice(written: Path, version: int, advice: str) -> None:
    change(written, "version", to=version)
    with pytest.raises(ReportError, match=rf"version {version}; .* reads version 1: .*{advice}"):
        read_report(written)


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
    made = report(rank(0, punctual), rank(1, late))
    (one,) = made.collectives
    assert one.last == {"1": 1}
    assert one.skew == pytest.approx(0.020)
    assert one.exposed == pytest.approx(0.030 / 2)  # of two recorded steps
    assert one.exposed_by_skew == pytest.approx(0.020 / 2)
    assert lateness(made) == pytest.approx({0: 0.0, 1: 0.020})
    assert times_last(made) == {0: 0, 1: 1}
    assert skew_by_rank(made) == pytest.approx({0: 0.010, 1: 0.0})


def test_bandwidth_counts_from_the_last_arrival_and_needs_an_end_that_was_seen() -> None:
    seen = [operation(start=0.0, end=0.030)]
    unseen = [operation(start=0.020, end=0.090, end_seen=False)]
    (one,) = report(rank(0, seen), rank(1, unseen)).collectives
    assert one.algorithm_bandwidth == pytest.approx(8 * MIB / 0.010)
    assert one.bus_bandwidth == pytest.approx(4 * MIB / 0.010)
    (one,) = report(rank(0, unseen), rank(1, unseen)).collectives
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


LONG = "a_module_with_a_name_like_those_of_models_that_wrap_models_which_others_have_wrapped_before_them"


# By command, parts of one row or sentence in their order.
ROWS = {
    "estimate tests.tools.jobs:GPT --vocabulary 9 --world-size 2 --json estimate.json": [
        ["note: operators are those that torch runs on a CPU;", "may save other tensors"],
    ],
    "plan tests.tools.jobs:GPT --vocabulary 9 --world-size 2 --most-micro-batch 1": [
        ["dp_shard 2, micro-batch 1, prefetch 1, reshard, recompute  2.0 GiB", "us"]
    ],
    "report report.json": [
        [LONG, "all-gather, forward", "10.0 ms", "GB/s"],
        ["profiler_overhead", "the time that recording took, as a share of the recorded time"],
        ["memory at the peak: rank 0, in forward of", LONG],
    ],
    "report report.json --estimate estimate.json": [["at the peak: sharded_parameters", "KiB", "MiB", "%"]],
    "report report.json report.json": [["profiler_overhead", "+0.0%"]],
    "doctor report.json": [
        ["1. communication of 1 groups is not hidden by computation, most of", LONG],
        ["   change: halve the bytes", "MixedPrecisionPolicy", "(that takes memory"],
    ],
}


def test_each_row_is_one_line_where_there_is_no_terminal(tmp_path, monkeypatch, capsys) -> None:
    waits = [operation(fqn=LONG, step=step, number=step, start=step / 10) for step in range(STEPS)]
    waits = [replace(one, end=one.start + one.exposed) for one in waits]
    ranks = [rank(number, waits, capacity=1 << 40) for number in (0, 1)]
    ranks = [replace(one, memory=replace(one.memory, peak_module=LONG)) for one in ranks]
    write_report(report(*ranks), tmp_path / "report.json")
    monkeypatch.chdir(tmp_path)
    for command, rows in ROWS.items():
        assert main(command.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        for parts in rows:
            in_order = re.compile(".*".join(map(re.escape, parts)))
            assert any(map(in_order.search, lines)), (command, parts, lines)
