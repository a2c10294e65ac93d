"""transformers' Trainer: native FSDP2 (DistributedConfig), and FSDP2 through accelerate with resume and generate."""

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from noting import Noting
from recording import Recording, accelerators_of_cpu, arguments, resumptions, sharded_modules, tiny_llama, tokens
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig


class Generating(TrainerCallback):
    """Generates samples during training, as people do."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                seen = model.generate(
                    tokens(7, 0, batch=1, length=4), max_new_tokens=4, do_sample=False, pad_token_id=0
                )
            self.recording.note("generated", seen)


DATA = [{"input_ids": row, "labels": row} for row in (tokens(step, 0, batch=1)[0] for step in range(32))]


def trainer_for(recording: Recording, directory, model, *callbacks: TrainerCallback, **settings) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_steps=2, seed=0, **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=DATA, callbacks=[Noting(recording), *callbacks])


def in_fsdp2(recording: Recording, directory) -> Trainer:
    model = tiny_llama(tie_word_embeddings=False)
    return trainer_for(recording, directory, model, Generating(recording), fsdp=True, fsdp_config=FSDP)


FSDP = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


def native(recording: Recording, options) -> None:
    """A model that transformers has sharded while loading it."""
    recording.begin("native")
    saved = options.own / "model"
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(saved)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(fsdp_size=2))
    recording.note("sharded modules", sharded_modules(model))
    trainer_for(recording, options.own, model, save_strategy="no", gradient_accumulation_steps=2).train()
    recording.end(model)


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    if not options.only_across:
        native(recording, options)
    accelerators_of_cpu()
    AcceleratorState._reset_state(reset_partial_state=True)
    if not options.only_across:
        recording.begin("FSDP2")
        trainer = in_fsdp2(recording, options.own)
        trainer.train()
        recording.note("sharded modules", sharded_modules(trainer.model_wrapped))
        recording.end(trainer.model_wrapped)
    for case, checkpoints in resumptions(options).items():
        recording.begin(case)
        trainer = in_fsdp2(recording, options.own / case)
        trainer.train(resume_from_checkpoint=str(checkpoints / "checkpoint-2"))
        recording.end(trainer.model_wrapped)
    recording.save(options.out)


main()
