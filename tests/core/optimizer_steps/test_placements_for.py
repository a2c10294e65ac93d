"""Optimizers on the placements that they want: each, unmodified, steps as in one process, or is refused."""

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, placements_for, plan_owners
from tests.core.optimizer_steps.placed_training import (
    Layers,
    check,
    class_of,
    matrices,
    optimizer_for,
    shard_layers,
    step,
)
from tests.core.optimizer_steps.separate_optimizers import DATA, tried
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed

# -- placements_for ----------------------------------------------------------------------------------------------------


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


# -- classes on `Owned` that were tried, or that users vouch for -------------------------------------------------------


KNOWN: dict[str, Any] = json.loads(DATA.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("package", KNOWN)
def test_classes_that_step_on_each_parameter_by_itself(package: str) -> None:
    """If this fails: python -m tests.core.optimizer_steps.separate_optimizers --write."""
    pytest.importorskip(package.replace("-", "_"))
    assert tried(package) == KNOWN[package]


class Own(torch.optim.SGD):
    """A subclass of a known class: it may do anything."""


@on_ranks(2)
def test_an_unknown_class_is_refused_before_it_steps(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, lambda p: Owned(rank=0))
    model(torch.ones(2, 12)).sum().backward()
    before = [p.full_tensor() for p in model.parameters()]
    for kind in (Own, torch.optim.LBFGS):
        optimizer = kind(matrices(model), lr=0.1)
        name = kind.__name__
        said = rf"{name} is not known .* 'layers\.0\.weight' is placed .* {name}\.steps_each_parameter_alone = True"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                optimizer.step(lambda: 1.0)
    assert all(map(torch.equal, [p.full_tensor() for p in model.parameters()], before))

    class Vouched(Own):
        steps_each_parameter_alone = True

    Vouched(matrices(model), lr=0.1).step()
    assert not all(map(torch.equal, [p.full_tensor() for p in model.parameters()], before))


@on_ranks(1)
def test_one_rank_alone_may_combine_them(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, plan_owners(Layers()))
    torch.optim.LBFGS(matrices(model)).step(lambda: model(torch.ones(2, 12)).sum())
