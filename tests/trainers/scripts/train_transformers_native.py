"""transformers' Trainer on a model that transformers has sharded while loading it (DistributedConfig)."""

import torch.distributed as dist
from noting import Noting
from recording import Recording, arguments, sharded_modules, tiny_llama, tokens
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

DATA = [{"input_ids": row, "labels": row} for row in (tokens(step, 0, batch=1)[0] for step in range(32))]


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    recording.begin("native")
    saved = options.own / "model"
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(saved)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(fsdp_size=2))
    recording.note("sharded modules", sharded_modules(model))
    settings = TrainingArguments(
        output_dir=str(options.own), per_device_train_batch_size=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", seed=0, gradient_accumulation_steps=2,
    )  # fmt: skip
    Trainer(model, settings, train_dataset=DATA, callbacks=[Noting(recording)]).train()
    recording.end(model)
    recording.save(options.out)


main()
