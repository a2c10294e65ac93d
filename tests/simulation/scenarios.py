"""What the timeline compares: training steps on a simulated device, with stock's engine and with ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardkit.core as ours
from tests.simulation.device import simulate
from tests.simulation.model import Block, BlockSpec, Chain
from tests.simulation.timeline import Costs, Timeline, holds_gathered

ENGINES: dict[str, ModuleType] = {"stock": stock, "ours": ours}
BLOCK = BlockSpec()
SHARDS = 8


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


@dataclass
class Run:
    """A scenario under way: what a step is made of."""

    engine: ModuleType
    mesh: DeviceMesh
    timeline: Timeline
    model: Any = None
    forward: float = 0.0
    backward: float = 0.0

    def forwards(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Adds the time of `call` to forward's."""
        begin = self.timeline.clock()
        result = call()
        self.forward += self.timeline.clock() - begin
        return result

    def backwards(self, call: Callable[[], object]) -> None:
        """Adds the time of `call` to backward's."""
        begin = self.timeline.clock()
        call()
        self.backward += self.timeline.clock() - begin


def whole_step(run: Run) -> None:
    """One forward, one backward."""
    loss = run.forwards(lambda: run.model(torch.zeros(4, device="sim")).sum())
    run.backwards(loss.backward)


def _accumulating(run: Run) -> None:
    for last in (False, False, True):
        run.model.set_requires_gradient_sync(last)
        whole_step(run)


def _pipelined(run: Run) -> None:
    """Two stages of a pipeline on one rank, three micro-batches: explicit unshards ahead, reshards by hand."""
    stages, batches = list(run.model.children()), 3
    for stage in stages:
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(False)
    losses: list[list[torch.Tensor]] = []
    handles = [run.forwards(lambda: _unshard(stages[0]))]  # type: ignore[arg-type, return-value]
    for place, stage in enumerate(stages):
        run.forwards(lambda: [handle.wait() for handle in handles[-1]])  # type: ignore[arg-type, return-value]
        if place + 1 < len(stages):
            handles.append(run.forwards(lambda: _unshard(stages[place + 1])))  # type: ignore[arg-type, return-value]  # noqa: B023
        ran = [run.forwards(lambda: stage(torch.zeros(4, device="sim")).sum()) for _ in range(batches)]  # noqa: B023
        losses.append(ran)
        if place + 1 < len(stages):
            _reshard(stage)
    for place in reversed(range(len(stages))):
        stage = stages[place]
        if place + 1 < len(stages):
            run.backwards(lambda: [handle.wait() for handle in handles[-1]])
        if place:
            run.backwards(lambda: handles.append(_unshard(stages[place - 1])))  # noqa: B023
        for batch, loss in enumerate(losses[place]):
            last = batch == batches - 1
            stage.set_is_last_backward(last)
            stage.set_reshard_after_backward(last)
            stage.set_requires_gradient_sync(last)
            run.backwards(loss.backward)
        _reshard(stage)


def _unshard(stage: Any) -> list[Any]:
    handles = [block.unshard(async_op=True) for block in stage.blocks]
    return [handle for handle in handles if handle is not None]


def _reshard(stage: Any) -> None:
    for block in stage.blocks:
        block.reshard()


def shard(run: Run, model: Any, scenario: Scenario) -> None:
    """Shards every block, but those that stay with the root, and the root."""
    options: dict[str, Any] = {"mesh": run.mesh}
    if scenario.reshard_after_forward is not None:
        options["reshard_after_forward"] = scenario.reshard_after_forward
    if scenario.mixed:
        options["mp_policy"] = run.engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if scenario.offload:
        options["offload_policy"] = run.engine.CPUOffloadPolicy()
    for index, block in enumerate(model.blocks):
        if index not in scenario.in_root:
            run.engine.fully_shard(block, **options)
    run.engine.fully_shard(model, **options)


@dataclass(frozen=True)
class Scenario:
    """A model, how it is sharded and stepped, and what things cost.

    `in_root`: blocks that the root's own group holds. `reported`: of which steps the first and the last are reported.
    `prepare` runs after sharding, `order` before each step with its number.
    """

    name: str
    costs: Costs = field(default_factory=rates)
    blocks: tuple[BlockSpec, ...] = (BLOCK,) * 8
    replicas: int = 1
    in_root: tuple[int, ...] = ()
    reshard_after_forward: bool | int | None = None
    mixed: bool = False
    offload: bool = False
    stages: int = 1
    steps: int = 4
    reported: Callable[[int], bool] = lambda step: True
    prepare: Callable[[Any], None] = lambda model: None
    order: Callable[[int, int], list[int]] = lambda step, count: list(range(count))
    step: Callable[[Run], None] = whole_step


@dataclass(frozen=True)
class Measured:
    """Times of the reported steps, and the most bytes of gathered memory that were held at once."""

    forward: list[float]
    backward: list[float]
    peak_unsharded_bytes: int


def measure(scenario: Scenario, engine: str) -> Measured:
    """Runs `scenario` with "stock" or "ours"."""
    timeline = Timeline(scenario.costs)
    forward, backward = [], []
    with simulate(timeline, SHARDS * scenario.replicas) as simulation:
        timeline.simulation = simulation
        run = Run(ENGINES[engine], make_mesh(scenario.replicas), timeline)
        run.model = _model(run, scenario)
        scenario.prepare(run.model)
        for step in range(scenario.steps):
            for model in _chains(run.model):
                model.order = scenario.order(step, len(model.blocks))
            timeline.settle()
            run.forward = run.backward = 0.0
            scenario.step(run)
            run.backward += timeline.settle() - timeline.clock()
            run.model.zero_grad()
            if scenario.reported(step):
                forward.append(round(run.forward, 3))
                backward.append(round(run.backward, 3))
        peak = simulation.memory.peak(holds_gathered)
        del run
    return Measured(forward, backward, peak)


def make_mesh(replicas: int) -> DeviceMesh:
    """A mesh to shard over `SHARDS` ranks, and to replicate over `replicas` if that is more than one."""
    if replicas == 1:
        return init_device_mesh("sim", (SHARDS,))
    return init_device_mesh("sim", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))


def _model(run: Run, scenario: Scenario) -> Any:
    if scenario.stages == 1:
        model = Chain(scenario.blocks)
        shard(run, model, scenario)
        return model
    size = len(scenario.blocks) // scenario.stages
    stages = [Chain(scenario.blocks[start : start + size]) for start in range(0, len(scenario.blocks), size)]
    for stage in stages:
        shard(run, stage, scenario)
    return torch.nn.Sequential(*stages)


def _chains(model: Any) -> Iterator[Chain]:
    return (module for module in model.modules() if isinstance(module, Chain))


def _shuffled(step: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(step).shuffle(order)
    return order


def _every_other_half(step: int, count: int) -> list[int]:
    return list(range(0, count, 2 if step % 2 else 1))


def _three_buffers(model: Any) -> None:
    for block in model.blocks:
        block.set_reduce_scatter_max_input_buffers(3)
    model.set_reduce_scatter_max_input_buffers(3)


def _two_ahead(model: Any) -> None:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


class _Checkpointed(torch.nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _recompute(model: Any) -> None:
    model.blocks = torch.nn.ModuleList(_Checkpointed(block) for block in model.blocks)


def _both(name: str, **given: Any) -> list[Scenario]:
    """A scenario with free copies, and one where they cost their bytes."""
    times = given.pop("times", {})
    return [
        Scenario(name, costs=rates(**times), **given),
        Scenario(f"{name}, copies", costs=rates(**times, copies=True), **given),
    ]


_SMALL = BlockSpec(1.0, 2.0, ((16, 16), (16, 16), (16,)))
_EMBEDDING = BlockSpec(2.0, 4.0, ((16384, 512),))
_SLOW = {"all_gather": 14.0, "reduce_scatter": 14.0}
_HSDP = {"all_gather": 4.0, "reduce_scatter": 4.0, "all_reduce": 14.0}
_SLOW_HSDP = {"all_gather": 4.0, "reduce_scatter": 4.0, "all_reduce": 22.0}

SCENARIOS: list[Scenario] = [
    *_both("base"),
    *_both("slow links", times=_SLOW),
    *_both("order changes every step", order=_shuffled),
    *_both("every other step skips half: half steps", order=_every_other_half, reported=lambda step: step % 2 == 1),
    *_both("every other step skips half: full steps", order=_every_other_half, reported=lambda step: step % 2 == 0),
    *_both("HSDP", times=_HSDP, replicas=2),
    *_both("HSDP, slow between hosts", times=_SLOW_HSDP, replicas=2),
    *_both("HSDP, slow between hosts, 3 buffers", times=_SLOW_HSDP, replicas=2, prepare=_three_buffers),
    *_both("slow links, 3 buffers", times=_SLOW, prepare=_three_buffers),
    *_both(
        "deep, small groups",
        times={"all_gather": 0.8, "reduce_scatter": 0.8, "block": _SMALL},
        blocks=(_SMALL,) * 64,
    ),
    *_both("huge embedding", times={"all_gather": 4, "reduce_scatter": 4}, blocks=(_EMBEDDING, *(BLOCK,) * 8)),
    *_both(
        "huge embedding in the root",
        times={"all_gather": 4, "reduce_scatter": 4},
        blocks=(_EMBEDDING, *(BLOCK,) * 8),
        in_root=(0,),
    ),
    *_both("gradient accumulation", step=_accumulating),
    *_both("reshard_after_forward=False", reshard_after_forward=False),
    *_both("reshard_after_forward=2", reshard_after_forward=2),
    *_both("recomputation", prepare=_recompute),
    *_both("explicit lists, two ahead", prepare=_two_ahead),
    *_both("bf16, fp32 reduction", mixed=True),
    *_both("pipeline stages", stages=2, step=_pipelined),
    *_both("CPU offload", offload=True, times={"transfer": 6.0}),
    *_both("CPU offload, bf16", offload=True, mixed=True, times={"transfer": 6.0}),
]
