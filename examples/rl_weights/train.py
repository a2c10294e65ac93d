"""Reinforcement learning with weights that go to another process after each step.

Two ranks train a small Llama of transformers, sharded; `server.py`, which has a plain copy, generates. The reward is
the share of generated tokens that repeat the prompt. Start both, in any order:

    python examples/rl_weights/server.py
    torchrun --standalone --nproc-per-node 2 examples/rl_weights/train.py

`--delta` sends only the elements that have changed. `grpo.py` does the same with TRL.
"""

import argparse

import torch
import torch.distributed as dist
from server import complete, make_model

from shardkit.core import clip_grad_norm_, fully_shard
from shardkit.weights import WeightSender

LENGTH, BATCH = 6, 64  # tokens that are generated, and prompts of a rank


def rewards(tokens: torch.Tensor) -> torch.Tensor:
    """1 for each token that repeats the prompt, which is the first."""
    return (tokens[:, 1:] == tokens[:, :1]).float()


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """REINFORCE, with the mean of the batch as the baseline."""
    logits = model(input_ids=tokens[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    reward = rewards(tokens)
    return -((reward - reward.mean()) / (reward.std() + 1e-3) * chosen).mean()


def main() -> None:
    """One rank of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:29660", help="where the server listens")
    parser.add_argument("--weights", default="tcp://127.0.0.1:29650", help="where this trainer sends weights from")
    parser.add_argument("--delta", action="store_true", help="send only what has changed")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    with WeightSender(model, options.weights, dtype=torch.bfloat16, delta=options.delta) as sender:
        for step in range(options.steps):
            report = sender.send(step)
            prompts = torch.randint(model.config.vocab_size, (BATCH, 1))
            seed = step * world_size + rank
            answer = complete(options.server, prompts=prompts.tolist(), tokens=LENGTH, seed=seed)
            tokens = torch.cat([prompts, torch.tensor(answer["completions"])], 1)
            loss_of(model, tokens).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step:2}: reward {rewards(tokens).mean():.2f}, rank 0 has sent {report.nbytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
