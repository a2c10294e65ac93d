"""FSDP1's API around modules that tensor parallelism has cut, on a mesh of 2 x 2, against one process alone."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.legacy_fsdp_compat.both import CPU, OURS, TOLERANCE, api, assert_same_tensors
from tests.legacy_fsdp_compat.tensor_parallel import Pair, adam, batch
from tests.support import on_ranks
from tests.support.meshes import rank_mesh

pytestmark = pytest.mark.filterwarnings("ignore")


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Pair(), Pair())


def wrapped(seed: int) -> Any:
    names, mesh, model = api(OURS), rank_mesh((2, 2), ("dp", "tp")), build(seed)
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    policy = names.ModuleWrapPolicy({Pair})
    return names.FSDP(model, device_mesh=mesh["dp"], auto_wrap_policy=policy, use_orig_params=True, device_id=CPU)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, places: list[int], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (sum(model(batch(place, step)).square().mean() for place in places) / len(places)).backward()
        optimizer.step()


def full_state(model: Any) -> dict[str, torch.Tensor]:
    names = api(OURS)
    with names.FSDP.state_dict_type(model, names.StateDictType.FULL_STATE_DICT):
        return model.state_dict()


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(4)
def test_training_and_state_dicts(rank: int, world_size: int, kind: str) -> None:
    names, place = api(OURS), rank_mesh((2, 2), ("dp", "tp")).get_coordinate()[0]
    model, plain = wrapped(0), build(0)
    optimizer, its_optimizer = adam(model), adam(plain)
    train(model, optimizer, [place], range(2))
    train(plain, its_optimizer, [0, 1], range(2))
    assert_same_tensors(dict(plain.state_dict()), full_state(model), **TOLERANCE)
    with names.FSDP.state_dict_type(model, names.StateDictType[f"{kind}_STATE_DICT"]):
        state, optim = model.state_dict(), names.FSDP.optim_state_dict(model, optimizer)
    average = optim["state"]["0.up.weight"]["exp_avg"]
    for value in (state["0.up.weight"], average):
        assert isinstance(value, DTensor) == (kind == "SHARDED")
        assert value.shape == (8, 4)
    whole = average.full_tensor() if kind == "SHARDED" else average
    torch.testing.assert_close(whole, its_optimizer.state[plain[0].up.weight]["exp_avg"], **TOLERANCE)
    other = wrapped(1)
    other_optimizer = adam(other)
    with names.FSDP.state_dict_type(other, names.StateDictType[f"{kind}_STATE_DICT"]):
        other.load_state_dict(state)
        other_optimizer.load_state_dict(names.FSDP.optim_state_dict_to_load(other, other_optimizer, optim))
    train(other, other_optimizer, [place], range(2, 4))
    train(model, optimizer, [place], range(2, 4))
    assert_same_tensors(full_state(model), full_state(other), rtol=0, atol=0)


@on_ranks(4)
def test_whole_parameters(rank: int, world_size: int) -> None:
    names = api(OURS)
    model = wrapped(0)
    with (
        names.FSDP.state_dict_type(model, names.StateDictType.LOCAL_STATE_DICT),
        pytest.raises(RuntimeError, match="LOCAL_STATE_DICT cannot be used with device_mesh"),
    ):
        model.state_dict()
    with names.FSDP.summon_full_params(model), torch.no_grad():
        weight = model[0].up.weight
        assert weight.device_mesh.mesh_dim_names == ("tp",)
        assert_same_tensors(dict(build(0).state_dict()), full_state(model), rtol=0, atol=0)
        torch.testing.assert_close(model(batch(0, 0)), build(0)(batch(0, 0)), **TOLERANCE)
        weight.mul_(2)
    expected = build(0).state_dict()
    expected["0.up.weight"] *= 2
    assert_same_tensors(dict(expected), full_state(model), rtol=0, atol=0)
