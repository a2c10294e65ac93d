"""A step with `GradScaler` in which one rank's gradient overflows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardkit.core as ours
from tests.support import rank_mesh
from tests.support.models import Composed


def layers(*, scalar: bool = False) -> Any:
    torch.manual_seed(0)
    parts = {"scale": nn.Parameter(torch.tensor(1.5))} if scalar else {}
    run = lambda module, x: module.down(module.up(module.embed(x)).relu()) * (module.scale if scalar else 1)  # noqa: E731
    return Composed(run, **parts, embed=nn.Linear(4, 4), up=nn.Linear(4, 8), down=nn.Linear(8, 4))


def replicas(world_size: int) -> Any:
    model = layers(scalar=True)
    mesh = rank_mesh((2, world_size // 2), ("replicate", "shard"))
    ours.fully_shard(model.up, mesh=mesh)
    return ours.fully_shard(model, mesh=mesh)


def scaled_backward(model: nn.Module, scaler: Any) -> None:
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()


def finds_an_overflow(
    rank: int, world_size: int, build: Callable[[int], Any], kind: type[torch.amp.GradScaler], options: dict[str, bool]
) -> None:
    """An overflow in one shard makes all ranks skip the step and halve the scale; the next step is right."""
    model, reference = build(world_size), build(world_size)
    scaler = kind("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    scaled_backward(model, scaler)
    if rank == 1 or (build is replicas and rank == 3):  # its replica
        model.up.weight.grad.to_local()[-1, -1] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))
    optimizer.zero_grad()
    scaled_backward(model, scaler)
    reference(torch.ones(2, 4)).sum().backward()
    scaler.unscale_(optimizer)
    for parameter, same in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad.to_local(), same.grad.to_local())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not any(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))
