"""`plan.py`: ranks that hold different modules, as with pipeline parallelism, lose nothing of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.core.checkpoint.trainee import differences, local
from tests.support import on_ranks, rank_mesh


def build(stage: int, mesh: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Stage 0 has biases in a group of their own; stage 1 a layer norm that is not sharded, and buffers."""
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 3), nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))]
    model = nn.ModuleDict({str(stage): layers[stage]})
    if mesh is not None:
        fully_shard(layers[0] if stage == 0 else layers[1][0], mesh=mesh)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1 * seed}
    ]
    if stage == 0:
        groups.insert(0, {"params": [layers[0].bias], "lr": 0.5 * seed})
    else:
        groups.append({"params": list(layers[1][1].parameters()), "lr": 0.25 * seed, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(seed):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        for buffer in model.buffers():
            buffer += 3
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = dict(model.state_dict())
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    found = {name: local(value).clone() for name, value in found.items()}
    return {**found, "groups": [{**group, "params": len(group["params"])} for group in optimizer.param_groups]}


@pytest.mark.parametrize(("world_size", "sharded"), [(2, False), (4, True)])
@on_ranks()
def test_stages_of_a_pipeline(rank: int, world_size: int, tmp_path: Path, sharded: bool) -> None:
    mesh = rank_mesh((2, 2), ("stage", "shard")) if sharded else None
    stage = rank if mesh is None else mesh["stage"].get_local_rank()
    model, optimizer = build(stage, mesh and mesh["shard"], 1)
    expected = values(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, TrainingState(model, optimizer))
            image = manager._image
        manager.wait()
        manager.save(3, TrainingState(model, optimizer))
        assert manager._image is image, "staging memory is kept from save to save"
    other = build(stage, mesh and mesh["shard"], 2)
    CheckpointManager(tmp_path).restore(TrainingState(*other))
    assert differences(values(*other), expected) == []
    for p in other[0].parameters():
        p.grad = torch.zeros_like(p)
    other[1].step()  # with all that it needs
