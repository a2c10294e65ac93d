"""Reinforcement learning with weights that go to another process after each step.

Two ranks train a small Llama of transformers, sharded; a third process, which has a plain copy, generates. The reward
is the share of generated tokens that repeat the prompt. Start both, in any order:

    torchrun --standalone --nproc-per-node 2 examples/rl_weights/train.py
    python examples/rl_weights/train.py --generate

`--delta` sends only the elements that have changed. The samples come back through a store of rank 0.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit.core import clip_grad_norm_, fully_shard
from shardkit.weights import SendersClosed, WeightReceiver, WeightSender, targets_of

VOCABULARY, LENGTH, BATCH = 12, 6, 128


def make_model() -> LlamaForCausalLM:
    """A model that repeats nothing yet."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def rewards(tokens: torch.Tensor) -> torch.Tensor:
    """1 for each token that repeats the prompt, which is the first."""
    return (tokens[:, 1:] == tokens[:, :1]).float()


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """REINFORCE, with the mean of the batch as the baseline."""
    logits = model(input_ids=tokens[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    reward = rewards(tokens)
    return -((reward - reward.mean()) / (reward.std() + 1e-3) * chosen).mean()


def train(arguments: argparse.Namespace) -> None:
    """One rank of the trainer."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    address = f"tcp://127.0.0.1:{arguments.port}"
    store = dist.TCPStore("127.0.0.1", arguments.port + 1, is_master=rank == 0, wait_for_workers=False)
    with WeightSender(model, address, dtype=torch.bfloat16, delta=arguments.delta) as sender:
        for step in range(arguments.steps):
            report = sender.send(step)
            tokens = torch.frombuffer(bytearray(store.get(str(step))), dtype=torch.uint8).long().view(BATCH, LENGTH + 1)
            loss_of(model, tokens.chunk(world_size)[rank]).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
                print(f"step {step:2}: reward {rewards(tokens).mean():.2f}, rank 0 has sent {report.nbytes} bytes")
    dist.destroy_process_group()


def generate(arguments: argparse.Namespace) -> None:
    """The process that generates, until the trainer closes."""
    model = make_model().eval()
    torch.manual_seed(1)
    with WeightReceiver(f"tcp://127.0.0.1:{arguments.port}", targets_of(model.state_dict())) as receiver:
        store = dist.TCPStore("127.0.0.1", arguments.port + 1, is_master=False, wait_for_workers=False)
        while True:
            try:
                step = receiver.receive()
            except SendersClosed:
                return
            prompt = torch.randint(VOCABULARY, (BATCH, 1))
            mask = torch.ones_like(prompt)
            tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=LENGTH, do_sample=True)
            store.set(str(step), tokens.byte().numpy().tobytes())


def main() -> None:
    """Trains, or generates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", action="store_true", help="be the process that generates")
    parser.add_argument("--delta", action="store_true", help="send only what has changed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29650, help="this port and the next are used")
    arguments = parser.parse_args()
    (generate if arguments.generate else train)(arguments)


if __name__ == "__main__":
    main()
