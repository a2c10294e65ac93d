"""transformers' Trainer: accelerate's FSDP2 with resume and generate, and its native FSDP2."""

import pytest

from tests.trainers.launch import assert_resumes_across, assert_same

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["native", "FSDP2", "resumed"])
def test_same_as_stock(case: str):
    assert_same("transformers", case)


def test_checkpoints_load_across():
    assert_resumes_across("transformers")
