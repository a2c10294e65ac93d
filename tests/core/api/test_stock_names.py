"""The private names of stock that others read: the same values as stock's where both have them, and no writes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

import shardkit.core as shardkit
from shardkit.core.stock_names import GROUP_NAMES, PARAM_NAMES, STATE_NAMES
from tests.support import on_ranks, rank_mesh
from tests.support.models import Block, Composed

STATE = ("_is_root", "_auto_reshard_after_forward", "_training_state", "_mp_policy")
MESH = (
    "shard_mesh_dim",
    "shard_mesh_size",
    "shard_mesh_rank",
    "replicate_mesh_dim",
    "replicate_mesh_size",
    "replicate_mesh_rank",
)


def _sharded(api: Any, names: tuple[str, ...] = ("shard",)) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(7, 12), nn.Linear(7, 3))
    shape = (dist.get_world_size(),) if len(names) == 1 else (2, dist.get_world_size() // 2)
    mesh = rank_mesh(shape, names)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    api.fully_shard(model[0], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return api.fully_shard(model, mesh=mesh, mp_policy=policy)


def _seen(model: nn.Module) -> dict[str, Any]:
    """The attributes that a trainer reads, of both modules."""
    values: dict[str, Any] = {}
    for name, module in (("root", model), ("block", model[0])):
        state = module._get_fsdp_state()
        assert state is stock.fully_shard.state(module)
        group = state._fsdp_param_group
        assert [group] == list(getattr(state, "_fsdp_param_groups", [group]))  # torch 2.11's has the other name only
        for attribute in STATE:
            value = getattr(state, attribute)
            if attribute == "_mp_policy":
                value = (value.param_dtype, value.reduce_dtype, value.output_dtype, value.cast_forward_inputs)
            values[f"{name}.{attribute}"] = value
        for attribute in MESH:
            values[f"{name}.{attribute}"] = getattr(group.mesh_info, attribute, 1 if "size" in attribute else None)
        values[f"{name}.ranks"] = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        values[f"{name}.group"] = (group._training_state, group._reshard_after_forward, group.is_unsharded)
        for param in group.fsdp_params:
            key = f"{name}.{param._param_fqn}"
            values[key] = (param._orig_size, param.sharded_param.to_local().shape, param.orig_dtype)
    return values


@pytest.mark.parametrize(("world_size", "names"), [(2, ("shard",)), (4, ("replicate", "shard"))])
@on_ranks()
def test_values_are_those_of_stock(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    models = [_sharded(api, names) for api in (stock, shardkit)]
    x = torch.randn(2, 7)
    for model in models:
        model(x).sum().backward()
    expected, seen = (_seen(model) for model in models)
    if len(names) == 1:  # stock's mesh_info of one axis has no replicate_* attributes, ours are None and 1 and 0
        for values in (expected, seen):
            values.update({key: None for key in values if "replicate" in key})
    assert seen == expected


def _note_states(module: Any) -> None:
    """The training states that weights with all-gather hooks ask for."""
    state = stock.fully_shard.state(module)
    module.noted.append((state._training_state, state._fsdp_param_group._training_state))


def _watch(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Notes them in forward, and in the middle of backward."""
    _note_states(module)
    hidden = module.linear(x)
    hidden.register_hook(lambda gradient: _note_states(module))
    return module.linear(hidden)


@on_ranks(2)
def test_training_states(rank: int, world_size: int) -> None:
    noted = []
    for api in (stock, shardkit):
        model = nn.Sequential(*(Composed(_watch, linear=nn.Linear(5, 5), noted=[]) for _ in range(2)))
        for child in model:
            api.fully_shard(child)
        api.fully_shard(model)
        model(torch.randn(2, 5)).sum().backward()
        for child in model:
            _note_states(child)
        noted.append([child.noted for child in model])
    assert noted[1] == noted[0]
    assert noted[0][1][0] == (TrainingState.FORWARD, TrainingState.FORWARD)


@on_ranks(1)
def test_no_name_can_be_written(rank: int, world_size: int) -> None:
    model = _sharded(shardkit)
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    for owner, names in ((state, STATE_NAMES), (group, GROUP_NAMES), (group.fsdp_params[0], PARAM_NAMES)):
        for name in names:
            getattr(owner, name)
            with pytest.raises(AttributeError, match="no setter"):
                setattr(owner, name, None)
        with pytest.raises(AttributeError, match="_pre_forward"):  # as torch's FSDPMemTracker reads it
            _ = owner._pre_forward


@on_ranks(1)
def test_several_groups_and_none(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    state = shardkit.fully_shard(model)._get_fsdp_state()
    assert len(state._fsdp_param_groups) == 2
    with pytest.raises(AttributeError, match=r"has 2 parameter groups .* read _fsdp_param_groups"):
        _ = state._fsdp_param_group
    empty = shardkit.fully_shard(nn.Sequential(shardkit.fully_shard(nn.Linear(3, 3))))
    assert empty._get_fsdp_state()._fsdp_param_group is None


@on_ranks(1, isolated=True)
def test_state_by_module(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    shardkit.install(announce=False)
    model = stock.fully_shard(nn.Linear(3, 3))
    assert _fsdp_state._get_module_fsdp_state(model) is model._get_fsdp_state()
    assert _fsdp_state._get_module_fsdp_state(nn.Linear(3, 3)) is None
    shardkit.uninstall()


@on_ranks(2)
def test_ranges_of_a_profiler_have_the_names_of_stock(rank: int, world_size: int) -> None:
    ranges = []
    for api in (stock, shardkit):
        model = _sharded(api)
        for _ in range(2):
            with torch.profiler.profile() as profile:
                model(torch.randn(2, 7)).sum().backward()
        ranges.append({event.key for event in profile.key_averages() if event.key.startswith("FSDP::")})
    expected = ranges[0]
    seen = {one.removesuffix(" (FSDPSequential)") for one in ranges[1]}  # stock gives the root no name
    assert {f"FSDP::{what} (0)" for what in ("all_gather", "post_backward_reduce")} <= seen <= expected
