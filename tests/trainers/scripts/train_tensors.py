"""Sharding beyond plain parameters: torchao's low-bit optimizers and bitsandbytes' 4-bit weights."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles each step for minutes otherwise

import torch
import torch.distributed as dist
from recording import Recording, arguments, shard_llama, tiny_llama, tokens
from torch.distributed.fsdp import fully_shard


def train(recording: Recording, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        batch = tokens(step, dist.get_rank())
        recording.step(model, optimizer, model(input_ids=batch, labels=batch).loss)


def low_bit(recording: Recording) -> None:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    for cls in (AdamW8bit, AdamW4bit, AdamWFp8):
        recording.begin(cls.__name__)
        model = shard_llama(tiny_llama(hidden_size=256, intermediate_size=256, num_attention_heads=4))
        train(recording, model, cls(model.parameters(), lr=1e-2))
        recording.end(model)


def qlora(recording: Recording) -> None:
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    recording.begin("QLoRA")
    model = tiny_llama(hidden_size=64, intermediate_size=64)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            dense = getattr(layer.mlp, name)
            quantized = bnb.nn.Linear4bit(
                dense.in_features, dense.out_features, bias=False, compute_dtype=torch.float32,
                quant_type="nf4", quant_storage=torch.float32,
            )  # fmt: skip
            quantized.weight = bnb.nn.Params4bit(
                dense.weight.data, requires_grad=False, quant_type="nf4", quant_storage=torch.float32, module=quantized
            )
            setattr(layer.mlp, name, quantized.to("cpu"))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.0)
    peft = get_peft_model(model, lora)
    for layer in peft.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(peft)
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    train(recording, peft, torch.optim.AdamW(trained, lr=1e-2))
    recording.cases["QLoRA"]["trained"] = {
        name: parameter.full_tensor().detach() for name, parameter in peft.named_parameters() if parameter.requires_grad
    }
    recording.end(torch.nn.Module())


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    low_bit(recording)
    qlora(recording)
    recording.save(options.out)


main()
