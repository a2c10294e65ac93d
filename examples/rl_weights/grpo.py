"""TRL's GRPO, whose completions come from servers that get the weights after each step.

TRL's `GRPOTrainer` trains a small Llama on two ranks, sharded; `server.py` generates. TRL asks for completions by its
argument `rollout_func`, which is public and experimental; a callback sends the weights. The reward is the share of
tokens that repeat the prompt. Start both, in any order:

    python examples/rl_weights/server.py
    torchrun --standalone --nproc-per-node 2 examples/rl_weights/grpo.py

The server goes on with the last version when the training has ended.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import shardkit.core

shardkit.core.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from datasets import Dataset  # noqa: E402
from server import complete, make_model  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from shardkit.weights import WeightSender  # noqa: E402

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "lynx"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, and one for the end."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*WORDS, "end"])}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="end", pad_token="end")


def sharded_model(directory: Path) -> PreTrainedModel:
    """The model, sharded by transformers while it loads."""
    if dist.get_rank() == 0:
        make_model().save_pretrained(directory)
    dist.barrier()
    shards = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(directory, distributed_config=shards, dtype=torch.float32)


def repeats(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of the words that are the prompt."""
    said = [completion.split() for completion in completions]
    return [words.count(prompt) / max(len(words), 1) for prompt, words in zip(prompts, said, strict=True)]


class Servers(TrainerCallback):
    """Sends the weights to the servers after each optimizer step, and fetches completions from them."""

    def __init__(self, urls: list[str], weights: str, delta: bool) -> None:
        self.urls, self.weights, self.delta = urls, weights, delta

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **_: Any) -> None:
        count = len(self.urls)
        self.sender = WeightSender(model, self.weights, dtype=torch.bfloat16, delta=self.delta, receivers=count)
        self.sender.send(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.sender.send(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.sender.close()

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: a completion of each of this rank's prompts."""
        ids = trainer.processing_class(prompts)["input_ids"]
        step, rank = trainer.state.global_step, dist.get_rank()
        answer = complete(
            self.urls[rank % len(self.urls)],
            prompts=ids,
            tokens=trainer.args.max_completion_length,
            seed=step * dist.get_world_size() + rank,
            stop=trainer.eos_token_ids,
        )
        if answer["version"] != step:
            raise RuntimeError(f"the server generates with version {answer['version']}, expected {step}")
        return {"prompt_ids": ids, "completion_ids": answer["completions"], "logprobs": answer["logprobs"]}


def main() -> None:
    """One rank of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", default=["http://127.0.0.1:29660"], help="URLs of one or more")
    parser.add_argument("--weights", default="tcp://127.0.0.1:29650", help="where this trainer sends weights from")
    parser.add_argument("--delta", action="store_true", help="send only what has changed")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, help="for the model, the same for all ranks")
    options = parser.parse_args()
    out = options.out or Path(tempfile.gettempdir()) / "shardkit-grpo"
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # about rollout_func
    dist.init_process_group()
    arguments = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=64, num_generations=16, max_completion_length=6,
        max_steps=options.steps, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=10,
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    servers = Servers(options.servers, options.weights, options.delta)
    trainer = GRPOTrainer(
        sharded_model(out), repeats, arguments, processing_class=make_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": word} for word in WORDS]),
        rollout_func=servers.rollout, callbacks=[servers],
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
