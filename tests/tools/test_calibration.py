"""This machine's own description, and operators timed one by one."""

import json
from pathlib import Path

import pytest

from benchmarks.measured_costs import MeasuredCosts
from shardkit.tools import estimate_job
from shardkit.tools.calibration import calibrate
from shardkit.tools.estimating.trace import Ran
from shardkit.tools.machine import Machine, load_machine
from tests.tools.jobs import JOBS


@pytest.fixture(scope="module")
def machine() -> Machine:
    return calibrate(2, "cpu")


def test_a_calibrated_machine_is_a_complete_description(machine: Machine, tmp_path: Path):
    path = tmp_path / "this.json"
    path.write_text(json.dumps(machine.to_json()))
    assert load_machine(path) == machine
    assert machine.ranks_per_host == 2
    assert machine.transport == "shared"
    assert machine.memory_bandwidth > 1e8 and machine.flops["float32"] > 1e8
    assert 0 < machine.inside.latency < 1 and 0 < machine.operator_seconds < 1e-2
    assert machine.process_bytes > 50 * 2**20


def test_operators_are_timed_one_by_one(machine: Machine):
    with MeasuredCosts(machine) as costs:
        found = estimate_job(JOBS["llama"], 2, machine, costs=costs)
    assert costs.estimated == []
    ran = [step.operator for step in found.recording.trace.steps if isinstance(step, Ran)]
    products = [one for one in ran if one.flops > 10**6]
    assert products and all(costs.seconds(one) > 0 for one in products)
    assert found.timeline.step > sum(costs.seconds(one) for one in ran)
