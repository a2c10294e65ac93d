"""Checkpoints without communication: weights and optimizer, bit for bit, over any change of (dp, tp)."""

import math
import pickle
from collections.abc import Callable
from functools import partial
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
from tests.support.twins import assert_equal, square_loss
from tests.tp_adapter.models import mixture
from tests.tp_adapter.trainee import Trainee

Make = Callable[[tuple[int, ...], int], Trainee]
Ways = tuple[Callable[[Trainee, Path], None], Callable[[Trainee, Path], None]]
BY_MANAGER: Ways = (Trainee.save_by_manager, Trainee.load_by_manager)
BY_STOCK: Ways = (Trainee.save, Trainee.load)


def save(rank: int, world_size: int, make: Make, ways: Ways, shape: tuple[int, ...], path: Path) -> Any:
    trainee = make(shape, 1)
    ways[0](trainee, path)
    return trainee.full()


def load(rank: int, world_size: int, make: Make, ways: Ways, shape: Any, path: Path, again: Path) -> Any:
    """Load into a model with other weights; save it to the path `again`, and go on training."""
    trainee = make(shape, 2)
    ways[1](trainee, path)
    full = trainee.full()
    ways[0](trainee, again)
    trainee.trained(5)
    return full


def check_changes(directory: Path, make: Make, ways: Ways, shapes: list[tuple[int, ...]]) -> None:
    """From 2x2 over all these meshes."""
    expected = run_ranks(4, save, make, ways, (2, 2), directory / "0")[0]
    for number, shape in enumerate(shapes):
        paths = (directory / str(number), directory / str(number + 1))
        for seen in run_ranks(math.prod(shape), load, make, ways, shape, *paths):
            assert_equal(seen, expected)


@pytest.mark.daily(name=["uneven"])
@pytest.mark.parametrize("name", ["fused", "uneven", "tied"])
def test_any_change_of_meshes_by_the_manager(tmp_path, name: str):
    """Several boxes on a rank, strided and joint meshes."""
    check_changes(tmp_path, partial(Trainee.of, name), BY_MANAGER, [(4, 1), (1, 2), (1, 2, 2)])


def experts_of(placement: Any, shape: tuple[int, ...], seed: int) -> Trainee:
    """Experts over "ep" and then over the other axis, dense parameters over both."""
    mesh = rank_mesh(shape, ("dp_mod_ep", "ep"))
    torch.manual_seed(seed)
    model = mixture()
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)]))
    shardkit.fully_shard(model.experts, mesh=mesh["dp_mod_ep"], shard_placement_fn=lambda p: placement)
    shardkit.fully_shard(model, mesh=mesh)
    return Trainee(model, square_loss(2, 3, seed=seed)).trained(seed)


@pytest.mark.parametrize("placement", [Shard(0), Blocks(elements=3)], ids=str)
def test_any_change_of_expert_parallelism(tmp_path, placement: Any):
    check_changes(tmp_path, partial(experts_of, placement), BY_STOCK, [(4, 1), (1, 2), (3, 1), (2, 2)])


@pytest.mark.parametrize(("name", "shape"), [("language", (2, 2)), ("uneven", (1, 2, 2))], ids=str)
@on_ranks(4)
def test_interchangeable_with_stock(rank: int, world_size: int, tmp_path, name: str, shape: tuple[int, ...]) -> None:
    for writer, reader in ((stock, shardkit), (shardkit, stock)):
        trainee = Trainee.of(name, shape, 1, writer)
        trainee.save(tmp_path / writer.__name__)
        expected = trainee.full()
        trainee = Trainee.of(name, shape, 2, reader)
        trainee.load(tmp_path / writer.__name__)
        assert_equal(trainee.full(), expected)
        trainee.trained(5)


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
