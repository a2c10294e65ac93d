"""Parameters that tensor parallelism has cut, each rank's shard whole on one data-parallel rank."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.core import Blocks, Owned, clip_grad_norm_, full_state_dict, fully_shard
from shardkit.core.torch_compat import local_of
from tests.support import on_ranks, rank_mesh


def build(choice: Any) -> nn.Module:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=choice)


def _train(rank: int, choice: Any) -> dict[str, torch.Tensor]:
    model = build(choice)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank // 2))
        model(x).square().mean().backward()
        for name, p in model.named_parameters():
            found[f"{step} {name}"] = p.grad.full_tensor()
        found[f"{step} norm"] = clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    found.update(full_state_dict(model, rank0_only=False))
    return found


@on_ranks(4)
def test_an_owner_holds_its_tensor_parallel_shard(rank: int, world_size: int) -> None:
    expected, seen = _train(rank, None), _train(rank, lambda p: Owned())
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, msg=name)
    model = build(lambda p: Owned(rank=1))
    for p in model.parameters():
        assert isinstance(p, DTensor)
        assert bool(local_of(p).numel()) == (rank // 2 == 1)


@on_ranks(4)
def test_what_needs_more_than_the_shard_is_refused(rank: int, world_size: int) -> None:
    for name, blocks in (("0.weight", Blocks(rows=2)), ("0.weight", Blocks(elements=5)), ("2.weight", Blocks(rows=1))):
        refused = re.escape(f"parameter '{name}' of shape") + ".*" + re.escape(f"so {blocks} cannot cut it")
        with pytest.raises(NotImplementedError, match=refused):
            build(lambda p, blocks=blocks: blocks)
    model = build(lambda p: Owned())
    model(torch.ones(2, 6)).sum().backward()
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(
        RuntimeError, match=r"parameter '0.weight' .*holds one tensor-parallel shard, and Muon may need"
    ):
        muon.step()
