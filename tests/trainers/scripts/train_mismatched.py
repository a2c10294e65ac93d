"""Rank 0 goes another way than rank 1: accelerate's loop, or transformers' Trainer. Each rank writes down its error.

A rank ends with its error, as any would, but with status 0: for another the launcher ends the other rank at once.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from recording import accelerators_of_cpu, tiny_llama, tokens
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

BATCH = tokens(0, 0, batch=1)
STEP = 3


class Other(Exception):
    """Of the user's own code."""


def another_way(where: str, at: str, model) -> None:
    """Rank 0 raises, or runs a forward more than rank 1, if `at` is the place for it."""
    if int(os.environ["RANK"]) == 0 and where.endswith(at):
        if where.startswith("raises"):
            raise Other(where)
        if where.startswith("without grad"):
            with torch.no_grad():
                model(input_ids=BATCH, labels=BATCH)
        else:
            model(input_ids=BATCH, labels=BATCH)


def accelerate(where: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_llama(tie_word_embeddings=False, num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader([tokens(step, 0, batch=1)[0] for step in range(32)], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            if step == STEP:
                another_way(where, "before backward", model)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step == STEP:
            another_way(where, "after a step", model)
            if where == "returns early" and accelerator.process_index == 0:
                return


class Callback(TrainerCallback):
    def __init__(self, where: str) -> None:
        self.where = where

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == STEP:
            another_way(self.where, "between micro-batches", model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == STEP:
            another_way(self.where, "after a step", model)


def trainer(where: str, directory: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in (tokens(step, 0, batch=1)[0] for step in range(64))]
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    model = tiny_llama(tie_word_embeddings=False, num_hidden_layers=4)
    Trainer(model, arguments, train_dataset=data, callbacks=[Callback(where)]).train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--loop", choices=["accelerate", "Trainer"])
    parser.add_argument("--where")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    accelerators_of_cpu()
    seen = "no error"
    try:
        accelerate(options.where) if options.loop == "accelerate" else trainer(options.where, options.out)
    except (RuntimeError, Other) as error:
        seen = f"{type(error).__name__}: {error}"
    (options.out / f"rank{rank}").write_text(seen)
    os._exit(0)


main()
