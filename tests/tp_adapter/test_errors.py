"""Meshes and placements that do not fit together are refused at once, with the FQN and the placements."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from shardkit.core import DataParallelMeshDims, fully_shard
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES, new_dtensor
from shardkit.tp_adapter import FusedColwiseParallel, SubBlocks, adapter, declare_sub_blocks
from tests.support import on_ranks, rank_mesh


class Odd(Placement):
    """A placement that nobody knows."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def holding(parameter: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(parameter)
    return model


def distributed(mesh: DeviceMesh, *placements: Placement) -> nn.Module:
    return holding(distribute_tensor(torch.ones(4, 4), mesh, list(placements)))


@on_ranks(4)
def test_refusals(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))

    with pytest.raises(ValueError, match=r"(?s)'0\.weight' with placements \(Shard\(dim=0\),\).*overlap.*mesh\['tp'\]"):
        fully_shard(distributed(mesh["dp"], Shard(0)), mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*axis 'dp'.*overlap.*dp_mesh_dims"):
        fully_shard(distributed(mesh, Replicate(), Shard(0)), mesh=mesh["dp"])
    other = rank_mesh((4,), ("all",))
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*axis 'all'.*overlap"):
        fully_shard(distributed(other, Shard(0)), mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*overlap"):
        fully_shard(distributed(other, Shard(0)), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    dims = DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match=r"(?s)'0\.weight' with placements.*axis 0 is data-parallel.*Replicate"):
        fully_shard(distributed(mesh, Shard(1), Shard(0)), mesh=mesh, dp_mesh_dims=dims)

    partial = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"'0\.weight' with placements \(Partial.*pending sum.*redistribute"):
        fully_shard(holding(partial), mesh=mesh["dp"])

    odd = new_dtensor(torch.ones(4, 4), mesh["tp"], [Odd()], torch.Size((4, 4)))
    ours = (ValueError, r"'0\.weight' with placements.*is none of Shard, strided Shard and Replicate")
    # torch 2.15 makes no parameter of it in the first place.
    error, message = (RuntimeError, "redistribute from") if GRAD_DTYPE_DECIDES else ours
    with pytest.raises(error, match=message):
        fully_shard(holding(odd), mesh=mesh["dp"])

    wrong = DTensor.from_local(torch.ones(3, 4), mesh["tp"], [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1))
    with pytest.raises(ValueError, match=r"'0\.weight'.*Shard\(dim=0\).*local tensor of shape \(3, 4\).*\(2, 4\)"):
        fully_shard(holding(wrong), mesh=mesh["dp"])

    # After an error the model is unchanged.
    model = distributed(mesh, Replicate(), Shard(0))
    with pytest.raises(ValueError, match="overlap"):
        fully_shard(model, mesh=mesh["dp"])
    assert type(model) is nn.Sequential
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@on_ranks(4)
def test_refusals_of_fused_weights(rank: int, world_size: int) -> None:
    tensor = rank_mesh((2, 2), ("dp", "tp"))["tp"]
    style = FusedColwiseParallel("gate", "up")
    of_module = r"FusedColwiseParallel\('gate', 'up'\) of Linear\(in_features=4, .*\): 'weight' of shape "
    with pytest.raises(ValueError, match=of_module + r"\(6, 4\) is made of \('gate', 'up'\).*2 ranks do not"):
        style._apply(nn.Linear(4, 6), tensor)
    with pytest.raises(ValueError, match=of_module + r"\(5, 4\) is not 2 logical tensors \('gate', 'up'\)"):
        style._apply(nn.Linear(4, 5), tensor)
    with pytest.raises(TypeError, match=r"nn\.Linear, got Embedding"):
        style._apply(nn.Embedding(4, 4), tensor)
    for wrong in ({"output_layouts": Replicate()}, {"output_layouts": Shard(0)}, {"use_local_output": False}):
        with pytest.raises(ValueError, match=r"\('gate', 'up'\) got output_layouts=.*would be mixed"):
            FusedColwiseParallel("gate", "up", **wrong)
    FusedColwiseParallel("gate", "up", output_layouts=Shard(-1), use_local_output=True)
    model = distributed(tensor, Shard(0))
    declare_sub_blocks(model[0], "weight", SubBlocks(("a", "b", "c", "d")))
    with pytest.raises(ValueError, match=r"'0\.weight'.*\('a', 'b', 'c', 'd'\), of 1 each on dim 0.*2 ranks do not"):
        fully_shard(model, mesh=rank_mesh((2, 2), ("dp", "tp"))["dp"])


@on_ranks(4, isolated=True)
def test_foreign_roots(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    # The same ranks as mesh["tp"], but counted from another root, which holds the ranks in another order.
    root = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("x", "y"))
    with pytest.raises(ValueError, match=r"(?s)'0\.weight' with placements \(Shard.*not slices of one root mesh"):
        fully_shard(distributed(root["y"], Shard(0)), mesh=mesh["dp"])
    nameless = DeviceMesh.from_group(mesh["tp"].get_group(), "cpu")
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*no axis names.*init_device_mesh"):
        fully_shard(distributed(nameless, Shard(0)), mesh=mesh["dp"])
    half = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*" + ("not slices" if rank < 2 else "not in that mesh")):
        fully_shard(holding(new_dtensor(torch.ones(4, 4), half, [Replicate()], torch.Size((4, 4)))), mesh=mesh["dp"])
    twin = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("x", "dp"))
    with pytest.raises(ValueError, match=r"(?s)'0\.weight'.*axes are \['dp', 'dp'\].*name of its own"):
        fully_shard(distributed(twin["dp"], Shard(0)), mesh=mesh["dp"])


@on_ranks(4)
def test_a_torch_that_forgets_the_order_of_cuts(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 12))
    FusedColwiseParallel("a", "b", "c")._apply(model[0], mesh["tp"])
    with mock.patch.object(adapter, "KEEPS_READING", False):
        message = r"'0\.weight' has placements .*, from left to right, which needs torch 2\.13 or later: torch \d"
        with pytest.raises(ValueError, match=message):
            fully_shard(model, mesh=mesh["dp"])
        fully_shard(distributed(mesh["tp"], Shard(0)), mesh=mesh["dp"])
