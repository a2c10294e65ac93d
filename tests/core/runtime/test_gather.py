"""Gathers at world sizes 1 to 4, over every transport, against the tensors that the chunks were cut from."""

from typing import Any

import pytest
import torch

from shardkit.core import events
from tests.core.runtime.cases import CASES, chunk_of, gather_plan, placed, run_gather, transport, whole
from tests.support import on_ranks
from tests.support.heard import heard

WORLD_SIZES = [2, 3, 4]  # one rank has no transport
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
