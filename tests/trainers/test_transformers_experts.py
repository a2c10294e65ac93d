"""transformers' own expert parallelism: Mixtral through `DistributedConfig(ep_size=...)`, and its checkpoints."""

import pytest

from tests.trainers.launch import assert_case, assert_engines, assert_equal, results

pytest.importorskip("accelerate")  # from_pretrained asks for it
pytest.importorskip("transformers.distributed")

SCRIPT = "transformers_experts"


@pytest.mark.parametrize("part", ["", ", resumed"])
def test_same_as_stock(part: str):
    stock, shardkit = (results(SCRIPT, engine)["experts over 2" + part] for engine in ("stock", "shardkit"))
    assert_case(shardkit, stock, part)


def test_checkpoints_load_across():
    """Weights and optimizer state in transformers' own formats, one step on from them, by the other engine."""
    expected = results(SCRIPT, "stock")["experts over 2, resumed"]
    shardkit = results(SCRIPT, "shardkit")["experts over 2, across"]
    stock = results(SCRIPT, "stock", only_across=True)["experts over 2, across"]
    assert_engines(stock["runs"], shardkit["runs"])
    for seen in (shardkit, stock):
        assert_equal({**seen, "runs": 0}, {**expected, "runs": 0}, "across")
