"""`fully_shard` together with torch.compile and context parallelism, and steps between forwards."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import shardkit.core as ours
from tests.support import on_ranks, rank_mesh
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal, batch, local_gradients


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(6, 18) for _ in range(3)], nn.Linear(6, 2))


def _shard(model: nn.Sequential, api: ModuleType, **options: Any) -> nn.Sequential:
    return shard_each(*model[:-1], model, api=api, **options)


def _train_compiled(api: ModuleType, what: str, first: str, rank: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Losses, gradients and dynamo's counters. Blocks are compiled whole: a graph break in one is an error."""
    torch._dynamo.reset()
    counters.clear()
    model = _model()
    if first == "shard":
        _shard(model, api)
    if what == "blocks":
        for block in model[:-1]:
            block.compile(backend="aot_eager", fullgraph=True)
    elif what == "module":
        model.compile(backend="eager")
    if first == "compile":
        _shard(model, api)
    forward = torch.compile(model, backend="eager") if what == "model" else model
    losses = []
    for step in range(2):
        losses.append(forward(batch(rank, 4, 6, seed=step)).square().mean())
        losses[-1].backward()
    counted = {"graph breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
    return [*losses, *local_gradients(model)], counted


@pytest.mark.parametrize(
    ("what", "first"), [("blocks", "compile"), ("blocks", "shard"), ("module", "compile"), ("model", "shard")]
)
@on_ranks(2, timeout=240)
def test_graph_breaks_are_those_of_stock(rank: int, world_size: int, what: str, first: str) -> None:
    """Blocks have no graph breaks; `module.compile()` has none with torch 2.13 and one with 2.15."""
    (expected, by_stock), (seen, by_ours) = (_train_compiled(api, what, first, rank) for api in (stock, ours))
    assert by_stock == by_ours
    assert what != "blocks" or by_ours["graph breaks"] == 0
    assert by_ours["graphs"] > 0
    assert_equal(seen, expected)


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
@on_ranks(2)
def test_a_step_between_forwards_is_seen_by_the_next_one(rank: int, world_size: int, kind: str) -> None:
    """A forward that no backward follows leaves the root unsharded; a step then makes that memory stale."""
    model = _shard(_model(), ours)
    # AdamW: torch 2.13 has no DTensor strategy for fused SGD.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    model(batch(rank, 4, 6, seed=0)).square().mean().backward()
    model(batch(rank, 4, 6, seed=1))
    optimizer.step()
    fresh = _shard(_model(), ours)
    fresh.load_state_dict(model.state_dict())
    model(batch(rank, 4, 6, seed=1))  # unsharded again, then stepped again without a state dict in between
    optimizer.step()
    optimizer.zero_grad()
    after = model(batch(rank, 4, 6, seed=2))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh(batch(rank, 4, 6, seed=2)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_writes_between_forward_and_backward(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    """Backward computes with them where it gathers a group again: they scale the gradients of the first layer."""
    factors = []
    for api in (stock, ours):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        shard_each(*model, model, api=api, mp_policy=api.MixedPrecisionPolicy(param_dtype=dtype))
        model(batch(rank, 4, 6, seed=0)).sum().backward()
        (expected, *_) = local_gradients(model)
        for layer in model[1:]:
            model.zero_grad()
            loss = model(batch(rank, 4, 6, seed=0)).sum()
            layer.weight.data.mul_(2)
            loss.backward()
            (seen, *_) = local_gradients(model)
            factors.append(next(one for one in (1, 2) if torch.equal(seen, one * expected)))
            layer.weight.data.mul_(0.5)
    assert factors == [2, 2, 2, 2, 2, 1]


def _attention(over: Any) -> nn.Module:
    """Each rank of `over` has a part of the sequence, and gathers the keys and values of all (None: has all of it)."""

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        query, key, value = module.qkv(x).chunk(3, dim=-1)
        if over is not None:
            key, value = (all_gather_tensor_autograd(one.contiguous(), 1, over) for one in (key, value))
        return x + module.out(F.scaled_dot_product_attention(query, key, value))

    return Composed(run, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


@on_ranks(4)
def test_context_parallelism_beside_sharding(rank: int, world_size: int) -> None:
    """Over a mesh ("dp_shard", "cp") of 2 x 2: the gradients of one process. torch's `context_parallel` has no CPU."""
    mesh = rank_mesh((2, 2), ("dp_shard", "cp"))
    torch.manual_seed(0)
    expected, model = (nn.Sequential(*[_attention(over) for _ in range(2)]) for over in (None, mesh["cp"]))
    model.load_state_dict(expected.state_dict())
    _shard(model, ours, mesh=mesh, dp_mesh_dims=ours.DataParallelMeshDims(shard=("dp_shard", "cp")))
    for step in range(2):
        whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))
        mine = whole.chunk(2)[mesh.get_local_rank("dp_shard")].chunk(2, dim=1)[mesh.get_local_rank("cp")]
        for one, x in ((expected, whole), (model, mine)):
            one(x).square().mean().backward()
        for sharded, parameter in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad)
