"""Muon on `Owned` beside AdamW, in recipes that users combine it with, and resumed on other ranks: as one process."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import Blocks, CPUOffloadPolicy, Owned, clip_grad_norm_, fully_shard
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.core.optimizer_steps.placed_training import build, check, optimizer_for, sharded, step
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.models import TiedModel


def placement(parameter: nn.Parameter) -> object:
    """Matrices owned, the table in blocks of elements, vectors in rows."""
    if parameter.ndim == 2:
        return Blocks(elements=24) if parameter.shape[0] == 19 else Owned()
    return None


def split(model: nn.Module, muon_first: bool) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and p.shape[0] != 19]
    rest = [p for p in trained if p.ndim != 2 or p.shape[0] == 19]
    made = [lambda: torch.optim.Muon(matrices, lr=0.02), lambda: torch.optim.AdamW(rest, lr=0.01, foreach=muon_first)]
    return [make() for make in (made if muon_first else reversed(made))]


def backward(model: nn.Module, rank: int, number: int, parts: int) -> None:
    """With several parts, they are added up before they are reduced."""
    for part in range(parts):
        model.set_requires_gradient_sync(part == parts - 1)
        generator = torch.Generator().manual_seed(100 * number + 10 * part + rank)
        model(torch.randint(19, (4, 6), generator=generator)).square().mean().backward()


@pytest.mark.daily(muon_first=[True])
@pytest.mark.parametrize("muon_first", [True, False])
@pytest.mark.parametrize(("world_size", "setting"), [(4, "hsdp"), (3, "offload"), (3, "accumulated")])
@on_ranks()
def test_muon_beside_adamw(rank: int, world_size: int, setting: str, muon_first: bool) -> None:
    torch.manual_seed(4)
    reference = TiedModel()  # with a tied head, a frozen matrix and a number
    model = copy.deepcopy(reference)
    hsdp = setting == "hsdp"
    mesh = rank_mesh((2, world_size // 2), ("replicate", "shard")) if hsdp else rank_mesh((world_size,))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if setting == "offload" else {}
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    ours, theirs = split(model, muon_first), split(reference, muon_first)
    for number in range(4):
        backward(model, rank, number, 2 if setting == "accumulated" else 1)
        before = torch.stack([p.grad.full_tensor().norm() for p in model.parameters() if p.grad is not None]).norm()
        norm = clip_grad_norm_(model.parameters(), 1e-2)
        torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, before)
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = None if parameter.grad is None else parameter.grad.full_tensor()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:  # by way of a file, into other optimizers
            again = split(model, muon_first)
            for optimizer, other in zip(ours, again, strict=True):
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            ours = again
        for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), whole), (number, name)
    start = TiedModel().state_dict()
    moved = [name for name, value in reference.state_dict().items() if not torch.equal(value, start[name])]
    assert "blocks.0.up.weight" in moved


KINDS = {
    "torch.optim.Muon": "owned",
    "pytorch_optimizer.SOAP": "owned",
    "torchao.optim.AdamW8bit": "owned",
    "bitsandbytes.optim.AdamW8bit": "owned",
}


def _save(rank: int, world_size: int, path: Path) -> None:
    warnings.simplefilter("ignore")
    for kind, place in KINDS.items():
        model = sharded(build(), world_size, place)
        optimizer = optimizer_for(kind, model.parameters())
        for number in range(2):
            step(model, optimizer, number)
        with CheckpointManager(path / kind) as manager:
            manager.save(2, TrainingState(model, optimizer))


def _resume(rank: int, world_size: int, path: Path) -> None:
    warnings.simplefilter("ignore")
    for kind, place in KINDS.items():
        reference = build()
        alone = optimizer_for(kind, reference.parameters())
        model = sharded(build(), world_size, place)
        optimizer = optimizer_for(kind, model.parameters())
        assert CheckpointManager(path / kind).restore(TrainingState(model, optimizer)) is not None
        for number in range(4):
            step(reference, alone, number)
            if number >= 2:
                step(model, optimizer, number)
        check(model, [p.detach() for p in reference.parameters()], kind)


@pytest.mark.daily(saved_on=[2])
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(2, (3,)), (4, (1, 3))])
def test_resumes_on_other_ranks_with_the_bits_of_one_process(
    saved_on: int, resumed_on: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(saved_on, _save, tmp_path, timeout=120)
    for world_size in resumed_on:
        run_ranks(world_size, _resume, tmp_path, timeout=120)
