"""Outputs that are DTensor parameters, or views of them, outlive the parameters' memory."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit.core import fully_shard
from tests.support import on_ranks, rank_mesh


class Table(nn.Module):
    """A module whose output is its parameter."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole)

    def forward(self, how: str) -> torch.Tensor:
        return {"itself": self.weight, "transposed": self.weight.t(), "local": self.weight.to_local()}[how]


@on_ranks(4)
def test_outputs_that_are_parameters(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    whole = torch.arange(24.0).view(6, 4)
    rows = whole.chunk(2)[mesh.get_local_rank("tp")]
    for how in ("itself", "transposed", "local"):
        table = Table(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
        model = nn.Sequential(table)
        fully_shard(table, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        out = model(how)
        assert isinstance(table.weight.detach(), DTensor) and table.weight.device_mesh.ndim == 2, "resharded"
        local = out.to_local() if isinstance(out, DTensor) else out
        assert torch.equal(local.t() if how == "transposed" else local, rows), how
        (out * 2).sum().backward()
        assert torch.equal(table.weight.grad.full_tensor(), torch.full((6, 4), 2.0)), how
