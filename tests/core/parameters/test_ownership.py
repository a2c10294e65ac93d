"""Plans of owners: balanced over a model, the same on all ranks; and the choices of `placements_for`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from shardkit.core import Blocks, Owned, fully_shard, newton_schulz_flops, placements_for, plan_owners
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed

# (rows, columns) of the matrices of a layer of Llama-3-8B.
LLAMA = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


def llama() -> nn.Module:
    with torch.device("meta"):
        layers = [nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in LLAMA) for _ in range(32)]
        return nn.ModuleList(layers)


def test_newton_schulz_costs_what_its_matrix_products_cost() -> None:
    m, n = 3, 5
    assert newton_schulz_flops(torch.empty(m, n)) == newton_schulz_flops(torch.empty(n, m))
    assert newton_schulz_flops(torch.empty(m, n)) == 2 * m * m * n + 2 * m * m * m + 2 * m * m * n
    assert newton_schulz_flops(torch.empty(4, m, n)) == 4 * newton_schulz_flops(torch.empty(m, n))
    assert newton_schulz_flops(torch.empty(7)) == 7


def test_a_llama_of_8b_is_balanced_on_64_ranks() -> None:
    plan = plan_owners(llama()).plan
    assert plan.imbalance(64) <= 1.15
    assert plan.imbalance(8) < 1.001
    assert sum(cost for cost, _ in plan.loads(64)) == pytest.approx(sum(cost for cost, _ in plan.weights))
    assert sum(nbytes for _, nbytes in plan.loads(64)) == 4 * 32 * sum(rows * columns for rows, columns in LLAMA)


def test_equal_costs_are_balanced_by_bytes() -> None:
    module = nn.ParameterList([torch.empty(4, 10), torch.empty(4, 1), torch.empty(4, 1), torch.empty(4, 10)])
    plan = plan_owners(module, lambda p: Owned(), cost=lambda p: 1.0).plan
    assert [nbytes for _, nbytes in plan.loads(2)] == [176, 176]


@on_ranks(3)
def test_all_ranks_plan_alike_and_use_every_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(6)))
    choose = plan_owners(model)
    for layer in model:
        fully_shard(layer, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, [str(p.placements[0]) for p in model.parameters()])
    assert plans[0] == plans[1] == plans[2]
    assert {one for one in plans[0] if "Owned" in one} == {f"Owned(rank={rank})" for rank in range(3)}


@on_ranks(2, isolated=True)
def test_without_a_plan_the_cost_of_earlier_calls_decides(rank: int, world_size: int) -> None:
    """A costly matrix of few bytes, a cheap one of many, and a small one."""
    layers = [nn.Linear(a, b, bias=False) for a, b in ((64, 64), (2048, 4), (4, 4))]
    for layer in layers:
        fully_shard(layer, mesh=rank_mesh((world_size,)), shard_placement_fn=lambda p: Owned())
    assert [layer.weight.placements[0] for layer in layers] == [Owned(rank=0), Owned(rank=1), Owned(rank=1)]


def gpt() -> Any:
    table, norm, hidden = nn.Embedding(64, 128), nn.LayerNorm(128), nn.Linear(128, 32)
    head, wide = nn.Linear(128, 64, bias=False), nn.Linear(32, 64, bias=False)  # as wide as the head, and no head
    return Composed(None, table=table, norm=norm, hidden=hidden, head=head, wide=wide)


@pytest.mark.parametrize("kind", ["Muon", "SOAP", "HeavySOAP"])
def test_matrices_are_owned_but_for_embedding_and_head(kind: str) -> None:
    model = gpt()
    choose = placements_for(model, type(kind, (torch.optim.SGD,), {}))
    assert isinstance(choose(model.hidden.weight), Owned)
    assert choose.plan.names == ("hidden.weight", "wide.weight")
    for other in (model.table.weight, model.norm.weight, model.hidden.bias, model.head.weight):
        assert choose(other) is None


def test_quantized_state_lies_in_blocks() -> None:
    model = gpt()
    choose = placements_for(model, type("AdamW8bit", (torch.optim.AdamW,), {}))
    assert choose(model.hidden.weight) == choose(model.table.weight) == Blocks(elements=4096)
    assert isinstance(choose(model.norm.weight), Owned)
    assert choose(nn.Parameter(torch.empty(2048))) == Owned()


def test_other_optimizers_shard_rows() -> None:
    model = gpt()
    choose = placements_for(model, torch.optim.AdamW)
    assert all(choose(p) in (None, Shard(0)) for p in model.parameters())
    with pytest.raises(TypeError, match="takes the class of an optimizer"):
        placements_for(model, torch.optim.AdamW(model.parameters()))
