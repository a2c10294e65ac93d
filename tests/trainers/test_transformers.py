"""transformers' Trainer: accelerate's FSDP2 with resume and generate, and its native FSDP2."""

import pytest

from tests.trainers.launch import Engine, assert_resumes_across, assert_same

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["native", "FSDP2", "resumed"])
def test_same_as_stock(case: str):
    assert_same("transformers", case)


@pytest.mark.parametrize("engine", ["shardkit", pytest.param("stock", marks=pytest.mark.slow)])
def test_checkpoints_load_across(engine: Engine):
    assert_resumes_across("transformers", engine)
