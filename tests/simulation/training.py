"""Training steps on the simulated device: a scenario says how a model is sharded and how it is stepped."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardkit.core as ours
from tests.simulation.device import Observer, Simulation, simulate
from tests.simulation.model import BlockSpec, Chain

ENGINES: dict[str, ModuleType] = {"stock": stock, "ours": ours}
SHARDS = 8
BLOCK = BlockSpec()


@dataclass
class Run:
    """A scenario under way. `times` has what the default stream spent on a step's forwards and backwards."""

    engine: ModuleType
    scenario: Scenario
    simulation: Simulation
    model: Any = None
    optimizer: Any = None
    times: Counter[str] = field(default_factory=Counter)
    kept: dict[str, Any] = field(default_factory=dict)

    def _timed(self, phase: str, call: Callable[[], Any]) -> Any:
        clock = self.simulation.observer.clock
        begin = clock()
        result = call()
        self.times[phase] += clock() - begin  # type: ignore[assignment]
        return result

    forwards, backwards = partialmethod(_timed, "forward"), partialmethod(_timed, "backward")

    def chains(self) -> list[Chain]:
        """The roots: one model, or the stages of a pipeline."""
        return [module for module in self.model.modules() if isinstance(module, Chain)]


def whole_step(run: Run) -> None:
    loss = run.forwards(lambda: run.model(torch.zeros(4, device="sim")).sum())
    run.backwards(loss.backward)


def micro_batches(**values: Sequence[bool]) -> Callable[[Run], None]:
    """Micro-batches, before each of which the model is told: by `is_last_backward=(False, True)` before each of two."""

    def step(run: Run) -> None:
        for given in zip(*values.values(), strict=True):
            for name, value in zip(values, given, strict=True):
                getattr(run.model, f"set_{name}")(value)
            whole_step(run)

    return step


ONLY_THE_LAST = (False, False, True)
accumulating = micro_batches(requires_gradient_sync=ONLY_THE_LAST)
all_reduce_once = micro_batches(requires_all_reduce=ONLY_THE_LAST)


def pipelined(run: Run) -> None:
    """The stages of a pipeline, all on this rank; three micro-batches; unshards ahead and reshards by hand."""
    stages, batches = run.chains(), 3
    for stage in stages:
        _set_last(stage, False)
    order = [*range(len(stages)), *reversed(range(len(stages) - 1))]
    handles = run.forwards(lambda: unshard_ahead(stages[0]))
    losses: dict[int, list[torch.Tensor]] = {}
    for turn, place in enumerate(order):
        stage, following = stages[place], [stages[after] for after in order[turn + 1 : turn + 2]]
        timed = run.backwards if place in losses else run.forwards
        timed(lambda handles=handles: [handle.wait() for handle in handles])
        handles = timed(lambda following=following: [handle for one in following for handle in unshard_ahead(one)])
        if place not in losses:
            losses[place] = [run.forwards(lambda stage=stage: _loss(stage)) for _ in range(batches)]
        if turn + 1 >= len(stages):
            for loss in losses[place]:
                _set_last(stage, loss is losses[place][-1])
                run.backwards(loss.backward)
        for block in stage.blocks:
            timed(block.reshard)


def _loss(model: Any) -> torch.Tensor:
    return model(torch.zeros(4, device="sim")).sum()  # type: ignore[no-any-return]


def _set_last(stage: Any, last: bool) -> None:
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last)
    stage.set_requires_gradient_sync(last)


def unshard_ahead(stage: Any) -> list[Any]:
    """Starts gathering every block of a root; returns the handles to wait for."""
    handles = [block.unshard(async_op=True) for block in stage.blocks]
    return [handle for handle in handles if handle is not None]


@dataclass(frozen=True)
class Scenario:
    """A model, how it is sharded and how it is stepped.

    `in_root`: blocks that the root's own group holds; `together`: blocks of one call. `options`: more of `fully_shard`;
    `our_options`: those that stock does not have. `build` runs before sharding and `prepare` after it; `order` before
    each step, with its number and the number of blocks. `optimizer` is made for the parameters that are trained.
    """

    name: str
    blocks: tuple[BlockSpec, ...] = (BLOCK,) * 8
    replicas: int = 1
    stages: int = 1
    in_root: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    shards: int = SHARDS
    mixed: bool = False
    offload: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    our_options: dict[str, Any] = field(default_factory=dict)
    coalescing: bool = True
    steps: int = 4
    build: Callable[[Any], None] = lambda model: None
    prepare: Callable[[Any], None] = lambda model: None
    order: Callable[[int, int], list[int]] = lambda step, count: list(range(count))
    step: Callable[[Run], None] = whole_step
    optimizer: Callable[[list[nn.Parameter]], Any] = lambda params: torch.optim.SGD(params, lr=0.1)


@contextlib.contextmanager
def started(scenario: Scenario, engine: str, observer: Observer) -> Iterator[Run]:
    """The model of `scenario`, sharded by "stock" or "ours", watched by `observer` until the block ends."""
    world = scenario.shards * scenario.replicas
    with simulate(observer, world, coalescing=scenario.coalescing) as simulation:
        run = Run(ENGINES[engine], scenario, simulation)
        if scenario.replicas == 1:
            mesh = init_device_mesh("sim", (scenario.shards,))
        else:
            shape = (scenario.replicas, scenario.shards)
            mesh = init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard"))
        size = len(scenario.blocks) // scenario.stages
        starts = range(0, len(scenario.blocks), size)
        stages = [Chain(scenario.blocks[start : start + size], start) for start in starts]
        for stage in stages:
            scenario.build(stage)
            _shard(run, stage, mesh)
            scenario.prepare(stage)
        run.model = stages[0] if len(stages) == 1 else nn.Sequential(*stages)
        yield run


def _shard(run: Run, model: Any, mesh: DeviceMesh) -> None:
    """Shards every block, but those that stay with the root, and the root."""
    scenario = run.scenario
    options: dict[str, Any] = {"mesh": mesh, **scenario.options}
    if run.engine is ours:
        options |= scenario.our_options
    if scenario.mixed:
        options["mp_policy"] = run.engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if scenario.offload is not None:
        options["offload_policy"] = run.engine.CPUOffloadPolicy(**scenario.offload)
    for index, block in enumerate(model.blocks):
        if index not in (*scenario.in_root, *scenario.together):
            run.engine.fully_shard(block, **options)
    if scenario.together:
        run.engine.fully_shard([model.blocks[index] for index in scenario.together], **options)
    run.engine.fully_shard(model, **options)


def on_each(setter: str, args: tuple[Any, ...], model: Any) -> None:
    """Calls a setter of the root and of each block."""
    for module in (model, *model.blocks):
        getattr(module, setter)(*args)


def fill(model: Any) -> None:
    """Gives the parameters the same random values always."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 100)


def take_steps(run: Run) -> Iterator[int]:
    """Runs the steps; yields the number of each when its backward has ended."""
    for step in range(run.scenario.steps):
        for chain in run.chains():
            chain.order = run.scenario.order(step, len(chain.blocks))
        run.times.clear()
        run.scenario.step(run)
        yield step
