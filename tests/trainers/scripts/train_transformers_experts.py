"""transformers' own expert parallelism (DistributedConfig(ep_size=...)) with its FSDP2."""

from pathlib import Path

import torch
import torch.distributed as dist
from recording import Recording, arguments, resumptions, sharded_modules, tokens
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

SIZES = {"fsdp_size": 2, "ep_size": 2}


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        router_jitter_noise=0.0, output_router_logits=False, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def save(directory: Path, model, optimizer) -> None:
    """By transformers' own ways."""
    model.save_pretrained(directory / "whole")
    model.save_pretrained(directory / "shards", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(directory / "optimizer"))


def go_on(recording: Recording, directory: Path) -> None:
    """Notes the loaded weights, and one step more."""
    for way in ("whole", "shards"):
        model = MixtralForCausalLM.from_pretrained(directory / way, distributed_config=DistributedConfig(**SIZES))
        for name, value in model.state_dict().items():
            recording.note(f"{way} {name}", value)
    optimizer = adamw(model)
    load_optimizer_distributed(model, optimizer, str(directory / "optimizer"))
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            recording.note(f"{key} {name}", value)
    train_one(recording, model, optimizer, 3)
    recording.end(model)


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # foreach takes one mesh for all


def train_one(recording: Recording, model, optimizer, step: int) -> None:
    batch = tokens(step, dist.get_rank())

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        for name, parameter in model.named_parameters():
            recording.note(f"gradient {name}", parameter.grad)

    recording.step(model, optimizer, model(input_ids=batch, labels=batch).loss, backward)


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    start = options.own / "model"
    if dist.get_rank() == 0 and not options.only_across:
        mixtral().save_pretrained(start)
    dist.barrier()
    if not options.only_across:
        recording.begin("experts over 2")
        model = MixtralForCausalLM.from_pretrained(start, distributed_config=DistributedConfig(**SIZES))
        recording.note("sharded modules", sharded_modules(model))
        optimizer = adamw(model)
        for step in range(3):
            train_one(recording, model, optimizer, step)
        save(options.own, model, optimizer)
        recording.end(model)
    for case, place in resumptions(options).items():
        recording.begin(case)
        go_on(recording, place)
    recording.save(options.out)


main()
