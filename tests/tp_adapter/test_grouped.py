"""Fused weights under the names of separate layers, saved and loaded over any mesh; and attention packed in groups."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardkit.core as shardkit
from shardkit.tp_adapter import (
    CheckedLoadPlanner,
    FusedColwiseParallel,
    SubBlocks,
    declare_sub_blocks,
    logical_state_dict,
)
from shardkit.tp_adapter.logical_tensor import LogicalTensor
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.twins import assert_equal
from tests.tp_adapter.models import HEADS, PROJECTIONS, SPECS, fused_model, grouped_model, shard
from tests.tp_adapter.trainee import Trainee

PACKED = SubBlocks(PROJECTIONS, sizes=HEADS.sizes)
# The fused layer of each model, and the logical tensors in its weight.
FUSED = {"grouped": ("qkv_proj", PACKED), "fused": ("gate_up", SubBlocks(("gate", "up")))}


def unpacked(full: dict[str, torch.Tensor], name: str = "grouped") -> dict[str, torch.Tensor]:
    """Whole tensors under the names, and in the order, of separate layers."""
    (layer, blocks), result = FUSED[name], {}
    for fqn, tensor in full.items():
        if layer not in fqn:
            result[fqn] = tensor
            continue
        parts = blocks.split(tensor) if tensor.ndim else [tensor] * len(blocks.names)
        result |= {fqn.replace(layer, part): one for part, one in zip(blocks.names, parts, strict=True)}
    return result


def trainee_of(name: str, shape: tuple[int, ...], seed: int, dim: int | None) -> Trainee:
    """A model and an optimizer with states; over one axis there is no tensor parallelism at all, of "grouped" only."""
    if len(shape) > 1:
        placement = None if dim is None else lambda parameter: Shard(min(dim, parameter.ndim - 1))
        return Trainee.of(name, shape, seed, shard_placement_fn=placement)
    torch.manual_seed(seed)
    model = grouped_model()
    for block, kind in itertools.product(model.blocks, ("weight", "bias")):
        declare_sub_blocks(block.qkv_proj, kind, PACKED)
    shard(model, shardkit, rank_mesh(shape, ("dp",)))
    return Trainee(model, SPECS[name].loss).trained(seed)


def whole_of(entry: torch.Tensor) -> torch.Tensor:
    """An entry of a full state dict, plain."""
    return entry.whole() if isinstance(entry, LogicalTensor) else entry


def logical(trainee: Trainee) -> dict[str, Any]:
    state = trainee.state()
    return {kind: logical_state_dict(trainee.model, state[kind]) for kind in state}


def save(rank: int, world_size: int, path: Path, name: str) -> dict[str, torch.Tensor]:
    trainee = trainee_of(name, (2, 2), 1, None)
    with CommDebugMode() as communication:
        state = logical(trainee)
        dcp.save(state, checkpoint_id=path)
    functional = [str(op) for op in communication.get_comm_counts() if "functional" in str(op)]
    assert not functional, f"saving redistributes: {functional}"
    full = shardkit.full_state_dict(trainee.model, rank0_only=False)
    whole = logical_state_dict(trainee.model, full)
    assert name == "fused" or isinstance(whole["blocks.0.k_proj.weight"], LogicalTensor)
    assert_equal(unpacked(full, name), {fqn: whole_of(one) for fqn, one in whole.items()})
    return trainee.full()


def load(rank: int, world_size: int, path: Path, again: Path, name: str, shape: Any, dim: int | None) -> Any:
    """Load into a model with other weights; save it to the path `again`, and go on training."""
    trainee = trainee_of(name, shape, 2, dim)
    state = logical(trainee)
    dcp.load(state, checkpoint_id=path, planner=CheckedLoadPlanner())
    full = trainee.full()
    dcp.save(state, checkpoint_id=again)
    trainee.trained(5)
    return full


def load_separate(rank: int, world_size: int, path: Path, name: str) -> dict[str, torch.Tensor]:
    """Load into separate layers, weights and optimizer, and save again from there."""
    model = grouped_model(packed=False) if name == "grouped" else fused_model(fused=False)
    for block in model.blocks:
        shardkit.fully_shard(block)
    shardkit.fully_shard(model)
    trainee = Trainee(model, SPECS[name].loss)
    state = trainee.state()
    dcp.load(state, checkpoint_id=path, planner=CheckedLoadPlanner())
    dcp.save(state, checkpoint_id=path.with_name("separate"))
    return trainee.full()


# Shapes of meshes, and the dim that data parallelism cuts if another than usual: 1-D ones have no tensor parallelism.
SHORT = [((4, 1), None), ((1, 2, 2), None)]
LONG = [((4, 1), None), ((1, 2), None), ((1, 1), None), ((1, 3), None), ((2, 2), 1), ((3,), None), ((2, 1, 2), None)]


@pytest.mark.daily(name=["fused"])
@pytest.mark.parametrize(("name", "chain"), [("fused", SHORT), ("grouped", LONG)], ids=["fused", "grouped"])
def test_logical_names_over_any_change_of_meshes(tmp_path, name: str, chain: list[Any]):
    """From 2x2 to separate layers, and from these over other meshes back to 2x2, weights and optimizer."""
    expected = run_ranks(4, save, tmp_path / "first", name)[0]
    for seen in run_ranks(2, load_separate, tmp_path / "first", name):
        assert_equal(unpacked(expected, name), seen)
    path = tmp_path / "separate"
    for number, (shape, dim) in enumerate([*chain, ((2, 2), None)]):
        again = tmp_path / str(number)
        for seen in run_ranks(math.prod(shape), load, path, again, name, shape, dim):
            assert_equal(expected, seen)
        path = again


def test_a_checkpoint_of_separate_layers_fits_a_plain_model(tmp_path):
    """Without processes: the packed model computes the same after the load."""
    torch.manual_seed(3)
    separate, packed = grouped_model(packed=False), grouped_model()
    dcp.save(separate.state_dict(), checkpoint_id=tmp_path)
    for block, name in itertools.product(packed.blocks, ("weight", "bias")):
        declare_sub_blocks(block.qkv_proj, name, PACKED)
    state = logical_state_dict(packed, packed.state_dict())
    dcp.load(state, checkpoint_id=tmp_path)
    x = torch.randn(2, 5, 6)
    assert torch.equal(packed(x), separate(x))
    assert_equal(dict(separate.state_dict()), {name: whole_of(one) for name, one in state.items()})


@on_ranks(2)
def test_a_dtensor_is_not_copied_into_a_logical_tensor(rank: int, world_size: int) -> None:
    """A plain tensor is, whole, on every rank."""
    model = Trainee.of("grouped", (1, 2), 1).model
    one = logical_state_dict(model, model.state_dict())["blocks.0.q_proj.weight"]
    whole = torch.arange(float(one.numel())).view(one.shape)
    one.copy_(whole)
    full = unpacked(shardkit.full_state_dict(model, rank0_only=False))
    assert torch.equal(full["blocks.0.q_proj.weight"], whole)
    cut = distribute_tensor(whole, rank_mesh((2,), ("tp",)), [Shard(0)])
    with pytest.raises(ValueError, match=r"held here: .* got a DTensor of shape .*pass full_tensor\(\) of a DTensor"):
        one.copy_(cut)


@on_ranks(4)
def test_groups_that_ranks_would_cut_are_refused(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    seen = r"dim 0 of 8 .* groups of 8, made of \('q', 'k', 'v'\) with \(4, 2, 2\) in each, and 2 ranks cut .* at \[4\]"
    way_out = r".*Use a number of ranks that divides 1,.*pack it group by group.*SubBlocks\.fuse"
    style = FusedColwiseParallel("q", "k", "v", sizes=(4, 2, 2))
    with pytest.raises(
        ValueError, match=rf"FusedColwiseParallel\('q', 'k', 'v'\) of Linear.*: 'weight': {seen}{way_out}"
    ):
        style._apply(nn.Linear(3, 8), mesh["tp"])
    model = nn.Sequential(nn.Linear(3, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    declare_sub_blocks(model[0], "bias", SubBlocks(("q", "k", "v"), sizes=(4, 2, 2)))
    with pytest.raises(ValueError, match=rf"'0\.bias' with placements \(Shard\(dim=0\),\): {seen}{way_out}"):
        shardkit.fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"'Linear\.weight' of shape \(8, 3\) is not groups of 6 on dim 0, made of"):
        declare_sub_blocks(model[0], "weight", SubBlocks(("q", "k", "v"), sizes=(4, 1, 1)))
    three = nn.Sequential(nn.Linear(3, 12, bias=False))
    parallelize_module(three, mesh["tp"], {"0": ColwiseParallel()})
    declare_sub_blocks(three[0], "weight", SubBlocks(("q", "k", "v"), sizes=(2, 1, 1)))
    with pytest.raises(ValueError, match=r"'0\.weight'.*groups of 4,.*2 ranks cut through groups at \[6\]"):
        shardkit.fully_shard(three, mesh=mesh["dp"])


@on_ranks(2)
def test_outputs_of_whole_groups_can_be_gathered(rank: int, world_size: int) -> None:
    """Whole groups are in order over the ranks, so outputs may be DTensors, or gathered; those of a stack may not."""
    mesh, x = rank_mesh((2,), ("tp",)), torch.ones(2, 3)
    for options in ({"output_layouts": Replicate()}, {"use_local_output": False}):
        torch.manual_seed(1)
        layer = nn.Linear(3, 8)
        expected = layer(x)
        style = FusedColwiseParallel("q", "k", "v", sizes=(2, 1, 1), **options)
        output = parallelize_module(layer, mesh, style)(x)
        assert torch.allclose(output.full_tensor() if isinstance(output, DTensor) else output, expected)
