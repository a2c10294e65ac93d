"""transformers' Trainer: accelerate's FSDP2 with resume and generate, and its native FSDP2."""

import pytest

from tests.trainers.launch import assert_equal, assert_same, results

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["FSDP2", "resumed"])
def test_same_as_stock(case: str):
    assert_same("transformers", case)


def test_native_same_as_stock():
    assert_same("transformers_native", "native")


def test_checkpoints_load_across():
    expected = results("transformers", "stock")["resumed"]
    for engine, other in (("shardkit", "stock"), ("stock", "shardkit")):
        seen = results("transformers", engine, load=other)["resumed"]
        assert_equal({**seen, "runs": 0}, {**expected, "runs": 0}, f"{engine} from {other}")
