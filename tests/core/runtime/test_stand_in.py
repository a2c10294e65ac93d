"""Transports that stand in for the real ones."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.runtime.choice import stand_ins, transport_for
from shardkit.core.runtime.lanes import Program, Reduction
from shardkit.core.runtime.plan import Transport
from tests.support import run_ranks


class Constant(Transport):
    """Every rank's shard is all ones, and so is every gradient."""

    packs, sums_locally = False, False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.labels: list[str] = []

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    gather_buffer = reduce_buffer

    def gather(self, plan: Any, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        self.labels.append(plan.label)
        for flat in flats:
            flat.fill_(1)
        yield ()

    def reduce(self, plan: Any, grads: list[torch.Tensor], mean: Any) -> Reduction:
        yield ()
        return plan.allocate_output().fill_(1)


def train_with_stand_ins(rank: int, world_size: int) -> tuple[list[str], float, float, bool]:
    transports: list[Constant] = []

    def choose(group: dist.ProcessGroup, device: torch.device) -> Transport:
        transports.append(Constant(group, device))
        return transports[-1]

    with stand_ins(choose):
        model = fully_shard(nn.Linear(4, 4, bias=False))
        output = model(torch.ones(1, 4))
        output.sum().backward()
    ours = isinstance(transport_for(dist.group.WORLD, torch.device("cpu")), Constant)
    labels = [label for one in transports for label in one.labels]
    return labels, output.sum().item(), model.weight.grad.to_local().sum().item(), ours


def test_their_programs_run_and_nothing_else_does():
    for rank, (labels, output, gradient, ours) in enumerate(run_ranks(3, train_with_stand_ins)):
        assert labels == ["FSDPLinear"]
        assert output == 16
        assert gradient == (8, 8, 0)[rank]
        assert not ours


def agree_alone(rank: int, world_size: int) -> list[int]:
    """A world of five, in one process without peers: a model is sharded, its first forward compares parameters."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=2, world_size=5)
    try:
        model = fully_shard(nn.Linear(10, 10, bias=False))
        model(torch.ones(1, 10))
        model.reshard()
        return [len(one.to_local()) for one in model.parameters()]
    finally:
        dist.destroy_process_group()


def test_ranks_of_the_fake_backend_agree():
    assert run_ranks(1, agree_alone, isolated=True) == [[2]]
