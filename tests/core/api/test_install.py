"""install() and uninstall(): whose names they replace, that stock's engine does not run meanwhile, and bad input."""

import contextlib
import functools
import gc
import importlib
import io
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.models import Block
from tests.support.twins import assert_equal, local_gradients

HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
STOCKS = (stock.fully_shard,)  # a name of its own would be replaced, too
BEFORE_INSTALL = functools.partial(stock.fully_shard, reshard_after_forward=False)  # not itself stock's function


def _bound() -> dict[str, Any]:
    return {home: vars(importlib.import_module(home))["fully_shard"] for home in HOMES}


def _train() -> list[Tensor]:
    """As a trainer does that knows torch only."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Block(8, 12), nn.Linear(8, 4))
    mesh = rank_mesh((dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        torch.manual_seed(10 * dist.get_rank() + step)
        loss = model(torch.randn(2, 8)).square().mean()
        loss.backward()
        seen += [loss.detach(), *local_gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(model, stock.FSDPModule)
    assert isinstance(model, shardkit.FSDPModule) == (fully_shard is not STOCKS[0])
    return seen


@on_ranks(2, isolated=True)
def test_there_and_back(rank: int, world_size: int) -> None:
    user = types.ModuleType("users_module")
    user.shard, user.other = stock.fully_shard, "untouched"
    sys.modules["users_module"] = user
    assert set(_bound().values()) == {STOCKS[0]}
    replaced = shardkit.install()
    assert {f"{home}.fully_shard" for home in HOMES} <= set(replaced)
    assert "users_module.shard" in replaced
    assert not any(name.startswith("shardkit.") for name in replaced)
    (ours,) = set(_bound().values())
    assert ours is not STOCKS[0]
    assert user.shard is ours
    assert shardkit.install() == ()
    late = types.ModuleType("late_module")
    late.fully_shard = STOCKS[0]
    sys.modules["late_module"] = late
    assert shardkit.install() == ("late_module.fully_shard",)
    assert pickle.loads(pickle.dumps(ours)) is ours

    seen = _train()
    with pytest.raises(RuntimeError, match=r"reaches torch's own fully_shard"):
        BEFORE_INSTALL(nn.Linear(3, 3))
    keeps_ours = types.ModuleType("keeps_ours")
    keeps_ours.fully_shard = shardkit.fully_shard
    sys.modules["keeps_ours"] = keeps_ours
    assert set(shardkit.uninstall()) == {*replaced, "late_module.fully_shard"}
    assert set(_bound().values()) == {STOCKS[0]}
    assert user.shard is STOCKS[0]
    assert keeps_ours.fully_shard is shardkit.fully_shard
    assert shardkit.uninstall() == ()
    assert_equal(seen, _train())


@on_ranks(1, isolated=True)
def test_mixed_engines_are_refused(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stock.fully_shard(model[0])
    with pytest.raises(ValueError, match=r"torch's own fully_shard has sharded module '0'"):
        shardkit.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"sharded modules already: FSDPLinear; call shardkit\.core\.install\(\)"):
        shardkit.install()
    assert stock.fully_shard is STOCKS[0]
    del model
    gc.collect()
    shardkit.install()  # that model is gone
    shardkit.uninstall()


@on_ranks(4, isolated=True)
def test_torch_around_ours_is_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardkit.fully_shard(model[0], mesh=mesh["inner"])
    with pytest.raises(RuntimeError, match="overlapping meshes"):
        stock.fully_shard(model, mesh=mesh["inner"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardkit.fully_shard(model[0], mesh=mesh["inner"])
    stock.fully_shard(model, mesh=mesh["outer"])  # for torch this is tensor parallelism
    with pytest.raises(RuntimeError, match=r"torch's own fully_shard has sharded the FSDPSequential around '0', which"):
        model(torch.randn(2, 4))


@on_ranks(1, isolated=True)
def test_an_unknown_torch_is_refused(rank: int, world_size: int) -> None:
    part = sys.modules["torch.distributed.fsdp._fully_shard"]
    kept = part.fully_shard
    del part.fully_shard
    with pytest.raises(RuntimeError, match=r"has no torch\.distributed\.fsdp\._fully_shard\.fully_shard"):
        shardkit.install()
    part.fully_shard = lambda module: module
    with pytest.raises(RuntimeError, match=r"_fully_shard\.fully_shard is not torch's own but <function .*<lambda>"):
        shardkit.install()
    part.fully_shard = kept
    assert set(_bound().values()) == {STOCKS[0]}


@pytest.mark.parametrize("announce", [True, False])
@on_ranks(2, isolated=True)
def test_rank_0_says_once_that_the_engine_runs(rank: int, world_size: int, announce: bool) -> None:
    shardkit.install(announce=announce)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            model = stock.fully_shard(nn.Linear(5, 3))
            model(torch.randn(2, 5)).sum().backward()
    line = f"shardkit {shardkit.__version__} runs FSDPLinear: 18 parameters in 1 groups, 2 ranks\n"
    assert said.getvalue() == (line if announce and rank == 0 else "")


# -- FSDP1 -------------------------------------------------------------------------------------------------------------


@on_ranks(2, isolated=True)
def test_fsdp1_names(rank: int, world_size: int) -> None:
    """test_autoinstall.py runs a script of FSDP1 that names torch only."""
    legacy = importlib.import_module("shardkit.legacy_fsdp_compat")
    shardkit.install(fsdp1=False)
    replaced = shardkit.install(fsdp1=True)
    assert "torch.distributed.fsdp.FullyShardedDataParallel" in replaced
    assert shardkit.install(fsdp1=True) == ()
    assert stock.FullyShardedDataParallel is legacy.FullyShardedDataParallel
    shardkit.uninstall()
    assert stock.FullyShardedDataParallel is not legacy.FullyShardedDataParallel
