"""A mesh of its own for a parameter, as trainers with expert parallelism give it: the gradients of stock."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as stock_common
from torch.distributed.tensor import Replicate, Shard

from shardkit.core import fully_shard
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed


def _mixture(experts: int) -> Any:
    """Experts `(experts, in, out)` beside a router."""

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(torch.einsum("bi,eio->ebo", x, module.up))
        return x + torch.einsum("ebo,eoi,be->bi", inner, module.down, module.router(x).softmax(-1))

    router = nn.Linear(6, experts)
    up, down = (nn.Parameter(torch.randn(experts, a, b)) for a, b in ((6, 10), (10, 6)))
    return Composed(run, router=router, up=up, down=down)


def build(experts: int) -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(_mixture(experts), _mixture(experts))


def _gradients(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("experts", [4, 3, 1])
@on_ranks(4)
def test_one_group_a_mesh_as_stock_makes_them(rank: int, world_size: int, experts: int) -> None:
    whole = rank_mesh((2, world_size // 2), ("ep", "edp"))
    flat, edp = rank_mesh((world_size,)), whole["edp"]
    found: list[dict[str, torch.Tensor]] = []
    for shard in (stock.fully_shard, fully_shard):
        model = build(experts)
        info, default = (stock_common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0) for mesh in (edp, flat))

        def choose(p: nn.Parameter, info: Any = info, default: Any = default) -> Any:
            return stock_common.ShardPlacementResult(Shard(0), info if p.ndim == 3 else default)

        for block in model:
            shard(block, mesh=flat, shard_placement_fn=choose)
        shard(model, mesh=flat)
        for block in model:
            block.set_gradient_divide_factor(world_size)
            block.set_force_sum_reduction_for_comms(True)  # stock's other way needs an operation that gloo lacks
        found.append(_gradients(model, rank))
        for name, p in model.named_parameters():
            assert p.device_mesh == (edp if p.ndim == 3 else flat), name
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, msg=name)


@on_ranks(4)
def test_experts_without_a_divide_factor(rank: int, world_size: int) -> None:
    edp, flat = rank_mesh((2, 2), ("ep", "edp"))["edp"], rank_mesh((4,))
    found = []
    for factor in (None, 2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        experts = fully_shard(model[0], mesh=edp)
        if factor is not None:
            experts.set_gradient_divide_factor(factor)
        fully_shard(model, mesh=flat)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found.append(_gradients(model, rank)["0.weight"])
        told = [str(one.message) for one in seen if "gradient" in str(one.message)]
        assert len(told) == (factor is None), told
        if told:
            assert "'0' lie on 2 ranks, and others on 4" in told[0] and "set_gradient_divide_factor(4)" in told[0]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2] * 2)


@on_ranks(2)
def test_replicated_on_a_mesh_of_its_own(rank: int, world_size: int) -> None:
    """Replicated over a mesh without an axis to shard over: what one process gives."""
    mesh, model, alone = rank_mesh((world_size,)), build(3), build(3)
    info = stock_common.DDPMeshInfo(mesh=mesh, replicate_mesh_dim=0)
    result = stock_common.ShardPlacementResult(Replicate(), info)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: result if p.ndim == 2 else Shard(0))
    x = torch.cat([torch.randn(3, 6, generator=torch.Generator().manual_seed(each)) for each in range(world_size)])
    (alone(x).square().sum() / world_size).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, seen in _gradients(model, rank).items():
        torch.testing.assert_close(seen, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        assert model.get_parameter(name).placements[0].is_replicate() == name.endswith("router.weight")


@on_ranks(2)
def test_a_mesh_that_is_none_is_refused(rank: int, world_size: int) -> None:
    class Result:
        placement, mesh_info = None, "edp"

    with pytest.raises(TypeError, match=r"mesh_info='edp' for parameter 'up'; expected one with a DeviceM"):
        fully_shard(_mixture(2), mesh=rank_mesh((world_size,)), shard_placement_fn=lambda p: Result())
