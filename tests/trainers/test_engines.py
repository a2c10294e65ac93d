"""Each trainer's script: the same bits on shardkit as on stock, also on from each other's checkpoints."""

import pytest

from tests.trainers.launch import Engine, assert_resumes_across, assert_same, results

# By script: the modules that it needs, and its cases.
CASES = {
    "accelerate": (
        ["accelerate"],
        ["plain", "accumulation", "RAM-efficient", "checkpointing in bf16", "resumed"],
    ),
    "lightning": (["lightning"], ["Trainer", "resumed", "Fabric"]),
    "transformers": (["accelerate", "transformers"], ["native", "FSDP2", "resumed"]),
    "trl": (["trl", "peft"], ["SFT with LoRA", "SFT", "DPO with LoRA"]),
    # Low-bit optimizers (torchao), 4-bit weights under LoRA (bitsandbytes, PEFT) and torchft's all-reduce hook.
    "tensors": (
        ["torchao", "bitsandbytes", "peft"],
        ["AdamW8bit", "AdamW4bit", "AdamWFp8", "all-reduce hook", "QLoRA"],
    ),
}


def skip_without(script: str) -> None:
    for module in CASES[script][0]:
        pytest.importorskip(module)


@pytest.mark.parametrize(("script", "case"), [(script, case) for script, (_, cases) in CASES.items() for case in cases])
def test_same_as_stock(script: str, case: str):
    skip_without(script)
    assert_same(script, case)


@pytest.mark.parametrize(
    ("script", "engine"),
    [
        *(("accelerate", "stock"), ("accelerate", "shardkit"), ("lightning", "shardkit"), ("transformers", "shardkit")),
        *(pytest.param(script, "stock", marks=pytest.mark.slow) for script in ("lightning", "transformers")),
    ],
)
def test_checkpoints_load_across(script: str, engine: Engine):
    skip_without(script)
    assert_resumes_across(script, engine)


@pytest.mark.slow
def test_managers_of_torchft_in_the_all_reduce_hook():
    """Two replicas of two shards."""
    pytest.importorskip("torchft")
    assert_same("torchft", "torchft", ranks=4)
    seen = results("torchft", "shardkit", 4)["torchft"]
    assert seen["committed"] == [True, True, True]
    assert seen["replicas agree"] == [True]
