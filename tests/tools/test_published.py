"""Predicted step times against published ones, of configurations that nothing was fitted to."""

import statistics

import pytest

from tests.tools.published import DATA, errors, memory_errors


def test_every_figure_has_a_source():
    assert all(run["source"] in DATA["sources"] and run["model"] in DATA["models"] for run in DATA["runs"])
    assert len([run for run in DATA["runs"] if not run.get("fitted")]) >= 8


@pytest.mark.slow
def test_the_median_error_of_step_times_stays_within_fifteen_per_cent():
    found = errors([run for run in DATA["runs"] if not run.get("fitted")])
    assert statistics.median(map(abs, found)) < 0.15, found


@pytest.mark.slow
def test_the_median_error_of_memory_stays_within_five_per_cent():
    found = memory_errors(DATA["runs"])
    assert len(found) >= 2 and statistics.median(map(abs, found)) < 0.05, found
