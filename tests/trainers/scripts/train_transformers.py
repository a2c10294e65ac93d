"""transformers' Trainer: FSDP2 through accelerate, with resume and generate during training."""

import torch
from noting import Noting
from recording import Recording, accelerators_of_cpu, arguments, sharded_modules, tiny_llama, tokens
from transformers import Trainer, TrainerCallback, TrainingArguments


class Generating(TrainerCallback):
    """What people do to see samples during training."""

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


def trainer_for(recording: Recording, directory, model, **settings) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_steps=2, seed=0, **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=DATA, callbacks=[Noting(recording), Generating(recording)])


FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


def main() -> None:
    options, recording = arguments(), Recording()
    accelerators_of_cpu()
    recording.begin("FSDP2")
    trainer = trainer_for(recording, options.own, tiny_llama(tie_word_embeddings=False), **FSDP)
    trainer.train()
    recording.note("sharded modules", sharded_modules(trainer.model_wrapped))
    recording.end(trainer.model_wrapped)

    recording.begin("resumed")
    trainer = trainer_for(recording, options.own / "resumed", tiny_llama(tie_word_embeddings=False), **FSDP)
    trainer.train(resume_from_checkpoint=str((options.load or options.own) / "checkpoint-2"))
    recording.end(trainer.model_wrapped)

    recording.save(options.out)


main()
