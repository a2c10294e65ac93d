"""The chart of the README shows the saved results."""

import runpy

from tests.packaging.workspace import ROOT


def test_the_chart_is_drawn_from_the_saved_results():
    chart = runpy.run_path(str(ROOT / "website" / "benchmark_chart.py"))
    drawn = chart["draw"](chart["read"]())
    assert chart["CHART"].read_text() == drawn, "run `python website/benchmark_chart.py`"
