"""Gathers and reductions at world sizes 2 to 4, over every transport, against single-process answers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.runtime.choice import transport_for
from shardkit.core.runtime.collective import all_reduce
from shardkit.core.runtime.lanes import make_lane
from tests.core.runtime.cases import (
    BF16,
    CASES,
    CPU,
    F16,
    F32,
    chunk_of,
    gather_plan,
    placed,
    reduce_plan,
    run_gather,
    run_reduce,
    summed,
    transport,
    whole,
)
from tests.support import on_ranks
from tests.support.heard import heard

WORLD_SIZES = [2, 3, 4]  # one rank has no transport

# -- gathers -----------------------------------------------------------------------------------------------------------

TRANSPORTS = ["lent", "shared", "c10d_packed", "c10d_direct", "custom"]


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("kind", TRANSPORTS)
@on_ranks(*WORLD_SIZES)
def test_gather_restores_the_tensors(rank: int, world_size: int, kind: str) -> None:
    over = transport(kind)
    for name, case in CASES.items():
        if kind == "custom" and name == "float8":  # gloo gathers none, and whoever brings communication casts
            continue
        plan = gather_plan(case, over)
        full = [whole(s, d, i) for i, (s, d) in enumerate(zip(case.shapes, case.dtypes, strict=True))]
        sources = [chunk_of(t, item.layout, rank) for t, item in zip(full, plan.items, strict=True)]
        sources = placed(kind, sources)
        for _ in range(2):
            for seen, expected, item in zip(run_gather(plan, sources), full, plan.items, strict=True):
                assert torch.equal(seen.float(), expected.float()), (name, item)
                assert seen.dtype == expected.dtype


def _events_of_a_gather(rank: int, kind: str) -> list[Any]:
    plan = gather_plan(CASES["mixed_dims"], transport(kind))
    sources = placed(kind, [torch.ones(item.layout.local_shape(rank)) for item in plan.items])
    with heard(events.GatherStarted, events.GatherFinished, events.StorageAllocated) as told:
        run_gather(plan, sources)
    started, finished = (one for one in told if not isinstance(one, events.StorageAllocated))
    assert isinstance(finished, events.GatherFinished) and finished.seconds > 0
    assert started.fqns == tuple(f"blocks.0.w{i}" for i in range(4))
    assert started.group is plan.transport.group
    assert started.wire_bytes == finished.wire_bytes
    return told


@on_ranks(4)
def test_lent_shards_are_copied_once_and_need_no_buffer(rank: int, world_size: int) -> None:
    # (241, 250) in chunks of 61, 61, 61, 58 rows; (13,) in 4, 4, 4, 1; (9, 5) cut on dim 1 in 2, 2, 1, 0 columns;
    # (3, 2, 1) cut on dim 2: all on rank 0.
    own = [61 * 250 + 4 + 18 + 6, 61 * 250 + 4 + 18, 61 * 250 + 4 + 9, 58 * 250 + 1]
    told = _events_of_a_gather(rank, "lent")
    assert [one.wire_bytes for one in told if isinstance(one, events.GatherStarted)] == [own[rank] * 4 * 3]
    assert not any(isinstance(one, events.StorageAllocated) for one in told)


@on_ranks(4)
def test_a_collective_sends_padded_chunks(rank: int, world_size: int) -> None:
    row = 61 * 250 + 4 + 18 + 6
    told = _events_of_a_gather(rank, "c10d_packed")
    assert [one.wire_bytes for one in told if isinstance(one, events.GatherStarted)] == [row * 4 * 3]
    buffers = [one for one in told if isinstance(one, events.StorageAllocated)]
    assert [(one.fqn, one.bytes, one.kind) for one in buffers] == [("blocks.0", row * 4 * 4, "packed")]


# -- reductions --------------------------------------------------------------------------------------------------------


NAMES = [name for name in CASES if name not in ("mixed_dtypes", "bfloat16", "float8")]


def _grads(name: str, dtype: torch.dtype, rank: int, *, strided: bool = False) -> list[torch.Tensor]:
    grads = [whole(shape, dtype, 1000 * rank + i) for i, shape in enumerate(CASES[name].shapes)]
    if strided:
        grads = [torch.empty_like(g.mT.contiguous()).copy_(g.mT).mT if g.ndim > 1 else g for g in grads]
        assert any(not g.is_contiguous() for g in grads)
    return grads


def _check_sums(
    rank: int, world_size: int, kind: str, grad_dtype: torch.dtype, reduce_dtype: torch.dtype, *, exact: bool
) -> None:
    over = transport(kind)
    for name in NAMES:
        plan = reduce_plan(CASES[name], over, grad_dtype, reduce_dtype)
        terms = [_grads(name, grad_dtype, r) for r in range(world_size)]
        mine = [g.clone() for g in terms[rank]]
        first = run_reduce(plan, mine)
        again = run_reduce(plan, mine)
        for i, (seen, item) in enumerate(zip(first, plan.items, strict=True)):
            expected = chunk_of(summed([t[i] for t in terms], reduce_dtype, None, None), item.layout, rank)
            assert seen.shape == item.layout.local_shape(rank), name
            assert seen.dtype == reduce_dtype
            if exact:
                assert torch.equal(seen, expected), (name, item)
                assert torch.equal(seen, again[i])
            else:
                torch.testing.assert_close(seen, expected)
            assert torch.equal(mine[i], terms[rank][i]), "the gradient was written to"


@pytest.mark.daily(world_size=[3])
@on_ranks(*WORLD_SIZES)
def test_owners_sum_in_rank_order(rank: int, world_size: int) -> None:
    for grad_dtype, reduce_dtype in ((F32, F32), (BF16, F32), (BF16, BF16), (F32, BF16), (F16, BF16)):
        _check_sums(rank, world_size, "shared", grad_dtype, reduce_dtype, exact=True)


@pytest.mark.daily(world_size=[2, 3])
@on_ranks(*WORLD_SIZES)
def test_collectives_reduce_in_fp32(rank: int, world_size: int) -> None:
    for kind, grad_dtype in (("c10d_packed", F32), ("c10d_direct", BF16), ("c10d_direct", F32), ("custom", BF16)):
        # Two terms have one sum; with more the backend chooses the order.
        _check_sums(rank, world_size, kind, grad_dtype, F32, exact=world_size <= 2)


@pytest.mark.parametrize(
    ("kind", "world_size"), [("shared", 2), ("shared", 3), ("shared", 4), ("c10d_packed", 2), ("c10d_direct", 2)]
)
@on_ranks()
def test_divisors_divide_each_term_and_the_sum(rank: int, world_size: int, kind: str) -> None:
    over = transport(kind)
    for grad_dtype, reduce_dtype in ((F32, F32), (BF16, F32), (F16, F16)):
        plan = reduce_plan(CASES["mixed_dims"], over, grad_dtype, reduce_dtype)
        terms = [_grads("mixed_dims", grad_dtype, r) for r in range(world_size)]
        for predivide, postdivide in ((3.0, None), (None, 7.0), (1.7, 2.3)):
            for i, seen in enumerate(run_reduce(plan, terms[rank], predivide, postdivide)):
                total = summed([t[i] for t in terms], reduce_dtype, predivide, postdivide)
                expected = chunk_of(total, plan.items[i].layout, rank)
                assert torch.equal(seen, expected), (grad_dtype, predivide, postdivide, i)


def _check_average(rank: int, world_size: int, kind: str) -> None:
    plan = reduce_plan(CASES["mixed_dims"], transport(kind), F32, F32)
    terms = [_grads("mixed_dims", F32, r) for r in range(world_size)]
    for i, seen in enumerate(run_reduce(plan, terms[rank], op=dist.ReduceOp.AVG)):
        expected = chunk_of(summed([t[i] for t in terms], F32, None, world_size), plan.items[i].layout, rank)
        torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("kind", ["shared", "c10d_packed", "custom"])
@on_ranks(2, 3)
def test_average_is_the_sum_over_the_world_size(rank: int, world_size: int, kind: str) -> None:
    _check_average(rank, world_size, kind)


@pytest.mark.parametrize("kind", ["shared", "c10d_packed", "c10d_direct"])
@on_ranks(2, 3)
def test_strides_of_gradients_do_not_matter(rank: int, world_size: int, kind: str) -> None:
    plan = reduce_plan(CASES["mixed_dims"], transport(kind), F32, F32)
    dense = run_reduce(plan, _grads("mixed_dims", F32, rank))
    strided = run_reduce(plan, _grads("mixed_dims", F32, rank, strided=True))
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))


def _events_of_a_reduction(rank: int, kind: str, grad_dtype: torch.dtype) -> list[object]:
    # A group of its own: an outbox keeps the parcels of earlier tests.
    carrier = transport_for(dist.new_group(), CPU) if kind == "shared" else transport(kind)
    plan = reduce_plan(CASES["mixed_dims"], carrier, grad_dtype, F32)
    with heard() as told:
        run_reduce(plan, _grads("mixed_dims", grad_dtype, rank))
    started, finished = (one for one in told if isinstance(one, events.ReduceStarted | events.ReduceFinished))
    taken = [one for one in told if isinstance(one, events.StorageAllocated) and one.kind != "reduce_output"]
    freed = [one for one in told if isinstance(one, events.StorageFreed)]
    alive = sum(one.bytes for one in taken) - sum(one.bytes for one in freed)
    return [started.bytes, started.wire_bytes, finished.wire_bytes, started.dtype, alive]


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@on_ranks(4, isolated=True)
def test_an_outbox_holds_what_peers_own_and_stays(rank: int, world_size: int, grad_dtype: torch.dtype) -> None:
    own = [61 * 250 + 4 + 18 + 6, 61 * 250 + 4 + 18, 61 * 250 + 4 + 9, 58 * 250 + 1]
    sent = [numel * grad_dtype.itemsize for peer, numel in enumerate(own) if peer != rank]
    kept = sum(-(-nbytes // 64) * 64 for nbytes in sent)  # each peer's row begins at a cache line
    seen = _events_of_a_reduction(rank, "shared", grad_dtype)
    assert seen == [sum(own) * grad_dtype.itemsize, sum(sent), sum(sent), grad_dtype, kept]


@on_ranks(4)
def test_collectives_send_the_reduce_dtype(rank: int, world_size: int) -> None:
    row = 61 * 250 + 4 + 18 + 6
    assert _events_of_a_reduction(rank, "c10d_packed", BF16)[1:4] == [row * 3 * 4, row * 3 * 4, F32]


def _all_reduces(rank: int, op: dist.ReduceOp.RedOpType) -> tuple[list[float], int]:
    tensor = torch.arange(5.0) + rank
    with heard(events.AllReduceFinished) as told:
        make_lane(CPU, "all-reduce").start(all_reduce(tensor, dist.group.WORLD, op, "blocks.0"), "blocks.0").wait()
    return tensor.tolist(), sum(one.wire_bytes for one in told)


@on_ranks(2, 3)
def test_all_reduce(rank: int, world_size: int) -> None:
    ranks = sum(range(world_size))
    sent = 2 * (world_size - 1) * 20 // world_size
    assert _all_reduces(rank, dist.ReduceOp.SUM) == ([world_size * x + ranks for x in range(5)], sent)
    assert _all_reduces(rank, dist.ReduceOp.AVG)[0] == [x + ranks / world_size for x in range(5)]


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="a group of torch 2.15 needs the backend that its name tells")
@on_ranks(2)
def test_the_backend_of_the_device_is_asked_whether_it_averages(rank: int, world_size: int) -> None:
    """The CPU's backend, gloo, in a group that has the name of another, as those of "cpu:gloo,cuda:nccl" have."""
    group = dist.group.WORLD
    assert group is not None
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    try:
        assert group.name() == "nccl"
        _check_average(rank, world_size, "c10d_packed")
        assert _all_reduces(rank, dist.ReduceOp.AVG)[0] == [x + 0.5 for x in range(5)]
    finally:
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
