"""A training script in the style of FSDP1 tutorials: wrap, train with mixed precision, save, load, go on.

It runs with stock torch as it stands:

    torchrun --standalone --nproc-per-node 2 examples/fsdp1_tutorial/train.py

and on shardkit with its FSDP imports changed, by hand or by
`python -m shardkit.legacy_fsdp_compat migrate script`. Both print the same losses.
"""

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as everyone calls it
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

WIDTH, HEADS, CONTEXT, SYMBOLS = 32, 4, 16, 32


class Layer(nn.Module):
    """Self-attention and a feed-forward part, each with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        normed = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


class Net(nn.Module):
    """Predicts the next symbol."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols):
        x = self.embedding(symbols) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def setup():
    """One process a device; on a machine without a GPU the processes share its CPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


def wrap(model, args, device):
    """Each layer is a unit; the root holds embedding and head."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    bfloat16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=bfloat16 if args.bfloat16 else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=False),
        device_id=device,
        sync_module_states=device.type == "cuda",  # stock refuses it on CPU
        use_orig_params=args.use_orig_params,
    )


def batch(step, device):
    """Counting sequences, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(SYMBOLS, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    return ((start + stride * torch.arange(CONTEXT + 1)) % SYMBOLS).to(device)


def train(model, optimizer, scheduler, steps, args, device):
    """Two micro-batches a step, the first without gradient synchronisation."""
    model.train()
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in range(2):
            symbols = batch(2 * step + micro, device)
            if micro == 0:
                with model.no_sync():
                    total += step_loss(model, symbols)
            else:
                total += step_loss(model, symbols)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / dist.get_world_size():.5f}, gradient norm {norm.item():.4f}")


def step_loss(model, symbols):
    """Half of the step's loss: forward and backward of one micro-batch."""
    logits = model(symbols[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), symbols[:, 1:].flatten()) / 2
    loss.backward()
    return loss.detach()


def save(model, optimizer, path):
    """Whole weights and optimizer state, in one file."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        weights = model.state_dict()
        state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": state}, path)
    dist.barrier()


def load(model, optimizer, path):
    """The reverse; every rank reads the file."""
    checkpoint = torch.load(path, weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"]))


def make(args, device, seed):
    """A wrapped model with its optimizer and schedule."""
    torch.manual_seed(seed)
    model = wrap(Net(args.layers), args, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], default="FULL_SHARD")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--use-orig-params", action="store_true")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/tutorial.pt"))
    args = parser.parse_args()
    device = setup()
    model, optimizer, scheduler = make(args, device, seed=0)
    half = args.steps // 2
    train(model, optimizer, scheduler, range(half), args, device)
    save(model, optimizer, args.checkpoint)
    fresh, fresh_optimizer, _ = make(args, device, seed=1)  # as a new job would
    load(fresh, fresh_optimizer, args.checkpoint)
    scheduler = torch.optim.lr_scheduler.StepLR(fresh_optimizer, step_size=1, gamma=0.95, last_epoch=half - 1)
    train(fresh, fresh_optimizer, scheduler, range(half, args.steps), args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
