"""Reports on disk: a written report is read back unchanged, and other files are refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.tools.report.files import ReportError, read_records, read_report, write_record, write_report
from shardkit.tools.report.merge import merge
from tests.tools.synthetic import rank, record


@pytest.fixture
def written(tmp_path: Path) -> Path:
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


def test_other_json_is_no_report(tmp_path: Path) -> None:
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


def test_records_are_read_in_the_order_of_ranks(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        write_record(record(rank(number), 11), tmp_path / "records")
    assert [one.rank.rank for one in read_records(tmp_path / "records")] == [0, 9, 10]


def test_records_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no records"):
        read_records(tmp_path)
    (tmp_path / "rank-0.json").write_text("{}")
    with pytest.raises(ReportError, match=r"rank-0\.json is not a record of this version"):
        read_records(tmp_path)
