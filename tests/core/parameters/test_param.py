"""Parameters on devices that are not the mesh's. Fake tensors say that they are on one that this machine may lack.

`tests/simulation` has those of a device and of offloading.
"""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from shardkit.core import CPUOffloadPolicy, OffloadPolicy, fully_shard
from shardkit.core.torch_compat import new_dtensor
from tests.support import on_ranks, rank_mesh
from tests.support.models import MLP, Composed


@on_ranks(2)
def test_parameters_on_another_device_are_moved_at_construction(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    with FakeTensorMode():
        with torch.device("cuda"):
            parts = [{"weight": nn.Parameter(torch.empty(5, 3)), "scale": nn.Parameter(torch.empty(()))} for _ in "ab"]
        model = nn.Sequential(*(Composed(None, **one) for one in parts))
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert {parameter.to_local().device.type for parameter in model.parameters()} == {"cpu"}


@on_ranks(2)
def test_a_model_on_another_device_than_its_mesh(rank: int, world_size: int) -> None:
    """The first forward after a move of the model raises. Moved back, the model runs."""
    for policy, because in (
        (OffloadPolicy(), "because the mesh is on cpu"),
        (CPUOffloadPolicy(pin_memory=False), "because of CPUOffloadPolicy"),
    ):
        model = fully_shard(MLP(), mesh=rank_mesh((world_size,)), offload_policy=policy)
        x = torch.ones(2, 5)
        model(x).sum().backward()
        old = model.out.weight
        shape = old.to_local().shape
        with FakeTensorMode():
            moved = torch.empty(shape, device="cuda")
            model.out.weight = nn.Parameter(new_dtensor(moved, old.device_mesh, old.placements, old.shape))
        told = rf"'out\.weight' is on cuda:0, expected a cpu device {because}; move the model with model\.to\('cpu'\)"
        with pytest.raises(RuntimeError, match=told):
            model(x)
        model.reset_iter_state()
        model.out.weight = old
        model(x).sum().backward()
        assert model.out.weight.grad is not None
