"""The decisions of a plan, without communication: which items go direct, where the output lies, who is asked."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.runtime.choice import coalesces, transport_for
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.plan import SMALL_BYTES, GatherItem, Mean, ReduceItem, plan_gather, plan_reduce
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.transport import SharedTransport
from shardkit.core.runtime.storage import allocate_storage, free_storage, raw_view
from tests.core.runtime.cases import BF16, CASES, CPU, F32, flats_for, gather_plan, reduce_plan, transport
from tests.support import on_ranks, run_ranks


def _decisions(rank: int, world_size: int, kind: str) -> tuple[list[int], list[int], list[int]]:
    over = transport(kind)
    edge = SMALL_BYTES // 4
    layouts = [
        ChunkLayout((2 * edge,), 0, 2),  # large
        ChunkLayout((2 * edge - 2,), 0, 2),  # just too small
        ChunkLayout((2 * edge + 1,), 0, 2),  # large, uneven
        ChunkLayout((4, edge), 1, 2),  # another dim
    ]
    gathers = plan_gather([GatherItem(f"w{i}", x, F32) for i, x in enumerate(layouts)], over, "g", rank)
    items = [ReduceItem(f"w{i}", x) for i, x in enumerate(layouts)]
    same = plan_reduce(items, over, "g", rank, F32, F32)
    cast = plan_reduce(items, over, "g", rank, torch.float64, F32)
    return list(gathers.direct), list(same.direct), list(cast.direct)


def test_large_dim_0_items_go_direct_where_the_transport_can() -> None:
    assert run_ranks(2, _decisions, "shared") == [([0, 1, 2, 3],) * 3] * 2
    # A collective reads equal rows from the gradient itself: no padding, no cast.
    assert run_ranks(2, _decisions, "c10d_direct") == [([0, 2], [0], [])] * 2
    assert run_ranks(2, _decisions, "c10d_packed") == [([], [], [])] * 2
    assert run_ranks(2, _decisions, "custom") == [([], [], [])] * 2


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


@pytest.mark.parametrize(
    ("kind", "dtypes"), [("shared", [F32, BF16, BF16, BF16]), ("c10d_packed", [F32, F32, BF16, BF16])]
)
@on_ranks(2)
def test_wire_dtypes(rank: int, world_size: int, kind: str, dtypes: list[torch.dtype]) -> None:
    pairs = [(F32, F32), (BF16, F32), (F32, BF16), (torch.float16, BF16)]
    assert [reduce_plan(CASES["small"], transport(kind), *pair).wire_dtype for pair in pairs] == dtypes


@on_ranks(2, isolated=True)  # no model of another test holds the transport
def test_a_gloo_group_is_asked_once_and_not_kept(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
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
    assert group is not None
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


def test_storage_comes_and_goes_under_its_tensors() -> None:
    tensor = torch.arange(12.0)
    prefix, raw = tensor[:10].view(2, 5), raw_view(tensor)
    heard: list[events.Event] = []
    with events.subscribe(heard.append):
        free_storage(tensor, "w")
        free_storage(tensor, "w")
        assert prefix.untyped_storage().size() == 0
        allocate_storage(tensor, "w")
        allocate_storage(tensor, "w")
    raw.fill_(3)
    assert prefix.sum() == 30
    assert prefix._version == 0
    assert heard == [events.StorageFreed("w", 48, "unsharded"), events.StorageAllocated("w", 48, "unsharded")]
