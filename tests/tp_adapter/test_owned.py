"""Parameters that tensor parallelism has cut are not owned, and are cut in blocks of one row only."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardkit.core import Blocks, Owned, fully_shard, placements_for
from tests.support import on_ranks, rank_mesh


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
