"""transformers' Trainer on shardkit: a small Llama, byte-level, on the text of Python's standard library.

Everything but the line `shardkit.core.install()` is as for torch's own FSDP2. Start it with

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer/train.py

or leave that line out and start `shardkit run torchrun ... train.py`.
"""

import argparse
import os
import tempfile
from pathlib import Path

import shardkit.core

shardkit.core.install()  # the one line

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

LENGTH = 128


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the standard library's source as byte values."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: (count + 1) * LENGTH]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in rows.split(LENGTH)[:count]]


def new_model(directory: Path) -> LlamaForCausalLM:
    """A model with random weights, sharded by transformers while it loads."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(directory)
    dist.barrier()
    shards = DistributedConfig(fsdp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(directory, distributed_config=shards)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level Llama with transformers' Trainer on shardkit.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", type=Path, help="for the model and its checkpoints, the same for all ranks")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=str(options.directory or Path(tempfile.gettempdir()) / "shardkit-hf-trainer"),
        per_device_train_batch_size=8, max_steps=options.steps, logging_steps=10, learning_rate=2e-3,
        use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group()
    model = new_model(Path(arguments.output_dir) / "model")
    Trainer(model, arguments, train_dataset=samples(16 * options.steps)).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
