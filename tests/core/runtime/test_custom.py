"""A user's own communication: that it is used, with which arguments, and how its mistakes are reported."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from shardkit.core.runtime.custom import CustomTransport
from tests.core.runtime.cases import (
    BF16,
    CASES,
    CPU,
    F32,
    chunk_of,
    gather_plan,
    reduce_plan,
    run_gather,
    run_reduce,
    summed,
    whole,
)
from tests.support import on_ranks, run_ranks


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class _Recorded:
    """Records allocations and the arguments of calls, and answers synchronously."""

    def __init__(self) -> None:
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.called: list[tuple[int, int, torch.dtype]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append((tuple(size), dtype))
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Recorded):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.called.append((output_tensor.numel(), input_tensor.numel(), output_tensor.dtype))
        DefaultAllGather()(output_tensor, input_tensor, group)


class _Reduce(_Recorded):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.called.append((output_tensor.numel(), input_tensor.numel(), output_tensor.dtype))
        DefaultReduceScatter()(output_tensor, input_tensor, group, op)


@on_ranks(2)
def test_custom_communication_gets_one_packed_buffer(rank: int, world_size: int) -> None:
    users = _Gather(), _Reduce()
    over = CustomTransport(_group(), CPU, *users)
    case = CASES["mixed_dims"]
    plan = gather_plan(case, over)
    full = [whole(shape, F32, i) for i, shape in enumerate(case.shapes)]
    sources = [chunk_of(t, item.layout, rank) for t, item in zip(full, plan.items, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(run_gather(plan, sources), full, strict=True))
    row = sum(item.layout.padded_local_numel for item in plan.items)
    assert users[0].allocated == [((row * world_size,), F32)]
    assert users[0].called == [(row * world_size, row, F32)]

    reduction = reduce_plan(case, over, BF16, F32)
    terms = [[whole(s, BF16, 100 * r + i) for i, s in enumerate(case.shapes)] for r in range(world_size)]
    for i, seen in enumerate(run_reduce(reduction, terms[rank])):
        expected = chunk_of(summed([t[i] for t in terms], F32, None, None), plan.items[i].layout, rank)
        assert torch.equal(seen, expected)
    assert users[1].allocated == [((row * world_size,), F32), ((row,), F32)]
    assert users[1].called == [(row, row * world_size, F32)]


def _mixed_dtypes_travel_as_bytes(rank: int, world_size: int) -> list[torch.dtype]:
    user = _Gather()
    plan = gather_plan(CASES["mixed_dtypes"], CustomTransport(_group(), CPU, user))
    run_gather(plan, [torch.ones(i.layout.local_shape(rank)).to(i.dtype) for i in plan.items])
    return [dtype for _, dtype in user.allocated]


def test_custom_communication_gets_bytes_for_mixed_dtypes() -> None:
    assert run_ranks(2, _mixed_dtypes_travel_as_bytes) == [[torch.uint8]] * 2
