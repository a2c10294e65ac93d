"""Trains the model of examples/train_lm under several compression policies and prints bytes, time and loss as a table.

The ranks are processes of one host that are told to
exchange over gloo, as ranks of different hosts would, but over the loopback device. There bytes cost next to nothing,
so the times show the cost of rounding, not the time that fewer bytes save.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from shardkit.core import CompressionPolicy, events, fully_shard, optimizer_step_on_shards
from tests.support import close_pools, networked_mesh, run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_lm"))
from data import load_corpus, train_batch
from model import GPT, ModelConfig

MODEL = ModelConfig(layers=4, width=256, heads=4, context=128)
POLICIES: dict[str, CompressionPolicy | None] = {
    "full precision": None,
    "gather bf16": CompressionPolicy(gather="bf16"),
    "gather int8": CompressionPolicy(gather="int8"),
    "reduce bf16": CompressionPolicy(reduce="bf16"),
    "reduce int8": CompressionPolicy(reduce="int8"),
    "both int8": CompressionPolicy(gather="int8", reduce="int8"),
}


@dataclass(frozen=True)
class Job:
    """A training job, the same for every policy; `text` are files and directories to learn."""

    model: ModelConfig = MODEL
    steps: int = 60
    batch: int = 2
    lr: float = 1e-3
    text: tuple[Path, ...] = (Path(asyncio.__file__).parent,)


@dataclass(frozen=True)
class Result:
    """One rank's: its losses (nats a byte), bytes that it sends in a step, and seconds of each step."""

    losses: list[float]
    gather_bytes: int
    reduce_bytes: int
    seconds: list[float]


def train(rank: int, world_size: int, policy: CompressionPolicy | None, job: Job) -> Result:
    """Trains from scratch. Collective over all ranks."""
    model = _model(policy, job, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), fused=True)
    optimizer_step_on_shards(optimizer)
    corpus = load_corpus(job.text, job.model.context)
    samples = range(rank * job.batch, (rank + 1) * job.batch)
    losses, seconds = [], []
    sent = {events.GatherStarted: 0, events.ReduceStarted: 0}

    def count(event: events.Event) -> None:
        if type(event) in sent:
            sent[type(event)] += event.wire_bytes

    with events.subscribe(count):
        for step in range(job.steps):
            tokens, targets = train_batch(corpus, 0, step, samples, job.model.context)
            begin = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
    return Result(losses, sent[events.GatherStarted] // job.steps, sent[events.ReduceStarted] // job.steps, seconds)


def _model(policy: CompressionPolicy | None, job: Job, world_size: int) -> GPT:
    mesh = networked_mesh((world_size,))
    with torch.device("meta"):
        model = GPT(job.model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, compression_policy=policy)
    fully_shard(model, mesh=mesh, compression_policy=policy)
    model.to_empty(device="cpu")
    model.reset_parameters(seed=0)
    return model


def last_loss(results: list[Result], steps: int) -> float:
    """Mean loss of all ranks over the last steps."""
    return fmean(loss for result in results for loss in result.losses[-steps:])


HEAD = "| policy | gather, MiB | reduce, MiB | step, ms | loss |\n|---|---|---|---|---|"


def row(name: str, results: list[Result]) -> str:
    """Markdown: bytes that a rank sends in a step, the slowest rank's median step, mean loss of the last 20 steps."""
    gather, reduce = (fmean(getattr(r, f"{kind}_bytes") for r in results) / 2**20 for kind in ("gather", "reduce"))
    step = max(median(result.seconds) for result in results) * 1e3
    return f"| {name} | {gather:.1f} | {reduce:.1f} | {step:.0f} | {last_loss(results, 20):.3f} |"


def main() -> None:
    """Run every policy and print the table."""
    from benchmarks import compression  # rank processes find `train` by this name, not as __main__
    from benchmarks.side_by_side.surroundings import surroundings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, help="ranks (2)")
    parser.add_argument("--steps", type=int, default=Job.steps, help=f"optimizer steps ({Job.steps})")
    args = parser.parse_args()
    job = compression.Job(steps=args.steps)
    facts = surroundings("cpu", "adamw", None) | {"optimizer": "AdamW(fused=True)"}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{job.model}, {args.world_size} ranks of {job.batch} sequences, {job.steps} steps\n\n{HEAD}", flush=True)
    for name, policy in POLICIES.items():
        print(row(name, run_ranks(args.world_size, compression.train, policy, job, timeout=600.0)), flush=True)
    close_pools()


if __name__ == "__main__":
    main()
