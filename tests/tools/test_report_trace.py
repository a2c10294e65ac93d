"""The trace has the events that viewers need, for every rank."""

import json
from dataclasses import replace

import pytest

from shardkit.tools.report.merge import merge
from shardkit.tools.report.page import trace_json
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


def test_gathers_under_way_at_once_lie_on_threads_of_their_own() -> None:
    one = rank(0)
    first, second = one.operations[:2]
    second = replace(second, kind="all-gather", start=first.start + 0.001, end=first.end + 0.001)
    trace = json.loads(trace_json(merge([record(replace(one, operations=[first, second]))])))
    gathers = [slice for slice in trace["traceEvents"] if slice["ph"] == "X" and slice["cat"] == "all-gather"]
    assert len({slice["tid"] for slice in gathers}) == 2
    names = [slice["args"]["name"] for slice in trace["traceEvents"] if slice["name"] == "thread_name"]
    assert names.count("all-gather") == 1 and names.count("all-gather 2") == 1
