"""Meshes: dp_mesh_dims on the full mesh as stock has it, expert parallelism, and what owners and blocks may hold."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardkit.core as shardkit
from shardkit.core import Blocks, Owned, fully_shard, placements_for
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.parity import sum_in_rank_order
from tests.support.trace import Trace, assert_same
from tests.support.twins import Twins, assert_close, batch
from tests.tp_adapter.models import mixture

FULL: dict[tuple[int, ...], tuple[tuple[str, ...], dict[str, Any]]] = {
    (2, 2): (("dp", "tp"), {"shard": "dp"}),
    (1, 2, 2): (("dp_replicate", "dp_shard", "tp"), {"shard": "dp_shard", "replicate": "dp_replicate"}),
    (2, 2, 1): (("dp_shard", "cp", "tp"), {"shard": ("dp_shard", "cp")}),
    (2, 1, 2): (("dp_shard", "cp", "tp"), {"shard": ("dp_shard", "cp")}),
}


def full_mesh_model(mesh: Any) -> nn.Module:
    """Parameters are DTensors on the full mesh: up cut on rows and down on columns over tp."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def place(name: str, module: nn.Module, _: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            cut = {"0": Shard(0), "2": Shard(1) if key == "weight" else Replicate()}[name]
            placements = [Replicate()] * (mesh.ndim - 1) + [cut]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, placements)))

    return distribute_module(model, mesh, place)


def train_full_mesh(rank: int, api: Any, shape: tuple[int, ...], spread: bool) -> Trace:
    """Two steps; a batch that is spread over the data-parallel axes leaves gradients that are Partial over them."""
    names, dims = FULL[shape]
    mesh = rank_mesh(shape, names)
    model = full_mesh_model(mesh)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**dims))
    if api is stock:
        sum_in_rank_order(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    for step in range(2):
        torch.manual_seed(step)
        along = [Shard(0) if spread else Replicate()] * (mesh.ndim - 1)
        x = DTensor.from_local(torch.randn(3, 4) + rank // mesh.size(-1), mesh, [*along, Replicate()], run_check=False)
        loss = model(x).square().mean()
        loss.backward()
        trace.add_gradients(f"step {step}", model, full=True)
        optimizer.step()
        optimizer.zero_grad()
        trace.add_parameters(f"step {step}", model, full=True)
    trace.add_tree("state dict", dict(model.state_dict()))
    return trace


@pytest.mark.daily(spread=[True])
@pytest.mark.parametrize(
    ("shape", "spread"), [*((shape, False) for shape in FULL), ((2, 2), True), ((1, 2, 2), True)], ids=str
)
@on_ranks(4, isolated=True)  # stock asks for the very mesh, and torch's caches may have an equal one of another test
def test_dp_mesh_dims_with_dtensors(rank: int, world_size: int, shape: tuple[int, ...], spread: bool) -> None:
    assert_same(train_full_mesh(rank, stock, shape, spread), train_full_mesh(rank, shardkit, shape, spread))


@pytest.mark.parametrize(
    ("experts", "placement", "local"),
    [(4, Shard(0), (1, 3, 3)), (6, Blocks(elements=3), (5, 3)), (2, Blocks(elements=3), (2, 3))],
    ids=str,
)
@on_ranks(4)
def test_expert_parallel(rank: int, world_size: int, experts: int, placement: Any, local: tuple[int, ...]) -> None:
    """Dense parameters over all four ranks, experts over "ep" and then over the two ranks that hold the same ones.

    Blocks are rows of these experts: a rank begins within one.
    """
    mesh = rank_mesh((2, 2), ("dp_mod_ep", "ep"))
    torch.manual_seed(5)
    whole = mixture(experts)
    torch.manual_seed(5)
    model = mixture(experts)
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)]))
    shardkit.fully_shard(model.experts, mesh=mesh["dp_mod_ep"], shard_placement_fn=lambda p: placement)
    shardkit.fully_shard(model, mesh=mesh)
    # Two batches, and each rank of "ep" has a part of the gradient of the modules below its experts.
    model.set_gradient_divide_factor(2.0)
    assert model.experts.weight.device_mesh.mesh_dim_names == ("dp_mod_ep", "ep")
    rows = local[0] if rank < 2 or isinstance(placement, Shard) else experts // 2 * 3 - local[0]
    assert model.experts.weight.to_local().shape == (rows, *local[1:])
    for one in (model, whole) if isinstance(placement, Blocks) else ():  # on CPUs torch draws otherwise on its own
        torch.manual_seed(6)
        nn.init.trunc_normal_(one.experts.weight)
    # The ranks of "ep" share a batch, as each has only its own experts' part of the outputs.
    twins = Twins(model, whole, rank // 2, 2)
    for _ in range(2):
        twins.backward(lambda one, place: one(batch(place, 2, 3)).square().mean())
        twins.check_gradients()
        norm = shardkit.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01), rtol=1e-5, atol=0)
        twins.update(lr=0.5)
        twins.check_parameters()


def gated(weight: torch.Tensor, gate: torch.Tensor) -> nn.Module:
    """A matrix on two model axes, and a 0-dim parameter."""

    def run(model: Any) -> torch.Tensor:
        out = (model.weight * model.gate).square().sum()
        return out.full_tensor() if isinstance(out, DTensor) else out

    return Composed(run, weight=nn.Parameter(weight), gate=nn.Parameter(gate))


@on_ranks(4)
def test_two_model_axes_and_a_scalar(rank: int, world_size: int) -> None:
    whole, gate = torch.arange(45.0).view(9, 5) / 10, torch.tensor(2.0)
    expected = gated(whole, gate)
    expected().backward()
    for shape in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
        mesh = rank_mesh(shape, ("dp", "ep", "tp"))
        for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]):
            scalar = distribute_tensor(gate, mesh["ep", "tp"], [Replicate(), Replicate()])
            model = gated(distribute_tensor(whole, mesh["ep", "tp"], placements), scalar)
            shardkit.fully_shard(model, mesh=mesh["dp"])
            assert torch.equal(model.weight.detach().full_tensor(), whole), (shape, placements)
            assert all(placement.is_replicate() for placement in model.gate.placements)
            model().backward()
            for name, parameter in model.named_parameters():
                assert_close(
                    parameter.grad, dict(expected.named_parameters())[name].grad, f"{shape} {placements} {name}"
                )


@on_ranks(4)
def test_what_would_take_a_part_for_the_whole_is_refused(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    for placement in (Owned(), Blocks(rows=2), Blocks(elements=32)):
        with pytest.raises(
            NotImplementedError, match=r"parameter '0.weight' of shape.*cannot cut it.*Use Shard\(dim\)"
        ):
            fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda parameter, at=placement: at)
    for kind in (
        torch.optim.Muon,
        type("AdamW8bit", (torch.optim.AdamW,), {}),
        type("LAMB8bit", (torch.optim.SGD,), {}),
    ):
        choose = placements_for(model, kind)
        assert choose(model[0].weight) is None and choose(model[1].weight) is not None
