"""Where a parameter's tensors live: devices that are not the mesh's, offloading, and shards that were moved since.

Fake tensors say that they are on a device which this machine need not have.
"""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardkit.core import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from shardkit.core.mesh import data_parallel_mesh
from shardkit.core.parameters.param import FSDPParam, ParameterForm, Slot
from shardkit.core.parameters.registration import changed, take_over
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor
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


def _param(device: str, policy: OffloadPolicy, original: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, FSDPParam]:
    module = nn.Module()
    module.weight = nn.Parameter(original, requires_grad=False)
    slots = [Slot.of(module, "weight")]
    axes, on = data_parallel_mesh(mesh, None), torch.device(device)
    form = ParameterForm(original.shape, mesh, axes.placements(Shard(0)))
    return module, FSDPParam(module.weight, "weight", slots, axes, Shard(0), form, on, MixedPrecisionPolicy(), policy)


@on_ranks(2)
def test_offloaded_shards_stay_on_the_cpu(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    for original in ("cpu", "cuda"):
        for policy, expected in ((OffloadPolicy(), "cuda"), (CPUOffloadPolicy(pin_memory=False), "cpu")):
            with FakeTensorMode():
                module, param = _param("cuda:0", policy, torch.empty(5, 3, device=original), mesh)
                assert module.weight is param.sharded_param
                assert local_of(module.weight).device.type == expected
                assert not changed([param])
                param.check_ready()
                for dtype in (torch.float32, torch.bfloat16):
                    gradient = torch.empty(param.local_shape, dtype=dtype, device=expected)
                    assert local_of(like_dtensor(gradient, module.weight)).device.type == expected
                for _ in range(2):
                    param.deliver(torch.empty(param.local_shape, device="cuda").view(-1))
                    assert local_of(module.weight.grad).device.type == expected


@on_ranks(2)
def test_a_shard_on_another_device_than_it_should_be(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    on_cuda = r"expected a cuda device because the mesh is on cuda; .*model\.to\('cuda'\)"
    on_host = r"because of CPUOffloadPolicy; .*model\.to\('cpu'\)"
    for policy, here, there, because in (
        (OffloadPolicy(), "cuda:0", "cpu", on_cuda),
        (CPUOffloadPolicy(pin_memory=False), "cpu", "cuda:0", on_host),
    ):
        with FakeTensorMode():
            module, param = _param("cuda:0", policy, torch.empty(5, 3), mesh)
            assert local_of(module.weight).device == torch.device(here)
            old = module.weight
            moved = torch.empty(param.local_shape, device=there)
            moved = new_dtensor(moved, old.device_mesh, old.placements, old.shape)
            module.weight = nn.Parameter(moved, requires_grad=False)
            assert changed([param]) == [param]
            assert take_over(param, loading=False)
            with pytest.raises(RuntimeError, match=rf"parameter 'weight' is on {there}, .*{because}"):
                param.check_ready()


@on_ranks(2)
def test_a_model_on_another_device_than_its_mesh(rank: int, world_size: int) -> None:
    """The first forward after a move of the model raises. Moved back, the model runs."""
    model = fully_shard(MLP(), mesh=rank_mesh((world_size,)))
    x = torch.ones(2, 5)
    model(x).sum().backward()
    old = model.out.weight
    shape = old.to_local().shape
    with FakeTensorMode():
        moved = torch.empty(shape, device="cuda")
        model.out.weight = nn.Parameter(new_dtensor(moved, old.device_mesh, old.placements, old.shape))
    with pytest.raises(RuntimeError, match=r"'out\.weight' is on cuda:0, expected a cpu device.*move the model"):
        model(x)
    model.reset_iter_state()
    model.out.weight = old
    model(x).sum().backward()
    assert model.out.weight.grad is not None
