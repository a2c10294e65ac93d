"""Checkpoints without communication: weights and optimizer, bit for bit, over any change of (dp, tp)."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardkit.core as shardkit
from shardkit.core import Blocks
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.tp_adapter.models import OPTIMIZERS, SPECS, mixture
from tests.tp_adapter.trainee import Trainee, assert_equal


def save_by_manager(rank: int, world_size: int, path: Path, name: str, shape: tuple[int, ...]) -> Any:
    trainee = Trainee.of(name, shape, 1)
    trainee.save_by_manager(path)
    return trainee.full()


def load_by_manager(rank: int, world_size: int, path: Path, again: Path, name: str, shape: Any) -> Any:
    trainee = Trainee.of(name, shape, 2)
    trainee.load_by_manager(path)
    full = trainee.full()
    trainee.save_by_manager(again)
    SPECS[name].loss(trainee.model, 5).backward()
    trainee.optimizer.step()
    return full


@pytest.mark.daily(name=["uneven"])
@pytest.mark.parametrize("name", ["fused", "uneven", "tied"])
def test_any_change_of_meshes_by_the_manager(tmp_path, name: str):
    """2x2 -> 4x1 -> 1x2 -> 1x2x2: several boxes on a rank, strided and joint meshes."""
    expected = run_ranks(4, save_by_manager, tmp_path / "0", name, (2, 2))[0]
    for number, shape in enumerate([(4, 1), (1, 2), (1, 2, 2)]):
        paths = (tmp_path / str(number), tmp_path / str(number + 1))
        for seen in run_ranks(math.prod(shape), load_by_manager, *paths, name, shape):
            assert_equal(expected, seen)


def experts_of(shape: tuple[int, ...], seed: int, placement: Any) -> Trainee:
    """Experts over "ep" and then over the other axis, dense parameters over both."""
    mesh = rank_mesh(shape, ("dp_mod_ep", "ep"))
    torch.manual_seed(seed)
    model = mixture()
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)]))
    shardkit.fully_shard(model.experts, mesh=mesh["dp_mod_ep"], shard_placement_fn=lambda p: placement)
    shardkit.fully_shard(model, mesh=mesh)
    trainee = Trainee(model, OPTIMIZERS["adamw"](model.parameters()))
    model(torch.randn(2, 3)).square().mean().backward()
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return trainee


def save_experts(rank: int, world_size: int, path: Path, shape: tuple[int, ...], placement: Any) -> Any:
    trainee = experts_of(shape, 1, placement)
    trainee.save(path)
    return trainee.full()


def load_experts(rank: int, world_size: int, path: Path, again: Path, shape: Any, placement: Any) -> Any:
    trainee = experts_of(shape, 2, placement)
    trainee.load(path)
    trainee.save(again)
    return trainee.full()


@pytest.mark.parametrize("placement", [Shard(0), Blocks(elements=3)], ids=str)
def test_any_change_of_expert_parallelism(tmp_path, placement: Any):
    expected = run_ranks(4, save_experts, tmp_path / "0", (2, 2), placement)[0]
    for number, shape in enumerate([(4, 1), (1, 2), (3, 1), (2, 2)]):
        paths = (tmp_path / str(number), tmp_path / str(number + 1))
        for seen in run_ranks(math.prod(shape), load_experts, *paths, shape, placement):
            assert_equal(expected, seen)


@pytest.mark.parametrize(("name", "shape"), [("language", (2, 2)), ("uneven", (1, 2, 2))], ids=str)
@on_ranks(4)
def test_interchangeable_with_stock(rank: int, world_size: int, tmp_path, name: str, shape: tuple[int, ...]) -> None:
    for writer, reader in ((stock, shardkit), (shardkit, stock)):
        trainee = Trainee.of(name, shape, 1, writer)
        trainee.save(tmp_path / writer.__name__)
        expected = trainee.full()
        trainee = Trainee.of(name, shape, 2, reader)
        trainee.load(tmp_path / writer.__name__)
        assert_equal(expected, trainee.full())
        SPECS[name].loss(trainee.model, 5).backward()
        trainee.optimizer.step()


@pytest.mark.parametrize(
    ("damage", "said"),
    [("hole", "leave holes: they hold 64 of its 128"), ("twice", "overlap: [0:8, 0:8] and [0:8, 0:8]")],
)
@on_ranks(2)
def test_a_damaged_checkpoint_is_refused(rank: int, world_size: int, tmp_path, damage: str, said: str) -> None:
    """A rank's box is missing, or there twice."""
    path, trainee = tmp_path, Trainee.of("tensor", (2, 1), 1)
    trainee.save(path)
    dist.barrier()
    if rank == 0:
        metadata = dcp.FileSystemReader(path).read_metadata()
        chunks = metadata.state_dict_metadata["model.blocks.0.up.weight"].chunks
        if damage == "hole":
            chunks.pop()
        else:
            chunks[1] = chunks[0]
        with (path / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
    dist.barrier()
    with pytest.raises(dcp.api.CheckpointException) as refused:
        trainee.load(path)
    assert f"model.blocks.0.up.weight: the checkpoint's boxes of shape (16, 8) {said}" in str(refused.value)
    assert "placements (Shard(dim=0)," in str(refused.value)
