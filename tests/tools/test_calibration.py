"""This machine's own description."""

import json
from pathlib import Path

import pytest

from shardkit.tools.calibration import calibrate
from shardkit.tools.machine import Machine, load_machine


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
