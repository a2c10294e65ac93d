"""The trace: what the viewers need is there, for every rank."""

import json

import pytest

from shardkit.tools.report.merge import merge
from shardkit.tools.report.trace import trace_json
from tests.tools.synthetic import rank, record


def test_slices_have_names_and_lengths_and_ranks_are_processes() -> None:
    trace = json.loads(trace_json(merge([record(rank(0)), record(rank(1))])))
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
