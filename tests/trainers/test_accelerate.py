"""accelerate's FSDP2."""

import pytest

from tests.trainers.launch import assert_equal, assert_same, results

pytest.importorskip("accelerate")


@pytest.mark.parametrize("case", ["plain", "accumulation", "RAM-efficient", "checkpointing in bf16", "resumed"])
def test_same_as_stock(case: str):
    assert_same("accelerate", case)


def test_checkpoints_load_across():
    expected = results("accelerate", "stock")["resumed"]
    for engine, other in (("shardkit", "stock"), ("stock", "shardkit")):
        seen = results("accelerate", engine, load=other)["resumed"]
        assert seen["runs"][other] == 0
        assert_equal({**seen, "runs": 0}, {**expected, "runs": 0}, f"{engine} from {other}")
