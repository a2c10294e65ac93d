"""`full_tensor()` of a sharded parameter is the tensor that it was made of, for every cut of it."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardkit.core import fully_shard
from tests.support import on_ranks
from tests.support.models import Composed
from tests.tp_adapter.models import axes

MESHES = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (1, 2, 2), (2, 1, 2)]}
SHAPES = [(1,), (3,), (9,), (8, 3), (1, 6), (5, 7), (0, 3), (2, 4, 3)]


def multiplied(model: Any, x: float) -> torch.Tensor:
    return (getattr(model.weight, "to_local", lambda: model.weight)() * x).sum()


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks(timeout=300.0)
def test_every_cut(rank: int, world_size: int) -> None:
    """Shard, compare the rank's part, gather, compare; then the same with forward, backward and the gradient."""
    for mesh_shape, shape in itertools.product(MESHES[world_size], SHAPES):
        data, tensor = axes(mesh_shape)
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        tp_placements = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placement, dim in itertools.product(tp_placements, range(len(shape))):
            weight = nn.Parameter(distribute_tensor(whole, tensor, [placement]))
            holder: Any = Composed(multiplied, weight=weight)
            local = holder.weight.to_local().clone()
            fully_shard(holder, mesh=data, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            what = f"{shape} {placement} cut on {dim} over {mesh_shape}"
            sharded = holder.weight
            chunks = local.chunk(data.size(-1), dim)
            mine = data.get_local_rank(data.ndim - 1)
            expected = chunks[mine] if mine < len(chunks) else local.narrow(dim, 0, 0)
            assert torch.equal(sharded.to_local().reshape(-1), expected.reshape(-1)), what
            assert torch.equal(sharded.detach().full_tensor(), whole), what
            holder(2.0).backward()
            assert torch.equal(holder.weight.grad.full_tensor(), torch.full_like(whole, 2.0)), what
            assert holder.weight.grad.placements == sharded.placements, what
