"""Pretraining, full fine-tuning and LoRA of a Llama or a Qwen MoE: transformers' Trainer, accelerate or a plain loop.

Start it with

    shardkit run torchrun --standalone --nproc-per-node 2 train.py --model llama-tiny.json --task pretrain --loop plain

The models are configs of transformers: two tiny ones for a CPU, and real ones. `--weights` starts from a directory of
safetensors, such as one that an earlier run has written to `--out`, and then needs no `--model`.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from shardkit.core import clip_grad_norm_, full_state_dict

CUDA = torch.cuda.is_available()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a config of transformers, for random weights")
    parser.add_argument("--weights", type=Path, help="a directory of safetensors, to start from")
    parser.add_argument("--task", choices=("pretrain", "full", "lora"), default="pretrain")
    parser.add_argument("--loop", choices=("trainer", "accelerate", "plain"), default="plain")
    parser.add_argument("--tokens", type=Path, help="a file of token ids, int32 (default: Python's sources as bytes)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (default 128)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank's micro-batch (default 4)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, required=True, help="a directory for the weights, or those of LoRA")
    options = parser.parse_args()
    if (options.model is None) == (options.weights is None) or (options.task == "full" and options.weights is None):
        parser.error("give --model for random weights, or --weights to fine-tune")
    return options


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    """The model, the same on all ranks, with adapters for LoRA. It takes the host's memory once for each rank."""
    torch.manual_seed(0)
    if options.weights is not None:
        model = AutoModelForCausalLM.from_pretrained(options.weights)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=torch.float32)
    model.config.use_cache = False
    if options.task == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    return model


def samples(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Sequences for all steps and ranks."""
    count = options.steps * options.batch * int(os.environ["WORLD_SIZE"])
    if options.tokens is not None:
        ids = torch.from_file(str(options.tokens), dtype=torch.int32, size=count * options.length).long()
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[: count * options.length]
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in ids.split(options.length)]


def batches(options: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches."""
    mine = samples(options)[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    for step in range(options.steps):
        some = mine[step * options.batch : (step + 1) * options.batch]
        yield {name: torch.stack([one[name] for one in some]).to(device()) for name in some[0]}


def device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def blocks_of(model: torch.nn.Module) -> list[str]:
    """Class names of the blocks, as transformers lists them."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return sorted(inner._no_split_modules)


def plain(options: argparse.Namespace) -> None:
    if CUDA:
        torch.cuda.set_device(device())
    dist.init_process_group()
    model = model_of(options).to(device())
    blocks = blocks_of(model)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if CUDA else None)
    for module in [one for one in model.modules() if type(one).__name__ in blocks]:
        fully_shard(module, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=options.lr)
    for step, batch in enumerate(batches(options)):
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    save(model, options.out)
    dist.destroy_process_group()


def accelerated(options: argparse.Namespace) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = model_of(options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=blocks_of(model)
    )
    accelerator = Accelerator(cpu=not CUDA, fsdp_plugin=plugin, mixed_precision="bf16" if CUDA else "no")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=options.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step, batch in enumerate(batches(options)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    save(model, options.out)
    accelerator.end_training()


def with_trainer(options: argparse.Namespace) -> None:
    model = model_of(options)
    settings: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": blocks_of(model)},
    }
    made = TrainingArguments(
        output_dir=str(options.out), per_device_train_batch_size=options.batch, max_steps=options.steps,
        learning_rate=options.lr, logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not CUDA, bf16=CUDA, **settings,
    )  # fmt: skip
    trainer = Trainer(model, made, train_dataset=samples(options))
    trainer.train()
    save(trainer.model_wrapped, options.out)


def report(step: int, loss: torch.Tensor) -> None:
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def save(model: Any, directory: Path) -> None:
    """Safetensors and the config, or the adapters of LoRA, as from_pretrained and PEFT load them."""
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=state)


def accelerators_of_cpu() -> None:
    """Lets accelerate shard on CPUs, to try this without a GPU: it turns FSDP on for accelerators only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = init


if __name__ == "__main__":
    chosen = arguments()
    if not CUDA and chosen.loop != "plain":
        accelerators_of_cpu()
    {"plain": plain, "accelerate": accelerated, "trainer": with_trainer}[chosen.loop](chosen)
