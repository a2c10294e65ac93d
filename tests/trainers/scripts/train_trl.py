"""TRL: supervised fine-tuning with PEFT's LoRA, and DPO, on accelerate's FSDP2."""

import torch
from datasets import Dataset
from noting import Noting
from peft import LoraConfig
from recording import Recording, accelerators_of_cpu, arguments, sharded_modules, tiny_llama, tokens
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

FSDP = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
SHARED = {
    "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True,
    "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 0, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(64)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w1", eos_token="w2", unk_token="w0")


def text(step: int, rank: int, length: int) -> str:
    return " ".join(f"w{token}" for token in tokens(step, rank, batch=1, length=length)[0].tolist())


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def run(recording: Recording, case: str, trainer) -> None:
    trainer.add_callback(Noting(recording))
    trainer.train()
    recording.note("sharded modules", sharded_modules(trainer.model_wrapped))
    recording.end(trainer.model_wrapped)


def main() -> None:
    options, recording = arguments(), Recording()
    accelerators_of_cpu()
    texts = Dataset.from_list([{"text": text(step, 0, 12)} for step in range(24)])
    for case, peft in (("SFT with LoRA", lora()), ("SFT", None)):
        recording.begin(case)
        config = SFTConfig(output_dir=str(options.own / case), max_length=16, **SHARED, **FSDP)
        model = tiny_llama(tie_word_embeddings=False)
        trainer = SFTTrainer(model, config, train_dataset=texts, processing_class=tokenizer(), peft_config=peft)
        run(recording, case, trainer)
    pairs = Dataset.from_list(
        [{"prompt": text(step, 0, 4), "chosen": text(step, 1, 4), "rejected": text(step, 2, 4)} for step in range(24)]
    )
    recording.begin("DPO with LoRA")
    config = DPOConfig(output_dir=str(options.own / "dpo"), max_length=16, **SHARED, **FSDP)
    trainer = DPOTrainer(
        tiny_llama(tie_word_embeddings=False), args=config, train_dataset=pairs, processing_class=tokenizer(),
        peft_config=lora(),
    )  # fmt: skip
    run(recording, "DPO with LoRA", trainer)
    recording.save(options.out)


torch.set_num_threads(1)
main()
