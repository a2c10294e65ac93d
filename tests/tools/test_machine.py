"""Descriptions of machines: presets, JSON, the errors for missing values, and this machine's own."""

import json
from pathlib import Path

import pytest
import torch

from shardkit.tools.calibration import calibrate
from shardkit.tools.machine import MachineError, load_machine, preset, presets


def described() -> dict:
    return preset("h100").to_json()


def written(directory: Path, machine: object) -> Path:
    path = directory / "machine.json"
    path.write_text(json.dumps(machine))
    return path


@pytest.mark.parametrize("name", presets())
def test_a_preset_survives_json_and_states_its_sources(name: str, tmp_path):
    machine = preset(name)
    assert load_machine(written(tmp_path, machine.to_json())) == machine
    numbers = {"flops", "memory_bandwidth", "memory", "inside.bandwidth", "between.bandwidth", "inside.latency"}
    assert numbers <= set(machine.sources)


def test_a_hole_is_named_but_not_what_only_cpus_need(tmp_path):
    machine = described()
    assert machine.pop("dtensor_seconds") > 0
    assert load_machine(written(tmp_path, machine)) == preset("h100")
    del machine["memory"]
    with pytest.raises(MachineError, match=r"machine\.json is not .*missing required field `memory`.*--show-machine"):
        load_machine(written(tmp_path, machine))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bandwidth": 0}, '"memory_bandwidth" is 0.0; expected a positive number'),
        ({"memory": "80 GB"}, "Expected `int`, got `str` - at `$.memory`"),
        ({"flops": {}}, '"flops" is {}'),
        ({"flops": {"bfloat16": -1}}, "expected positive FLOP/s by dtype"),
        ({"inside": {"bandwidth": 1e9}}, "missing required field `latency` - at `$.inside`"),
        ({"transport": "infiniband"}, "Invalid enum value 'infiniband' - at `$.transport`"),
        ({"ranks_per_host": 8.5}, "Expected `int`, got `float` - at `$.ranks_per_host`"),
        ({"memory_bandwidth": float("nan")}, "JSON is malformed"),
        ({"efficiency": {"matmul": 60, "attention": 1, "memory": 1}}, '"matmul" is 60.0; expected a part of the peak'),
        ({"name": 7}, "Expected `str`, got `int` - at `$.name`"),
    ],
)
def test_wrong_attributes_are_refused(change: dict, message: str, tmp_path):
    with pytest.raises(MachineError) as raised:
        load_machine(written(tmp_path, {**described(), **change}))
    assert message in str(raised.value)


def test_a_dtype_without_flops_is_refused_when_it_is_needed():
    machine = preset("v100")
    assert machine.flops_for(torch.float16) == 125e12
    with pytest.raises(MachineError, match="nothing of FLOP/s in bfloat16"):
        machine.flops_for(torch.bfloat16)


def test_a_machine_of_one_host_has_no_link_to_others():
    machine = preset("l4").replace(between=None)
    assert machine.link(1) == machine.inside
    with pytest.raises(MachineError, match="no link between hosts"):
        machine.link(2)


def test_a_calibrated_machine_is_a_complete_description(tmp_path):
    machine = calibrate(2, "cpu")
    assert load_machine(written(tmp_path, machine.to_json())) == machine
    assert machine.ranks_per_host == 2
    assert machine.transport == "shared"
    assert machine.memory_bandwidth > 1e8 and machine.flops["float32"] > 1e8
    assert 0 < machine.inside.latency < 1 and 0 < machine.operator_seconds < 1e-2
    assert machine.process_bytes > 50 * 2**20
