"""Low-bit optimizers (torchao), 4-bit weights under LoRA (bitsandbytes, PEFT) and torchft's all-reduce hook."""

import pytest

from tests.trainers.launch import assert_same

for name in ("torchao", "bitsandbytes", "peft"):
    pytest.importorskip(name)


@pytest.mark.parametrize("case", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "all-reduce hook", "QLoRA"])
def test_same_as_stock(case: str):
    assert_same("tensors", case)
