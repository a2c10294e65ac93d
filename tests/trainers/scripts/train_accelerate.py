"""accelerate's FSDP2: prepare, accumulation, clipping, RAM-efficient loading, save and load of state."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from recording import (
    Recording,
    accelerators_of_cpu,
    arguments,
    gradient_norm,
    resumptions,
    sharded_modules,
    tiny_llama,
    tokens,
)
from torch.utils.data import DataLoader


def accelerator_for(accumulate: int = 1, mixed: str = "no", **settings) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        **settings,
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate, mixed_precision=mixed)


def prepared(accelerator: Accelerator):
    model = tiny_llama(tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader([tokens(step, 0, batch=1)[0] for step in range(24)], batch_size=2)
    return accelerator.prepare(model, optimizer, loader)


def train(recording: Recording, accelerator: Accelerator, prepared_objects, steps: int) -> None:
    model, optimizer, loader = prepared_objects
    for step, batch in enumerate(loader):
        if step == steps:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                recording.note("gradient norms", gradient_norm(model))
                recording.note("clipped", accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        recording.note("losses", loss)


def main() -> None:
    options, recording = arguments(), Recording()
    accelerators_of_cpu()
    cases = {
        "plain": {},
        "accumulation": {"accumulate": 2},
        "RAM-efficient": {"cpu_ram_efficient_loading": True},
        "checkpointing in bf16": {"activation_checkpointing": True, "mixed": "bf16"},
    }
    for case, settings in () if options.only_across else cases.items():
        recording.begin(case)
        accelerator = accelerator_for(**settings)
        objects = prepared(accelerator)
        recording.note("sharded modules", sharded_modules(objects[0]))
        train(recording, accelerator, objects, 4)
        if case == "plain":
            accelerator.save_state(str(options.own))
            full = accelerator.get_state_dict(objects[0])  # of the main process alone
            recording.note("full", full["model.layers.0.mlp.up_proj.weight"] if accelerator.is_main_process else None)
        recording.end(objects[0])
    for case, checkpoint in resumptions(options).items():
        recording.begin(case)
        accelerator = accelerator_for()
        objects = prepared(accelerator)
        accelerator.load_state(str(checkpoint))
        train(recording, accelerator, objects, 2)
        recording.end(objects[0])
    recording.save(options.out)


main()
