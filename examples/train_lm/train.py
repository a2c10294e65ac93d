"""The training loop: run it through `python examples/train_lm`, or under torchrun."""

from __future__ import annotations

import math
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import checkpointing
from data import IGNORED, Corpus, held_out_batches, load_corpus, train_batch
from errors import UserError
from model import GPT, VOCABULARY
from processes import failing_together, local_device, process_group, total
from report import Report
from settings import Settings, parse
from shardkit.core import (
    CPUOffloadPolicy,
    FileTier,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    clip_grad_norm_,
    fully_shard,
    offload_activations,
    optimizer_step_on_shards,
    overlap_step,
    placements_for,
)
from shardkit.core.checkpoint import CheckpointManager, TrainingState


def main(argv: Sequence[str]) -> None:
    """One rank of the job. Ctrl-C ends it with exit code 130; whoever started it says how to go on."""
    try:
        run(argv)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes on the one that the terminal sent already
        raise SystemExit(130) from None


def run(argv: Sequence[str]) -> None:
    """Join the others, check the input, train."""
    with process_group():
        with failing_together():
            settings = parse(argv)
            device = local_device(settings.device)
            corpus = load_corpus(settings.data, settings.model.context)
            found = checkpointing.to_go_on_from(settings)
            world = dist.get_world_size()
            if world % settings.tp:
                raise UserError(f"--tp {settings.tp} must divide the {world} processes")
            if world // settings.tp > settings.batch:
                raise UserError(f"--batch {settings.batch} leaves some of {world} processes without work")
        train(settings, device, corpus, found)


def seed_generators(seed: int) -> None:
    """Seed every generator that a checkpoint keeps: a model may draw from any, as for dropout."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(settings: Settings, device: torch.device, corpus: Corpus, found: checkpointing.Checkpoint | None) -> None:
    """Build the sharded model, take the steps that are left, report. Collective."""
    seed_generators(settings.seed + dist.get_rank())
    mesh = process_mesh(settings, device)
    model = build_model(settings, device, mesh)
    optimizers = build_optimizers(model, settings)
    training = settings.training() | {"text": corpus.fingerprint}
    info = {"model": asdict(settings.model), "training": training}
    with failing_together():
        if found is None and not checkpointing.restarted():
            checkpointing.make_way(settings.out)
    offload(settings, device, model, optimizers)
    manager = CheckpointManager(settings.out / "checkpoints", keep=checkpointing.KEPT, every=settings.save_every)
    state = TrainingState(model, optimizers)
    with failing_together():
        start = checkpointing.load(manager, found, state, settings) if found else 0

    rank, world = mesh.get_local_rank("shard"), mesh["shard"].size()
    # Data-parallel ranks take samples in turn; a batch that does not divide is split unevenly and still weighted right.
    samples = range(rank, settings.batch, world)
    tokens_a_step = settings.batch * settings.model.context
    report = Report(settings.out, start, settings.steps, tokens_a_step, device)
    report.introduce(model, corpus, found, training)
    if start == 0:
        report.validation(0, validate(model, settings, corpus, device, mesh))

    for step in range(start, settings.steps):
        set_learning_rate(optimizers, step, settings)
        tokens, targets = train_batch(corpus, settings.seed, step, samples, settings.model.context)
        logits = model(tokens.to(device))
        # This rank's part of the mean over the global batch.
        loss = cross_entropy_sum(logits, targets.to(device)) / tokens_a_step
        # fully_shard averages gradients over the data-parallel ranks; the gradient of the global mean is their sum.
        (loss * world).backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

        done = step + 1
        report.step(done, loss / settings.tp)  # summed over all ranks, of which --tp have the same
        if done % settings.val_every == 0 or done == settings.steps:
            report.flush()
            report.validation(done, validate(model, settings, corpus, device, mesh))
        if manager.due(done) or done == settings.steps:
            report.flush()
            manager.save(done, state, info=info)  # waits for a copy in memory; a thread writes it to disk
            report.resume_clock()
    manager.wait()
    report.finish(generate(model, settings, corpus, device) if settings.sample else "")


def process_mesh(settings: Settings, device: torch.device) -> DeviceMesh:
    """All ranks: data-parallel ones that shard the model, and for each of them `--tp` ranks that cut its matrices."""
    shape = (dist.get_world_size() // settings.tp, settings.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("shard", "tp"))


def cut_matrices(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism of every block: two matrices by their rows, two by their columns, one sum after each pair."""
    from shardkit.tp_adapter import FusedColwiseParallel

    for block in model.blocks:
        plan = {
            "attention.qkv": FusedColwiseParallel("q", "k", "v"),
            "attention.out": RowwiseParallel(),
            "mlp_in": ColwiseParallel(),
            "mlp_out": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def build_model(settings: Settings, device: torch.device, mesh: DeviceMesh) -> GPT:
    """A fresh GPT, each block and the rest sharded over the data-parallel ranks; no rank ever holds it whole."""
    policy = MixedPrecisionPolicy()
    if settings.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = GPT(settings.model)
    if settings.tp > 1:
        cut_matrices(model, mesh["tp"])
    data = mesh["shard"]
    # Muon needs whole matrices: each lies on one rank, which alone updates it. AdamW is content with rows.
    choose = placements_for(model, torch.optim.Muon if settings.optimizer == "muon" else torch.optim.AdamW)
    reshard = settings.reshard_after_forward
    on_host = settings.offload in ("step", "files")
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    options = {"mesh": data, "mp_policy": policy, "offload_policy": place}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, shard_placement_fn=choose, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if on_host else device)
    model.cos, model.sin = model.cos.to(device), model.sin.to(device)  # only parameters are offloaded
    model.reset_parameters(settings.seed)
    return model


def offload(settings: Settings, device: torch.device, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    """Follow --offload, besides the place of the parameters, which `build_model` has chosen."""
    files = settings.out / "offload"
    if settings.offload in ("step", "files"):
        tier = FileTier(files, settings.resident * 2**20) if settings.offload == "files" else None
        for optimizer in optimizers:
            overlap_step(optimizer, states=tier)
    if settings.offload == "activations" and device.type == "cpu":
        files.mkdir(exist_ok=True)
        offload_activations(model, min_bytes=2**10, directory=files)  # small ones as well: it only shows how
    elif settings.offload == "activations":
        offload_activations(model)


def build_optimizers(model: GPT, settings: Settings) -> list[torch.optim.Optimizer]:
    """Over the sharded parameters, so after sharding: Muon for those that are owned, AdamW for the others.

    Vectors do not decay. Muon's updates are scaled to the size of AdamW's, so both take one learning rate.
    """
    owned = [p for p in model.parameters() if any(isinstance(one, Owned) for one in p.placements)]
    matrices = [p for p in model.parameters() if p.ndim > 1 and not any(p is one for one in owned)]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
    optimizer_step_on_shards(optimizer)  # AdamW is element-wise, so a step needs no DTensor operators
    if not owned:
        return [optimizer]
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(owned, **options), optimizer]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], step: int, settings: Settings) -> None:
    """Linear warm-up, then a cosine down to a twentieth; a function of the step alone, so resuming needs no state."""
    if step < settings.warmup:
        factor = (step + 1) / settings.warmup
    else:
        left = (settings.steps - step) / max(1, settings.steps - settings.warmup)
        factor = 0.05 + 0.95 * 0.5 * (1 - math.cos(math.pi * left))
    for group in (one for optimizer in optimizers for one in optimizer.param_groups):
        group["lr"] = settings.lr * factor


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over the targets that count, in nats, fp32."""
    flat = logits.view(-1, VOCABULARY).float()
    return F.cross_entropy(flat, targets.reshape(-1), reduction="sum", ignore_index=IGNORED)


@torch.no_grad()
def validate(model: GPT, settings: Settings, corpus: Corpus, device: torch.device, mesh: DeviceMesh) -> float:
    """Mean loss (nats a byte) over the held-out sequences. Collective."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    rank, world = mesh.get_local_rank("shard"), mesh["shard"].size()
    size = max(1, settings.batch // world)
    for tokens, targets in held_out_batches(corpus, rank, world, size, settings.model.context):
        sums[0] += cross_entropy_sum(model(tokens.to(device)), targets.to(device))
        sums[1] += (targets != IGNORED).sum()
    loss, count = total(sums)
    return loss / count


@torch.no_grad()
def generate(model: GPT, settings: Settings, corpus: Corpus, device: torch.device) -> str:
    """Continue the start of the held-out text by `--sample` bytes; every rank draws the same ones. Collective."""
    # One gather for all bytes instead of one for each: nothing is trained after this.
    model.set_reshard_after_forward(False)
    text = list(corpus.held_out[:64].tobytes())
    generator = torch.Generator().manual_seed(settings.seed)
    # A short window: this model keeps no keys and values between bytes.
    window = min(64, settings.model.context)
    for _ in range(settings.sample):
        logits = model(torch.tensor([text[-window:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / 0.9).softmax(0), 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
