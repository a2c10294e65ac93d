"""Lightning's Trainer and Fabric."""

import pytest

from tests.trainers.launch import assert_equal, assert_same, results

pytest.importorskip("lightning")


@pytest.mark.parametrize("case", ["Trainer", "resumed", "Fabric"])
def test_same_as_stock(case: str):
    assert_same("lightning", case)


def test_checkpoints_load_across():
    expected = results("lightning", "stock")["resumed"]
    for engine, other in (("shardkit", "stock"), ("stock", "shardkit")):
        seen = results("lightning", engine, load=other)["resumed"]
        assert_equal({**seen, "runs": 0}, {**expected, "runs": 0}, f"{engine} from {other}")
