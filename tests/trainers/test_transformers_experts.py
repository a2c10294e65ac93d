"""transformers' own expert parallelism: Mixtral through `DistributedConfig(ep_size=...)`, and its checkpoints."""

import pytest
import torch

from tests.trainers.launch import assert_case, assert_engines, assert_equal, results

pytest.importorskip("accelerate")  # from_pretrained asks for it
pytest.importorskip("transformers.distributed")

SCRIPT = "transformers_experts"


@pytest.mark.parametrize("part", ["", ", resumed"])
def test_same_as_stock(part: str):
    stock, shardkit = (results(SCRIPT, engine)["experts over 2" + part] for engine in ("stock", "shardkit"))
    assert_case(shardkit, stock)


def test_checkpoints_load_across():
    """Weights and optimizer state in transformers' own formats, one step on from them, by the other engine."""
    expected = results(SCRIPT, "stock")["experts over 2, resumed"]
    shardkit = results(SCRIPT, "shardkit")["experts over 2, across"]
    stock = results(SCRIPT, "stock", only_across=True)["experts over 2, across"]
    assert_engines(stock["runs"], shardkit["runs"])
    for seen in (shardkit, stock):
        assert_equal(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", ", resumed"])
@pytest.mark.parametrize("case", ["experts over 2", "experts over 4"])
def test_four_ranks_differ_in_rounding_alone(case: str, part: str):
    """Sums of four gradients are not added in the order of stock's reduce-scatter."""
    stock, shardkit = (results(SCRIPT, engine, 4)[case + part] for engine in ("stock", "shardkit"))
    assert_engines(stock.pop("runs"), shardkit.pop("runs"))
    torch.testing.assert_close(shardkit, stock, rtol=1e-4, atol=1e-6)
