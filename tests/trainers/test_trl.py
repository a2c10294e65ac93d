"""TRL's supervised fine-tuning and DPO, with PEFT's LoRA."""

import pytest

from tests.trainers.launch import assert_same

pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.mark.parametrize("case", ["SFT with LoRA", "SFT", "DPO with LoRA"])
def test_same_as_stock(case: str):
    assert_same("trl", case)
