"""Muon on `Owned` beside AdamW, in recipes that users combine it with: as one process."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import Blocks, CPUOffloadPolicy, Owned, clip_grad_norm_, fully_shard
from tests.support import on_ranks, rank_mesh
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
