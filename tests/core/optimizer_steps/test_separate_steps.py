"""Optimizers on `Owned`: classes that were tried, or that users vouch for, step as in one process; others raise."""

import json
from typing import Any

import pytest
import torch

from shardkit.core import Owned, plan_owners
from tests.core.optimizer_steps.placed_training import Layers, matrices, shard_layers
from tests.core.optimizer_steps.separate_optimizers import DATA, tried
from tests.support import on_ranks

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
