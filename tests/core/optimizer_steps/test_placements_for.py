"""`placements_for` with the optimizers that people use: each, unmodified, steps as in one process, bit for bit."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, placements_for
from tests.core.optimizer_steps.placed_training import check, class_of, optimizer_for, step
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed

# package: class -> where it wants matrices
KINDS: dict[str, type[Any] | None] = {
    "torch.optim.Muon": Owned,
    "torch.optim.Adafactor": Owned,
    "torch.optim.AdamW": None,
    "torch.optim.SGD": None,
    "torch.optim.Adagrad": None,
    "torch.optim.RMSprop": None,
    "torchao.optim.AdamW8bit": Blocks,
    "torchao.optim.Adam4bit": Blocks,
    "torchao.optim.AdamWFp8": Blocks,
    "bitsandbytes.optim.AdamW8bit": Blocks,
    "bitsandbytes.optim.Lion8bit": Blocks,
    "bitsandbytes.optim.RMSprop8bit": Blocks,
    "bitsandbytes.optim.PagedAdamW8bit": Blocks,
    "bitsandbytes.optim.AdEMAMix8bit": Owned,
    "pytorch_optimizer.SOAP": Owned,
    "pytorch_optimizer.Shampoo": Owned,
    "pytorch_optimizer.ScalableShampoo": Owned,
    "pytorch_optimizer.CAME": Owned,
    "pytorch_optimizer.SPlus": Owned,
    "pytorch_optimizer.SCION": Owned,
    "heavyball.SOAP": Owned,
}


def net() -> nn.Module:
    torch.manual_seed(1)
    table, up, down = nn.Embedding(70, 64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False)
    return Composed(None, table=table, up=up, down=down, head=nn.Linear(64, 70, bias=False))


def trainees(model: nn.Module, kind: str) -> list[nn.Parameter]:
    """The parameters to train: for Muon and the like, the matrices between embedding and head."""
    if KINDS[kind] is Owned and "8bit" not in kind:
        return [model.up.weight, model.down.weight]
    return list(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_common_optimizers_step_as_in_one_process(rank: int, world_size: int, kind: str) -> None:
    warnings.simplefilter("ignore")
    reference, model = net(), net()
    choose = placements_for(model, class_of(kind))
    fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    wanted = KINDS[kind]
    for parameter in (model.up.weight, model.down.weight):
        assert isinstance(parameter.placements[0], wanted or Shard)
    options = {"momentum": 0.9} if kind.endswith("SGD") else {}
    ours, theirs = (optimizer_for(kind, trainees(one, kind), **options) for one in (model, reference))
    if wanted is None:
        optimizer_step_on_shards(ours)
    for number in range(4):
        for one, optimizer in ((model, ours), (reference, theirs)):
            step(one, optimizer, number, scale=0.01)
            optimizer.zero_grad()
        check(model, reference.parameters(), number)
