"""torchtitan's Llama."""

import pytest
import torch

from tests.trainers.launch import assert_engines, assert_same, results

pytest.importorskip("torchtitan.models.llama3")


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
