"""torchtitan's Llama, and its DeepSeek-V3 with expert parallelism."""

import pytest
import torch

from tests.trainers.launch import assert_engines, assert_same, results

pytest.importorskip("torchtitan.models.llama3")

EXPERTS = ["1 replicas, experts over 2", "1 replicas, experts over 4", "2 replicas, experts over 2"]


def test_same_as_stock_on_four_ranks():
    assert_same("torchtitan", "HSDP", ranks=4)


@pytest.mark.slow
def test_same_as_stock():
    assert_same("torchtitan", "one axis")


@pytest.mark.slow
def test_four_shards_differ_in_rounding_alone():
    """Sums of four gradients are not added in the order of stock's reduce-scatter."""
    stock, shardkit = (results("torchtitan", engine, 4)["one axis"] for engine in ("stock", "shardkit"))
    assert_engines(stock.pop("runs"), shardkit.pop("runs"))
    torch.testing.assert_close(shardkit, stock, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_meshes_of_their_own(case: str):
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
