"""`shardkit report`: its output, files and exit status; the notation of limits and quantities."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.tools.command import main
from shardkit.tools.quantities import UNITS, parse_quantity, show
from shardkit.tools.report.files import read_report, write_report
from shardkit.tools.report.measures import parse_limit
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Report
from tests.tools.synthetic import MIB, memory, rank, record


@pytest.fixture
def reports(tmp_path) -> tuple[str, str]:
    """Two runs; the second one's peak is 10 % above the first one's."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, peak in zip(paths, (1000, 1100), strict=True):
        write_report(merge([record(rank(number, memory=replace(memory(), peak=peak))) for number in (0, 1)]), path)
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fail-on", "peak_memory>+5%"], "compares with another run; give two reports"),
        (["--fail-on", "nonsense"], "is not a limit"),
        (["--estimate", "a.json"], "is not one estimate of"),
        (["--estimate", "absent.json"], "cannot be read as one estimate"),
    ],
)
def test_input_that_cannot_be_used_exits_with_two(
    reports: tuple[str, str], arguments: list[str], words: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(Path(reports[0]).parent)
    assert main(["report", reports[0], *arguments]) == 2
    assert words in capsys.readouterr().err
    assert main(["report", *reports, reports[0]]) == 2


def report_of(peak: int) -> Report:
    return merge([record(rank(0, memory=replace(memory(), peak=peak)), 1)])


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


def test_every_unit_has_a_base() -> None:
    assert all(1 in known.values() for known in UNITS.values())


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("1000", 1000), ("2kib", 2048)]
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_quantity(text, "bytes") == nbytes
