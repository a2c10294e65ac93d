"""Limits and quantities: their notation and meaning, and the errors for anything else."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.tools.quantities import UNITS, parse_quantity, show
from shardkit.tools.report.measures import parse_limit
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Report
from tests.tools.synthetic import MIB, memory, rank, record


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
