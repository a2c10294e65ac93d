"""The page in a real browser: it loads without errors and without a network, its charts draw, its filters work.

Chromium is found on the path. CI installs it; without it these tests are skipped, and say so.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.tools.report.merge import merge
from shardkit.tools.report.page import page_html, trace_json
from shardkit.tools.report.schema import Estimate, Report
from tests.tools.browser import NAMES, Page, browser, installed
from tests.tools.synthetic import MIB, operation, rank, record, report

HOSTILE = """</script><script>document.title='taken'</script><img src=x onerror="document.title='taken'">\u2028&lt;"""

needs_browser = pytest.mark.skipif(
    installed() is None, reason=f"no browser: none of {', '.join(NAMES)} is on the path (apt-get install chromium)"
)


def hostile_report() -> Report:
    """Two ranks, three modules. The name of one of them contains HTML that tries to break out of the page."""
    names = ["blocks.0", "blocks.1", HOSTILE]
    operations = [
        operation(
            fqn=name, waited_by=name, number=3 * step + index, step=step, phase=phase,
            start=step / 10 + index / 50, end=step / 10 + index / 50 + 0.01, exposed=0.01 / (index + 1)
        )
        for step in range(2)
        for index, (name, phase) in enumerate(zip(names, ("forward", "backward", "backward"), strict=True))
    ]  # fmt: skip
    slow = [replace(step, optimizer=0.03) for step in rank(1).steps]
    owned = {"blocks.0.weight": MIB, HOSTILE: 3 * MIB}
    ranks = [rank(0, operations, owned=dict.fromkeys(owned, 0)), rank(1, operations, owned=owned, steps=slow)]
    records = [record(one) for one in ranks]
    records[0] = replace(records[0], run=replace(records[0].run, command=["train.py", HOSTILE]))
    estimate = Estimate("estimate.json", 48 * MIB, None, 0.11, None, None, None, {"activations": MIB})
    return merge(records, estimate=estimate)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(hostile_report()))
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(path: Path, chromium: Page) -> Page:
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(path, 1100, 900)
    return chromium


def bars(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('#exposed .bar .name')].map((one) => one.textContent)")


def ink(page: Page, chart: str) -> int:
    """How many pixels of a chart are drawn on."""
    return page.evaluate(
        f"""(() => {{
          const canvas = document.querySelector('#{chart} canvas');
          const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          let drawn = 0;
          for (let i = 3; i < pixels.length; i += 4) drawn += pixels[i] > 0;
          return drawn;
        }})()"""
    )


def rows(page: Page, table: str) -> list[list[str]]:
    return page.evaluate(
        f"[...document.querySelectorAll('#{table} tr')].map((row) => [...row.children].map((one) => one.textContent))"
    )


def choose(page: Page, selector: str, value: str, event: str) -> None:
    page.evaluate(
        f"(() => {{ const one = document.querySelector('{selector}'); one.value = '{value}'; "
        f"one.dispatchEvent(new Event('{event}')); }})()"
    )


def test_nothing_is_fetched_from_anywhere() -> None:
    html = page_html(hostile_report())
    outside = re.findall(r"""(?:src|href)\s*=\s*["'][^"']*|@import|url\(""", html.split('id="data"')[0])
    assert outside == []
    assert "The MIT License" in html, "the chart library's licence travels with it"
    assert html.count("<script") == html.count("</script>") == 3


@needs_browser
def test_it_loads_without_errors_or_requests_and_its_charts_draw(page: Page, path: Path) -> None:
    assert page.errors == []
    assert page.requests == [path.as_uri()]
    assert page.evaluate("document.title") == "shardkit report"
    assert all(ink(page, chart) > 2000 for chart in ("memory", "steps", "lateness"))


@needs_browser
def test_names_are_text_and_never_markup(page: Page) -> None:
    assert HOSTILE in bars(page)
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.evaluate("document.getElementById('collectives').textContent")
    assert page.evaluate("document.title") == "shardkit report"


@needs_browser
def test_modules_are_filtered_by_name_and_phase(page: Page) -> None:
    assert bars(page) == ["blocks.0", "blocks.1", HOSTILE]  # longest first
    choose(page, "#module-filter", "BLOCKS", "input")
    assert bars(page) == ["blocks.0", "blocks.1"]
    choose(page, "#phase-filter", "backward", "change")
    assert bars(page) == ["blocks.1"]
    assert [row[0] for row in rows(page, "collectives")[1:]] == ["blocks.1"]
    choose(page, "#module-filter", "nothing like that", "input")
    assert bars(page) == []
    assert "Nothing that fits" in page.evaluate("document.getElementById('exposed').textContent")
    assert page.errors == []


@needs_browser
def test_categories_and_ranks_are_filters_of_the_memory_chart(page: Page) -> None:
    before = ink(page, "memory")
    for name in ("sharded_parameters", "communication"):
        page.evaluate(f"document.querySelector('[data-part={name}]').click()")
    assert ink(page, "memory") < before / 2, "only the grid is left"
    for name in ("sharded_parameters", "communication"):
        page.evaluate(f"document.querySelector('[data-part={name}]').click()")
    assert ink(page, "memory") == before
    choose(page, "#memory-by", "modules", "change")
    parts = page.evaluate("[...document.querySelectorAll('[data-part]')].map((one) => one.dataset.part)")
    assert parts == ["blocks.0", "Net"]  # by the bytes that they hold
    assert ink(page, "memory") not in (0, before)
    choose(page, "#memory-rank", "1", "change")
    assert "Peak of rank 1" in page.evaluate("document.getElementById('peak').textContent")
    assert page.errors == []


@needs_browser
def test_predicted_stands_beside_measured(page: Page) -> None:
    head, *figures = rows(page, "estimate")
    assert head[:4] == ["figure", "predicted", "measured", "error"]
    assert ["peak memory", "48.0 MiB", "44.0 MiB", "+9.1%", ""] in figures
    assert ["at the peak: activations", "1.0 MiB", "0 B", "-", ""] in figures
    widths = page.evaluate("[...document.querySelectorAll('#estimate .pair')].map((one) => one.style.width)")
    assert widths[2:4] == ["100%", "91.6667%"]  # the second figure is the peak


@needs_browser
def test_owners_stand_beside_the_mean_slowest_first(page: Page, tmp_path) -> None:
    assert rows(page, "owners")[1:] == [
        ["1", "4.0 MiB", "100.0%", "30.0 ms", "50.0%", "2"],
        ["0", "0 B", "-100.0%", "10.0 ms", "-50.0%", "0"],
    ]
    assert rows(page, "owned")[1:] == [[HOSTILE, "3.0 MiB"], ["blocks.0.weight", "1.0 MiB"]]
    choose(page, "#owner", "0", "change")
    assert rows(page, "owned")[1:] == []
    shown = "document.getElementById('owners-section').getBoundingClientRect().height > 0"
    assert page.evaluate(shown)
    (tmp_path / "none.html").write_text(page_html(report(rank(0))))
    page.open(tmp_path / "none.html", 1100, 900)
    assert not page.evaluate(shown) and page.errors == []


@needs_browser
def test_a_phone_can_show_it(path: Path, chromium: Page) -> None:
    chromium.errors.clear()
    chromium.open(path, 360, 740)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 360, "nothing sticks out"
    assert chromium.evaluate("document.querySelector('#memory canvas').clientWidth") <= 360
    assert ink(chromium, "memory") > 2000
    assert chromium.errors == []


# -- the trace ---------------------------------------------------------------------------------------------------------


def test_slices_have_names_and_lengths_and_ranks_are_processes() -> None:
    trace = json.loads(trace_json(report()))
    slices = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {one["pid"] for one in slices} == {0, 1}
    gathers = [one for one in slices if one["cat"] == "all-gather"]
    assert [one["dur"] for one in gathers] == pytest.approx([10_000.0] * 4)
    assert {one["name"] for one in gathers} == {"blocks.0 (forward)"}
    assert {one["name"] for one in slices if one["cat"] == "waiting"} == {"blocks.0 waits for all-gather of blocks.0"}
    threads = {(one["pid"], one["tid"]) for one in trace["traceEvents"] if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in slices} <= threads
    counters = [one for one in trace["traceEvents"] if one["ph"] == "C"]
    assert {one["name"] for one in counters} == {"memory: sharded_parameters", "memory: communication"}
