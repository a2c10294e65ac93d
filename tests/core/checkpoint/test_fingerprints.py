"""`agreement.py`, `plan.py`: ranks that hold different modules lose nothing; under one name, an error says so."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from shardkit.core.checkpoint.agreement import Fingerprints, fingerprints
from shardkit.core.checkpoint.leaves import Captured, Leaves
from tests.core.checkpoint.trainee import Held, local, saved
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.twins import differences


def plain_stage(rank: int) -> nn.Module:
    """Each rank its own values, in modules of the same names and shapes."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5))


def other_shape(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5 + rank // 2, bias=False))


def turned(rank: int) -> nn.Module:
    """As many values, all of them zero."""
    model = nn.Sequential(nn.Linear(2 + rank, 3 - rank, bias=False))
    nn.init.zeros_(model[0].weight)
    return model


def sharded_stage(rank: int) -> nn.Module:
    """Two ranks share a stage, the other two another one of the same names."""
    mesh = rank_mesh((2, 2), ("stage", "shard"))
    torch.manual_seed(rank // 2)
    model = nn.Sequential(nn.Linear(5, 5, bias=False))
    fully_shard(model, mesh=mesh["shard"])
    return model


def replicas(rank: int) -> nn.Module:
    torch.manual_seed(rank // 2)
    return nn.Sequential(fully_shard(nn.Linear(5, 5), mesh=rank_mesh((2, 2), ("replicate", "shard"))))


def shard_of_a_replica(rank: int) -> nn.Module:
    model = replicas(0)
    with torch.no_grad():
        model[0].bias.to_local().add_(rank // 3)
    return model


def refused(rank: int, world_size: int, path: Path, build: Any) -> str:
    manager = CheckpointManager(path)
    made = build(rank)
    state = TrainingState(made) if isinstance(made, nn.Module) else made
    with pytest.raises(CheckpointError) as error:
        manager.save(1, state, blocking=True)
    assert type(error.value) is CheckpointError  # nothing is damaged
    torch.manual_seed(0)
    manager.save(2, TrainingState(nn.Linear(2, 1)), blocking=True)  # the manager still works
    return str(error.value)


@pytest.mark.parametrize(
    ("world_size", "build", "text"),
    [
        (2, plain_stage, "model.0.weight: ranks [1] hold other values than ranks [0] under this name"),
        (3, other_shape, "model.0.weight: ranks hold different values under this name: ranks [0, 1]"),
        (2, turned, "model.0.weight: ranks hold different values under this name: ranks [0] torch.float32 (3, 2)"),
        (4, sharded_stage, "model.0.weight: ranks [2] hold other values than ranks [0] under this name"),
        (4, replicas, "model.0.weight: ranks [2] hold other values than ranks [0] under this name"),
        (4, shard_of_a_replica, "model.0.bias: ranks [3] hold other values than ranks [1] under this name"),
    ],
    ids=["plain", "shapes", "turned", "sharded", "replicas", "shard"],
)
def test_modules_that_share_their_names(tmp_path, world_size: int, build: Any, text: str):
    for seen in run_ranks(world_size, refused, tmp_path, build):
        assert seen.startswith(f"saving step 1 failed: {text}") and "per_rank=" in seen
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def differing(what: str, rank: int) -> TrainingState:
    """A run whose optimizer has stepped once, and then differs from rank to rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    mesh = rank_mesh((2, 1), ("replicate", "shard")) if "replica" in what else rank_mesh((2,), ("shard",))
    fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sharded, plain = (optimizer.state[layer.weight] for layer in model)
    average = {"weight": model[0].weight.detach().clone()}
    match what:
        case "plain tensor of a shard":
            sharded["mine"] = model[0].weight.to_local() * 0 + rank
        case "statistic":
            sharded["mine"] = torch.tensor(float(rank))
        case "count":
            sharded["step"] += rank
        case "momentum":
            plain["exp_avg"] += rank
        case "replica":  # as after broadcast_replicas, which knows no optimizer
            sharded["exp_avg"].to_local().add_(rank)
        case "average of a replica":
            average["weight"].to_local().add_(rank)
        case "learning rate":
            optimizer.param_groups[0]["lr"] *= 1 + rank
        case "schedule":
            scheduler.last_epoch += rank
        case "none on one rank" if rank == 1:
            del optimizer.state[model[0].weight]
    return TrainingState(model, optimizer, scheduler, user={"average": Held(average)})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("plain tensor of a shard", r"optimizer.state.0.weight.mine: a plain tensor of shape \(2, 4\)"),
        ("statistic", r"optimizer.state.0.weight.mine: ranks \[1\] hold other values than ranks \[0\] under this name"),
        ("count", r"optimizer.state.0.weight.step: ranks \[1\] hold other values"),
        ("momentum", r"optimizer.state.1.weight.exp_avg: ranks \[1\] hold other values"),
        ("replica", r"optimizer.state.0.weight.exp_avg: ranks \[1\] hold other values"),
        ("average of a replica", r"average.weight: ranks \[1\] hold other values .*; make it equal on all ranks"),
        ("learning rate", r"optimizer.param_groups.0.lr: ranks \[1\] hold other values"),
        ("schedule", r"scheduler.last_epoch: ranks \[1\] hold other values"),
        ("none on one rank", r"optimizer.state.0.weight.exp_avg: .*; some ranks lack theirs"),
    ],
)
def test_state_that_differs_from_rank_to_rank(tmp_path, what: str, text: str):
    for seen in run_ranks(2, refused, tmp_path, partial(differing, what)):
        assert re.search(text, seen)


@on_ranks(2)
def test_buffers_may_differ(rank: int, world_size: int, tmp_path) -> None:
    """Parameters are the same, running statistics are each rank's own, as in data parallelism."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(rank)
    saved(tmp_path, TrainingState(model), 1)


def of(value: torch.Tensor) -> Fingerprints:
    path = ("model", "w")
    return fingerprints(Captured(Leaves({path: value}), Leaves(), (path,)), alike=True)


@pytest.mark.parametrize("shape", [(), (1,), (1000,), (1025,), (64, 1024), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_another_value_shows(shape: tuple[int, ...], dtype: torch.dtype):
    """It shows if all random values differ, and if a single sampled one does."""
    torch.manual_seed(0)
    one = torch.randn(shape).to(dtype)
    same = of(one)
    assert of(one.clone()) == same
    assert of(~one if dtype is torch.bool else one + 1) != same
    first = one.clone()
    first.view(-1)[0] = not first.view(-1)[0] if dtype is torch.bool else first.view(-1)[0] + 1
    assert of(first) != same
    if one.ndim == 2:
        assert of(one.T) != same


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
def test_stages_of_a_pipeline(rank: int, world_size: int, tmp_path, sharded: bool) -> None:
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
