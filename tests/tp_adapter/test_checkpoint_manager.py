"""`CheckpointManager` over tensor parallelism: several boxes on a rank, strided and joint meshes, any to any other."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.support import run_ranks
from tests.tp_adapter.models import SPECS
from tests.tp_adapter.trainee import Trainee, assert_equal


def save(rank: int, world_size: int, path: Path, name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    trainee = Trainee.of(name, shape, 1)
    CheckpointManager(path).save(1, TrainingState(trainee.model, trainee.optimizer), blocking=True)
    return trainee.full()


def restore(rank: int, world_size: int, path: Path, again: Path, name: str, shape: Any) -> dict[str, torch.Tensor]:
    """Restores into an optimizer that has taken no step, saves the restored state again, and goes on training."""
    trainee = Trainee.of(name, shape, 2)
    trainee.optimizer = torch.optim.AdamW(trainee.model.parameters())
    state = TrainingState(trainee.model, trainee.optimizer)
    assert CheckpointManager(path).restore(state) is not None
    full = trainee.full()
    CheckpointManager(again).save(1, state, blocking=True)
    SPECS[name].loss(trainee.model, 5).backward()
    trainee.optimizer.step()
    return full


@pytest.mark.daily(name=["uneven"])
@pytest.mark.parametrize("name", ["fused", "uneven", "tied"])
def test_any_change_of_meshes(tmp_path: Path, name: str):
    """2x2 -> 4x1 -> 1x2 -> 1x4 -> 1x2x2."""
    expected = run_ranks(4, save, tmp_path / "0", name, (2, 2))[0]
    for number, shape in enumerate([(4, 1), (1, 2), (1, 4), (1, 2, 2)]):
        world_size = math.prod(shape)
        for seen in run_ranks(world_size, restore, tmp_path / f"{number}", tmp_path / f"{number + 1}", name, shape):
            assert_equal(expected, seen)
