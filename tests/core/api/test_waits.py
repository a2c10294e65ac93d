"""Events of waits, launches and module phases: they tell a tool where a rank waits."""

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardkit.core import events
from tests.support import on_ranks
from tests.support.heard import heard
from tests.support.models import Composed
from tests.support.sharding import shard_each

WIDTH = 7  # no world size but 1 divides it


def _sharded(recompute: bool = False, mesh: DeviceMesh | None = None) -> Any:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(model.blocks[0](x))
        return checkpoint(model.blocks[1], x, use_reentrant=False) if recompute else model.blocks[1](x)

    torch.manual_seed(0)
    model = Composed(run, blocks=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    return shard_each(*model.blocks, model, mesh=mesh)


def _heard(model: Any) -> list[events.Event]:
    with heard() as found:
        model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    return found


def _phases(recompute: bool) -> list[str]:
    signs = {events.ModuleBegan: "+", events.ModuleEnded: "-"}
    return [
        f"{sign}{event.fqn} {event.phase}" if (sign := signs.get(type(event))) else "end"
        for event in _heard(_sharded(recompute))
        if type(event) in {*signs, events.BackwardEnded}
    ]


@on_ranks(1, 2)
def test_modules_begin_and_end_their_phases(rank: int, world_size: int) -> None:
    assert _phases(recompute=False) == [
        "+FSDPComposed forward", "+blocks.0 forward", "-blocks.0 forward", "+blocks.1 forward", "-blocks.1 forward",
        "-FSDPComposed forward", "+blocks.1 backward", "+FSDPComposed backward", "-blocks.1 backward",
        "+blocks.0 backward", "-blocks.0 backward", "-FSDPComposed backward", "end",
    ]  # fmt: skip


@on_ranks(2)
def test_recomputation_is_a_phase_of_its_own(rank: int, world_size: int) -> None:
    phases = _phases(recompute=True)
    at = phases.index("+blocks.1 recompute")
    assert phases[at - 2 : at + 2] == [
        "+blocks.1 backward", "+FSDPComposed backward", "+blocks.1 recompute", "-blocks.1 recompute",
    ]  # fmt: skip
    assert Counter(one[0] for one in phases) == {"+": 7, "-": 7, "e": 1}


def _check_waits(told: list[events.Event]) -> None:
    """Waits do not nest, each has one end, and part of their time is idle."""
    open_wait: events.WaitStarted | None = None
    for event in told:
        if type(event) is events.WaitStarted:
            assert open_wait is None
            open_wait = event
        elif isinstance(event, events.WaitFinished):
            assert open_wait == events.WaitStarted(event.fqn, event.operation)
            assert 0 <= event.blocked <= event.seconds
            open_wait = None
    assert open_wait is None


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shared", [True, False])
@on_ranks()
def test_every_wait_is_told(rank: int, world_size: int, shared: bool) -> None:
    mesh = None
    if not shared:
        os.environ["SHARDKIT_SHARED_MEMORY"] = "0"
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = _sharded(mesh=mesh)
    first, second = _heard(model), _heard(model)
    assert [event.module for event in first if isinstance(event, events.RootReady)] == [model]
    assert "set-up" in {event.operation for event in first if isinstance(event, events.WaitFinished)}
    _check_waits(second)
    launched = Counter((event.fqn, event.operation) for event in second if isinstance(event, events.Launched))
    assert launched == Counter(  # the block that forward used last stays for backward
        {
            ("blocks.0", "all-gather"): 2,
            ("blocks.1", "all-gather"): 1,
            ("blocks.0", "reduce-scatter"): 1,
            ("blocks.1", "reduce-scatter"): 1,
        }
    )
    finished = Counter((event.fqn, event.operation) for event in second if isinstance(event, events.WaitFinished))
    assert not launched - finished, "each communication has been waited for"


@on_ranks(2)
def test_gradients_and_sums_on_their_way_are_counted(rank: int, world_size: int) -> None:
    model = _sharded()
    _heard(model)
    held: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in _heard(model):
        if isinstance(event, events.StorageAllocated | events.StorageFreed) and event.kind != "outbox":  # which is kept
            held[event.kind] += event.bytes if isinstance(event, events.StorageAllocated) else -event.bytes
            most[event.kind] = max(most[event.kind], held[event.kind])
            assert held[event.kind] >= 0, event
    assert not +held, "all that a step allocates it frees"
    assert most["gradient"] == (WIDTH * WIDTH + WIDTH) * 4
    # Of 7 rows the first rank owns 4. The sum of one block is done before the next one's takes memory.
    assert most["reduce_output"] in (3 * (WIDTH + 1) * 4, 4 * (WIDTH + 1) * 4)


@on_ranks(2)
def test_padding_and_transport_are_told(rank: int, world_size: int) -> None:
    told = [
        (type(event).__name__, event.padding_bytes, event.transport)
        for event in _heard(_sharded())
        if isinstance(event, events.GatherStarted | events.ReduceFinished) and event.fqn == "blocks.0"
    ]
    # 7 rows in chunks of 4: 8 rows are allocated, of 7 weights and 1 bias.
    gather = ("GatherStarted", (WIDTH + 1) * 4, "shared")
    assert told == [gather, gather, ("ReduceFinished", 0, "shared")]


def test_a_wait_that_fails_is_told_and_raises() -> None:
    with heard() as found, pytest.raises(ConnectionError, match="gone"), events.waiting("blocks.0", "all-gather"):
        raise ConnectionError("gone")
    started, failed = found
    assert started == events.WaitStarted("blocks.0", "all-gather")
    assert isinstance(failed, events.WaitFailed)
    assert (failed.fqn, failed.operation, failed.error) == ("blocks.0", "all-gather", "gone")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spans_on_a_gpu() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    span = events.DeviceSpan(begin, end)
    assert not span.done
    assert 0.001 < span.seconds() < 10
    assert span.done
