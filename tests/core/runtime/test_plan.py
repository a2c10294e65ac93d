"""The decisions of a plan, without communication: which items go direct, where the output lies, who is asked."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardkit.core.runtime.choice import coalesces, transport_for
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.plan import Mean
from shardkit.core.runtime.shared.transport import SharedTransport
from tests.core.runtime.cases import CASES, CPU, F32, flats_for, gather_plan, reduce_plan
from tests.support import on_ranks


@pytest.mark.parametrize(
    ("name", "wrapped", "direct"),
    [("nccl", False, True), ("nccl", True, False), ("nccl2", False, False), ("nccl-lazy", False, False)],
)
def test_a_backend_that_launches_each_collective_by_itself_gets_packed_buffers(
    name: str, wrapped: bool, direct: bool
) -> None:
    """All of them say that they coalesce; they need a GPU, so here their answers stand for them."""
    backend = SimpleNamespace(supports_coalescing=True, name=lambda: name, **({"wrapped_pg": None} if wrapped else {}))
    assert coalesces(backend) is direct
    assert not coalesces(SimpleNamespace(supports_coalescing=False, name=lambda: "mpi"))
    assert not coalesces(None)


@on_ranks(2, isolated=True)  # no model of another test holds the transport
def test_a_gloo_group_is_asked_once_and_not_kept(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    first = transport_for(group, CPU)
    assert isinstance(first, SharedTransport)
    assert transport_for(group, CPU) is first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "the cache must not keep transports, which keep groups"


@on_ranks(1, isolated=True)
def test_an_unknown_backend_gets_plain_collectives(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size * 8)
    group = dist.group.WORLD
    over = transport_for(group, CPU)
    assert isinstance(over, C10dTransport)
    for case in CASES.values():
        plan = gather_plan(case, over)
        sources = [torch.ones(i.layout.local_shape(rank)).to(i.dtype) for i in plan.items]
        make_lane(CPU, "all-gather").start(plan.transport.gather(plan, sources, flats_for(plan)), plan.label).wait()
        reduction = reduce_plan(case, over, F32, F32)
        grads = [torch.ones(shape) for shape in case.shapes]
        program = reduction.transport.reduce(reduction, grads, Mean(dist.ReduceOp.AVG))
        make_lane(CPU, "reduce-scatter").start(program, plan.label).wait()
