"""8-bit optimizers on plain shards: bitsandbytes', which DTensors cannot take, and torchao's, which they can."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardkit.core import fully_shard, optimizer_step_on_shards, overlap_step
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.core.optimizer_steps.placed_training import optimizer_for
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal

NAMES = ["AdamW8bit", "Lion8bit", "Adam", "SGD8bit"]


def net() -> nn.Sequential:
    """Weights of 64 x 256 elements and less; on four ranks the smallest biases are one number, or nothing."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 3))


def build(world_size: int, name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = net()
    shard_each(*model[::2], model, mesh=rank_mesh((world_size,)))
    optimizer = bitsandbytes(name, model.parameters())
    optimizer_step_on_shards(optimizer)
    return model, optimizer


def bitsandbytes(name: str, parameters: Any) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if name.startswith("SGD") else {}
    return optimizer_for(f"bitsandbytes.optim.{name}", parameters, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.daily(world_size=[2])
@pytest.mark.parametrize("name", NAMES)
@on_ranks(1, 2, 4)
def test_steps_as_on_plain_shards(rank: int, world_size: int, name: str) -> None:
    model, optimizer = build(world_size, name)
    plain = [nn.Parameter(p.to_local().clone()) for p in model.parameters()]
    reference = bitsandbytes(name, plain)
    for number in range(4):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain, strict=True):
            theirs.grad = mine.grad.to_local().clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for mine, theirs in zip(model.parameters(), plain, strict=True):
            assert torch.equal(mine.to_local(), theirs), number
            state = pytree.tree_map_only(DTensor, DTensor.to_local, dict(optimizer.state[mine]))
            assert_equal(state, dict(reference.state[theirs]), f"step {number}")
    weight = optimizer.state[model[0].weight]
    if name != "Adam":
        assert weight["state1"].to_local().dtype == torch.uint8
        assert weight["absmax1"].shape == (64,), "all ranks' scales"


def _saved(rank: int, world_size: int, path: Path) -> list[Any]:
    model, optimizer = build(world_size, "AdamW8bit")
    for number in range(3):
        step(model, optimizer, number)
    with CheckpointManager(path) as manager:
        manager.save(3, TrainingState(model, optimizer))
    return everything(model, optimizer)


def _loaded(rank: int, world_size: int, path: Path) -> list[Any]:
    model, optimizer = build(world_size, "AdamW8bit", seed=1)
    step(model, optimizer, 9)  # so that there is state to read into
    with CheckpointManager(path) as manager:
        manager.restore(TrainingState(model, optimizer))
    loaded = everything(model, optimizer)
    step(model, optimizer, 3)  # training goes on
    return loaded


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights, and the 8-bit state, of which every rank has a part (of an owned parameter only the owner has state)."""
    found = []
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        eight_bit = {key: state[key] for key in ("state1", "absmax1", "state2", "absmax2") if "absmax1" in state}
        found.append({key: one.full_tensor().clone() for key, one in {"weight": p.detach(), **eight_bit}.items()})
    return found


def test_a_checkpoint_of_two_ranks_loads_on_four(tmp_path: Path) -> None:
    expected = run_ranks(2, _saved, tmp_path / "two")[0]
    seen = run_ranks(4, _loaded, tmp_path / "two")[0]
    assert "absmax1" in seen[0]
    assert_equal(dict(enumerate(seen)), dict(enumerate(expected)), "loaded")


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_settings_of_single_parameters_hold(rank: int, world_size: int, overlaps: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model, optimizer = build(world_size, "AdamW8bit")
    if overlaps:
        overlap_step(optimizer)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    try:
        manager.override_config(model[0].weight, "optim_bits", 32)
        manager.register_module_override(model[2], "weight", {"optim_bits": 32})
        step(model, optimizer, 0)
        if overlaps:
            manager.register_parameters(model.parameters())
            with pytest.raises(RuntimeError, match="register_parameters has noted settings by the places"):
                step(model, optimizer, 1)
    finally:
        manager.pid2config.clear()
        manager.index2config.clear()
        manager.module_weight_config_triple.clear()
    for layer in model[:4:2]:
        assert optimizer.state[layer.weight]["state1"].to_local().dtype == torch.float32


@on_ranks(3)
def test_blocks_that_cross_ranks_are_refused(rank: int, world_size: int) -> None:
    model, optimizer = build(world_size, "AdamW8bit")
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'0\.weight' of shape \(256, 64\) .* not whole blocks of 256"):
        step(model, optimizer, 0)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
@on_ranks(2, timeout=120)
def test_torchao_steps_as_on_dtensors(rank: int, world_size: int, name: str) -> None:
    warnings.simplefilter("ignore")
    models, optimizers = [], []
    for on_shards in (True, False):
        torch.manual_seed(0)
        model = fully_shard(net(), mesh=rank_mesh((world_size,)))
        optimizer = getattr(pytest.importorskip("torchao.optim"), name)(model.parameters(), lr=0.01)
        if on_shards:
            optimizer_step_on_shards(optimizer)
        models.append(model)
        optimizers.append(optimizer)
    with torch.compiler.set_stance("force_eager"):
        for number in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, 10 * number + rank)
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        for key, value in optimizers[1].state[theirs].items():
            assert type(optimizers[0].state[mine][key]) is type(value), key
