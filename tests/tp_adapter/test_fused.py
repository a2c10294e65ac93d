"""Fused weights: trained as one process does, whole and in order in every state, saved under either kind of names."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardkit.core as shardkit
from shardkit.tp_adapter import CheckedLoadPlanner, logical_state_dict
from shardkit.tp_adapter.boxes import BoxedTensor
from tests.core.single_process import assert_close
from tests.support import rank_mesh, run_ranks
from tests.tp_adapter.models import SPECS, FusedModel, build, shard
from tests.tp_adapter.test_checkpoints import Trainee
from tests.tp_adapter.test_training import NAMES

MESHES = [(2, 2), (1, 4), (4, 1), (1, 2, 2)]


def trains_like_one_process(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    whole, model, spec = build("fused"), build("fused"), SPECS["fused"]
    mesh = rank_mesh(shape, NAMES[len(shape)])
    data = mesh["dp"] if len(shape) == 2 else mesh["dp_replicate", "dp_shard"]
    spec.parallelize(model, mesh["tp"])
    shard(model, shardkit, data)
    ranks = data.mesh.flatten().tolist()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (whole, model)]
    theirs = dict(whole.named_parameters())
    for step in range(3):
        for seed in range(len(ranks)):
            (spec.loss(whole, 10 * step + seed) / len(ranks)).backward()
        spec.loss(model, 10 * step + ranks.index(rank)).backward()
        for fqn, parameter in model.named_parameters():
            assert_close(parameter.grad, theirs[fqn].grad, f"gradient of {fqn}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for fqn, parameter in model.named_parameters():
            assert_close(parameter, theirs[fqn], fqn)
    full = shardkit.full_state_dict(model, rank0_only=False)
    for fqn, tensor in whole.state_dict().items():
        assert_close(full[fqn], tensor, fqn)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_trains_like_one_process(shape: tuple[int, ...]):
    run_ranks(4, trains_like_one_process, shape)


def save_logical(rank: int, world_size: int, path: Path, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    trainee = Trainee.of("fused", shape, 1)
    state = trainee.state()
    names = {kind: logical_state_dict(trainee.model, state[kind]) for kind in ("model", "optimizer")}
    dcp.save(names, checkpoint_id=path)
    return trainee.full()


def load_logical(rank: int, world_size: int, path: Path, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    trainee = Trainee.of("fused", shape, 2)
    state = trainee.state()
    names = {kind: logical_state_dict(trainee.model, state[kind]) for kind in ("model", "optimizer")}
    dcp.load(names, checkpoint_id=path, planner=CheckedLoadPlanner())
    return trainee.full()


def load_unfused(rank: int, world_size: int, path: Path) -> Any:
    """The checkpoint of logical names fits a model that has gate and up as two layers; save it again from there."""
    model = FusedModel(fused=False)
    shardkit.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, planner=CheckedLoadPlanner())
    dcp.save(state, checkpoint_id=path.with_name("again"))
    gathered = {name: value.full_tensor() for name, value in state["model"].items()}
    for fqn, states in state["optimizer"]["state"].items():
        gathered |= {f"{fqn}.{key}": one.full_tensor() for key, one in states.items() if isinstance(one, DTensor)}
    return gathered


def test_logical_names(tmp_path: Path):
    expected = run_ranks(4, save_logical, tmp_path / "first", (2, 2))[0]
    unfused = run_ranks(2, load_unfused, tmp_path / "first")[0]
    for block in range(2):
        for kind in ("weight", "bias"):
            for name, suffix in (("model", ""), ("optimizer", ".exp_avg")):
                parts = [unfused[f"blocks.{block}.{part}.{kind}{suffix}"] for part in ("gate", "up")]
                assert torch.equal(torch.cat(parts), expected[f"{name}.blocks.{block}.gate_up.{kind}{suffix}"])
    for shape in MESHES:
        seen = run_ranks(4, load_logical, tmp_path / "again", shape)[0]
        assert seen.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(seen[name], expected[name])], shape


def taken_name(rank: int, world_size: int) -> None:
    trainee = Trainee.of("fused", (1, 1), 1)
    state = trainee.model.state_dict()
    state["blocks.0.up.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'blocks\.0\.gate_up\.weight' would be saved as 'blocks\.0\.up\.weight'"):
        logical_state_dict(trainee.model, state)


def test_a_taken_name_is_refused():
    run_ranks(1, taken_name)


def reassigned(rank: int, world_size: int) -> None:
    """Tensors that a user assigns know nothing of boxes; the sharded parameter tells them."""
    trainee = Trainee.of("fused", (1, 2), 1)
    state = {
        name: DTensor.from_local(value.to_local() + 1, value.device_mesh, value.placements, run_check=False)
        for name, value in trainee.model.state_dict().items()
    }
    assert not isinstance(state["blocks.0.gate_up.weight"].to_local(), BoxedTensor)
    trainee.model.load_state_dict(state, assign=True)
    SPECS["fused"].loss(trainee.model, 1)
    after = trainee.model.state_dict()["blocks.0.gate_up.weight"]
    assert torch.equal(after.to_local().plain(), state["blocks.0.gate_up.weight"].to_local())
    assert [tuple(chunk.offsets) for chunk in after.__create_chunk_list__()] == [(rank * 4, 0), (8 + rank * 4, 0)]


def test_assigned_tensors_get_their_boxes():
    run_ranks(2, reassigned)
