"""`torch.amp.GradScaler` on models that several axes cut: an overflow on one rank is found on all."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit.core as ours
from tests.core.api.overflow import finds_an_overflow, layers, replicas
from tests.support import on_ranks, rank_mesh, run_ranks


def scalar_first(world_size: int) -> Any:
    """As CLIP: a scalar among the root's parameters, before all others."""
    model = layers(scalar=True)
    ours.fully_shard(model.up)
    return ours.fully_shard(model)


def replicated_first(world_size: int) -> Any:
    model = layers()
    return ours.fully_shard(model, shard_placement_fn=lambda p: Replicate() if p.shape == (4, 4) else None)


def tensor_parallel(world_size: int) -> Any:
    model, mesh = layers(), rank_mesh((world_size // 2, 2), ("dp", "tp"))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"embed": whole, "up": ColwiseParallel(), "down": RowwiseParallel()})
    return ours.fully_shard(model, mesh=mesh["dp"])


def replicated_beside_tensor_parallel(world_size: int) -> Any:
    model, mesh = layers(), rank_mesh((world_size // 2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    choose = lambda p: Replicate() if p.shape in ((4, 4), (8, 4)) else None  # noqa: E731
    return ours.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=choose)


OVERLOOKED = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11's GradScaler overlooks it if the first parameter is 0-dim"
)


@pytest.mark.parametrize(
    ("build", "world_size", "options"),
    [
        pytest.param(scalar_first, 2, {"foreach": False}, marks=OVERLOOKED),
        pytest.param(scalar_first, 3, {"fused": True}, marks=OVERLOOKED),
        pytest.param(replicas, 4, {"foreach": True}, marks=OVERLOOKED),
        pytest.param(replicated_first, 2, {"foreach": False}, marks=OVERLOOKED),
        (tensor_parallel, 4, {"foreach": False}),
        pytest.param(replicated_beside_tensor_parallel, 4, {"foreach": True}, marks=OVERLOOKED),
    ],
)
def test_an_overflow_on_one_rank_is_found_on_all(
    build: Callable[[int], Any], world_size: int, options: dict[str, bool]
) -> None:
    run_ranks(world_size, finds_an_overflow, build, torch.amp.GradScaler, options)


@on_ranks(2)
def test_the_class_of_a_scalar_gradient_does_not_spread(rank: int, world_size: int) -> None:
    model = scalar_first(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    copied = copy.deepcopy(model.scale.grad)
    assert type(copied) is DTensor and torch.equal(copied.to_local(), model.scale.grad.to_local())
    optimizer.step()
    assert {type(value) for value in optimizer.state[model.scale].values()} <= {torch.Tensor, DTensor}
