"""The scenarios that the timeline compares: stock's engine and ours, on the same simulated device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from shardkit.core import CompressionPolicy
from tests.simulation.model import BlockSpec, Checkpointed
from tests.simulation.timeline import Costs, Timeline
from tests.simulation.training import (
    BLOCK,
    SHARDS,
    Scenario,
    accumulating,
    all_reduce_once,
    on_each,
    pipelined,
    started,
    take_steps,
)


def rates(
    all_gather: float = 8.0,
    reduce_scatter: float = 8.0,
    all_reduce: float = 0.0,
    *,
    copies: bool = False,
    transfer: float = 0.0,
    block: BlockSpec = BLOCK,
) -> Costs:
    """Costs per byte from the times that one fp32 `block` takes.

    `all_reduce` is that of a shard over two replicas; `transfer` that of a shard between the device and the host. With
    `copies` memory has 3 TB/s where the links of the all-gather have 400 GB/s.
    """
    nbytes = block.numel * 4
    sent = nbytes * (SHARDS - 1) / SHARDS
    return Costs(
        all_gather=all_gather / sent,
        reduce_scatter=reduce_scatter / sent,
        all_reduce=all_reduce / (nbytes / SHARDS),
        copy=all_gather / sent * 400 / 3000 if copies else 0.0,
        transfer=transfer / (nbytes / SHARDS),
    )


@dataclass(frozen=True)
class Comparison:
    """One row. `reported`: the steps of which the first and the last are shown.

    `budget`: the bytes that our engine may hold gathered, where a budget says so; None where it is stock's peak.
    """

    scenario: Scenario
    costs: Costs
    reported: Callable[[int], bool] = lambda step: True
    budget: int | None = None

    @property
    def name(self) -> str:
        return self.scenario.name


@dataclass(frozen=True)
class Measured:
    """Times of the reported steps; the most bytes of device memory, and of gathered memory, from the first step on."""

    forward: list[float]
    backward: list[float]
    peak_bytes: int
    peak_gathered_bytes: int


def measure(comparison: Comparison, engine: str) -> Measured:
    timeline = Timeline(comparison.costs)
    forward, backward = [], []
    with started(comparison.scenario, engine, timeline) as run:
        memory = run.simulation.memory
        sharded = memory.clock
        for step in take_steps(run):
            rest = -timeline.clock()
            rest += timeline.settle()  # the next step begins on an idle device
            run.model.zero_grad()
            if comparison.reported(step):
                forward.append(round(run.times["forward"], 3))
                backward.append(round(run.times["backward"] + rest, 3))
        peak = memory.peak(lambda one: not one.pinned, sharded)
        return Measured(forward, backward, peak, memory.peak(lambda one: "gathered" in one.notes, sharded))


def _shuffled(step: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(step).shuffle(order)
    return order


def _every_other_half(step: int, count: int) -> list[int]:
    return list(range(0, count, 2 if step % 2 else 1))


three_buffers = partial(on_each, "set_reduce_scatter_max_input_buffers", (3,))


def two_ahead(model: Any) -> None:
    """Explicit prefetch lists: two blocks ahead, in forward and in backward."""
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


def _budget(blocks: int) -> dict[str, Any]:
    """Our engine with a budget for the gathered memory of so many blocks, and the buffer of their small parameters."""
    nbytes = blocks * BLOCK.numel * 4 + 4096

    def prepare(model: Any) -> None:
        if hasattr(model, "set_prefetch_budget"):
            model.set_prefetch_budget(nbytes)

    return {"prepare": prepare, "budget": nbytes}


def recompute(model: Any) -> None:
    """Blocks run forward again in backward."""
    model.blocks = torch.nn.ModuleList(Checkpointed(block) for block in model.blocks)


def _both(name: str, times: dict[str, Any] | None = None, **given: Any) -> list[Comparison]:
    """A row with free copies, and one where they cost their bytes."""
    row = {field: given.pop(field) for field in ("reported", "budget") if field in given}
    scenario, times = Scenario(name, **given), times or {}
    with_copies = replace(scenario, name=f"{name}, copies")
    return [
        Comparison(scenario, rates(**times), **row),
        Comparison(with_copies, rates(**times, copies=True), **row),
    ]


_SMALL = BlockSpec(1.0, 2.0, ((16, 16), (16, 16), (16,)))
_EMBEDDING = BlockSpec(2.0, 4.0, ((16384, 512),))
_SLOW = {"all_gather": 14.0, "reduce_scatter": 14.0}
_FAST = {"all_gather": 4.0, "reduce_scatter": 4.0}
_SLOW_HSDP = {**_FAST, "all_reduce": 22.0}

_BETWEEN_HOSTS = Scenario("bf16, fp32 reduction, between hosts", mixed=True)
_NETWORK = replace(rates(**_SLOW), copy=rates(**_SLOW).all_gather * 50 / 3000)

_ALL = [
    *_both("base"),
    *_both("slow links", _SLOW),
    *_both("order changes every step", order=_shuffled),
    *_both("every other step skips half: half steps", reported=lambda step: step % 2 == 1, order=_every_other_half),
    *_both("every other step skips half: full steps", reported=lambda step: step % 2 == 0, order=_every_other_half),
    *_both("HSDP", {**_FAST, "all_reduce": 14.0}, replicas=2),
    *_both("HSDP, slow between hosts", _SLOW_HSDP, replicas=2),
    *_both("HSDP, slow between hosts, 3 buffers", _SLOW_HSDP, replicas=2, prepare=three_buffers),
    *_both("HSDP, all-reduce of the last micro-batch", _SLOW_HSDP, replicas=2, step=all_reduce_once),
    *_both("slow links, 3 buffers", _SLOW, prepare=three_buffers),
    *_both("deep, small groups", {"all_gather": 0.8, "reduce_scatter": 0.8, "block": _SMALL}, blocks=(_SMALL,) * 64),
    *_both("huge embedding", _FAST, blocks=(_EMBEDDING, *(BLOCK,) * 8)),
    *_both("huge embedding in the root", _FAST, blocks=(_EMBEDDING, *(BLOCK,) * 8), in_root=(0,)),
    *_both("gradient accumulation", step=accumulating),
    *_both("reshard_after_forward=False", options={"reshard_after_forward": False}),
    *_both("reshard_after_forward=2", options={"reshard_after_forward": 2}),
    *_both("recomputation", prepare=recompute),
    *_both("explicit lists, two ahead", prepare=two_ahead),
    *_both("prefetch budget, 2 blocks", **_budget(2)),
    *_both("prefetch budget, 3 blocks, gradient accumulation", step=accumulating, **_budget(3)),
    *_both("prefetch budget, 3 blocks, order changes every step", order=_shuffled, **_budget(3)),
    *_both("bf16, fp32 reduction", mixed=True),
    *_both("bf16, fp32 reduction, everything packed", mixed=True, coalescing=False),
    # A card of 400 Gbit/s for each device, and memory of 3 TB/s.
    Comparison(_BETWEEN_HOSTS, _NETWORK),
    Comparison(
        replace(
            _BETWEEN_HOSTS,
            name="bf16, fp32 reduction, between hosts, sent as bf16",
            our_options={"compression_policy": CompressionPolicy(reduce="bf16")},
        ),
        _NETWORK,
    ),
    *_both("pipeline stages", stages=2, step=pipelined),
    *_both("CPU offload", {"transfer": 6.0}, offload={}),
    *_both("CPU offload, bf16", {"transfer": 6.0}, offload={}, mixed=True),
]
COMPARISONS = {one.name: one for one in _ALL}


@cache
def measured(name: str, engine: str) -> Measured:
    """Runs in the process that has the device."""
    return measure(COMPARISONS[name], engine)
