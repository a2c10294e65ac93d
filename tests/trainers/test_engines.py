"""Each trainer's script: the same bits on shardkit as on stock, also on from each other's checkpoints."""

import functools
import sys
from pathlib import Path

import pytest
import torch

from tests.trainers.launch import (
    SCRIPTS,
    Engine,
    assert_case,
    assert_engines,
    assert_resumes_across,
    assert_same,
    results,
    run_command,
)

CASES = {
    "accelerate": ["plain", "accumulation", "RAM-efficient", "checkpointing in bf16", "resumed"],
    "lightning": ["Trainer", "resumed", "Fabric"],
    "transformers": ["native", "FSDP2", "resumed"],
    "transformers_experts": ["experts over 2", "resumed"],
    "trl": ["SFT with LoRA", "SFT", "DPO with LoRA"],
    # Low-bit optimizers (torchao), and 4-bit weights under LoRA (bitsandbytes, PEFT).
    "tensors": ["AdamW8bit", "AdamW4bit", "AdamWFp8", "QLoRA"],
}


@pytest.mark.parametrize(("script", "case"), [(script, case) for script, cases in CASES.items() for case in cases])
def test_same_as_stock(script: str, case: str):
    assert_same(script, case)


@pytest.mark.parametrize(
    ("script", "engine"),
    [
        *((script, "shardkit") for script in ("accelerate", "lightning", "transformers", "transformers_experts")),
        *((script, "stock") for script in ("accelerate", "transformers_experts")),
        *(pytest.param(script, "stock", marks=pytest.mark.slow) for script in ("lightning", "transformers")),
    ],
)
def test_checkpoints_load_across(script: str, engine: Engine):
    assert_resumes_across(script, engine)


@pytest.mark.slow
def test_managers_of_torchft_in_the_all_reduce_hook():
    """Two replicas of two shards."""
    assert_same("torchft", "torchft", ranks=4)
    seen = results("torchft", "shardkit", 4)["torchft"]
    assert seen["committed"] == [True, True, True]
    assert seen["replicas agree"] == [True]


EXPERTS = ["1 replicas, experts over 2", "1 replicas, experts over 4", "2 replicas, experts over 2"]


def test_torchtitan_is_same_as_stock_on_four_ranks():
    assert_same("torchtitan", "HSDP", ranks=4)


@pytest.mark.slow
def test_torchtitan_is_same_as_stock():
    assert_same("torchtitan", "one axis")


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_of_torchtitan_on_meshes_of_their_own(case: str):
    """Checkpoints of stock's, with each rank's part of the experts, are loaded with the same bits."""
    stock, shardkit = (results("torchtitan_experts", engine, 4)[case] for engine in ("stock", "shardkit"))
    assert_engines(stock.pop("runs"), shardkit.pop("runs"))
    for name, weight in stock["weights"].items():
        assert torch.equal(shardkit[f"loaded {name}"][0], weight), name
    exact = case.startswith("2 replicas")  # as above, sums of four are added in another order
    torch.testing.assert_close(shardkit, stock, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("case", ["tp=2, ep=1", "tp=1, ep=2"])
def test_annotated_parameters_train_like_dtensors(case: str):
    """Torchtitan's default back end and its other one; stock shards annotated parameters from torch 2.15 on."""
    seen = results("torchtitan_annotated", "shardkit", 4)
    annotated, dtensors = seen[f"spmd_types, {case}"], seen[f"partial_dtensor, {case}"]
    assert annotated["runs"]["shardkit"] > 0 == annotated["runs"]["stock"]
    for key in ("losses", "gradient norms", "weights"):  # gradients of norms are summed over tp by other operations
        torch.testing.assert_close(annotated[key], dtensors[key], rtol=1e-6, atol=1e-7)


def _trained_by_ray(engine: Engine, directory: Path, **variables: str) -> dict:
    pytest.importorskip("ray.train")
    directory.mkdir()
    command = [sys.executable, str(SCRIPTS / "train_ray.py"), f"--out={directory / 'out.pt'}", f"--own={directory}"]
    # Ray's workers import the script's modules, and need no report of its use.
    variables |= {"PYTHONPATH": str(SCRIPTS), "RAY_USAGE_STATS_ENABLED": "0"}
    seen = run_command(command, engine, directory, directory / "out.pt", **variables)
    assert not isinstance(seen, str), seen
    return seen["ray"]


@pytest.mark.slow
def test_workers_of_ray_are_same_as_stock(tmp_path):
    expected = _trained_by_ray("stock", tmp_path / "stock")
    assert_case(_trained_by_ray("shardkit", tmp_path / "shardkit", SHARDKIT_INSTALL="1"), expected)


# The words in front of `accelerate launch`, and the variables to set.
WAYS = {"shardkit run": (["shardkit", "run"], {}), "SHARDKIT_INSTALL": ([], {"SHARDKIT_INSTALL": "1"})}


@functools.cache
def _launched_on_stock(directory: Path) -> dict:
    return _launched("stock", directory, [])


def _launched(engine: Engine, directory: Path, front: list[str], **variables: str) -> dict:
    pytest.importorskip("accelerate")
    scripts = Path(sys.executable).parent
    command = [*front, "accelerate", "launch", f"--config_file={SCRIPTS / 'fsdp2.yaml'}"]
    command = [str(scripts / word) if word in ("accelerate", "shardkit") else word for word in command]
    out = directory / "out.pt"
    command += [str(SCRIPTS / "train_launched.py"), f"--out={out}"]
    seen = run_command(command, engine, directory, out, **variables)
    assert not isinstance(seen, str), seen
    return seen["launched"]


@pytest.mark.parametrize("way", WAYS)
def test_launched_from_a_configuration_file(way: str, tmp_path, tmp_path_factory):
    expected = _launched_on_stock(tmp_path_factory.getbasetemp())
    front, variables = WAYS[way]
    seen = _launched("shardkit", tmp_path, front, **variables)
    assert_case(seen, expected)
