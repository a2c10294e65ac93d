"""The host's cost of one rank with more ranks and groups: shardkit and stock FSDP2 in turn, in one run.

    python benchmarks/scale.py                                     8 to 16,384 ranks of 32 groups
    python benchmarks/scale.py --ranks 2 --groups 100 1000         the number of groups
    python benchmarks/scale.py --ranks 2 --groups 1000 --budget 0.5

This process is rank 0 of torch's `fake` process group of any size, and every configuration has a process of its own.
See benchmarks/METHOD.md.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from side_by_side.surroundings import surroundings
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import table

import shardkit.core

PARAMETERS, ROWS = 9, 16384
TURNS, MODELS = 31, 3
"""Later steps, and models of each system with a first step; the median of each counts."""
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""glibc keeps freed memory, as CUDA's allocator does: else whoever has the end of the heap pays for page faults."""
_COLLECTIVES = re.compile("_?(all_?gather|reduce_scatter)_(single|base|into_tensor|tensor)(_coalesced)?")


@dataclass(frozen=True)
class Configuration:
    """`budget`: the part of all unsharded bytes that a third system may hold, or None."""

    ranks: int
    groups: int
    budget: float | None = None


@dataclass(frozen=True)
class Cost:
    """Of one system: CPU seconds, and bytes of Python objects for each parameter (stock's or ours, not torch's)."""

    sharding: float
    first: float
    later: float
    bytes_each: float


class Scales(nn.Module):
    """A group that does almost nothing with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(ROWS)) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class HostClock:
    """CPU seconds of this process but for those inside the process group's collectives."""

    def __init__(self) -> None:
        self._inside = 0.0

    def now(self) -> float:
        return time.process_time() - self._inside

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Takes the collectives' time off, as long as the context is open."""
        names = filter(_COLLECTIVES.fullmatch, dir(dist.ProcessGroup))
        methods = {name: getattr(dist.ProcessGroup, name) for name in names}
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, self._timed(method))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside += time.process_time() - began

        return call


class Trainer:
    def __init__(
        self, library: Any, configuration: Configuration, mesh: Any, clock: HostClock, budget: float | None = None
    ) -> None:
        self._clock = clock
        self._x = torch.ones(ROWS, requires_grad=True)
        self._model: Any = nn.Sequential(*(Scales() for _ in range(configuration.groups)))
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        began = clock.now()
        for group in self._model:
            library.fully_shard(group, mesh=mesh, mp_policy=policy)
        library.fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self.sharding = clock.now() - began
        if budget is not None:
            group = 2 * PARAMETERS * ROWS  # bf16
            self._model.set_prefetch_budget(int(budget * configuration.groups * group) + 3 * group)

    def step(self) -> float:
        began = self._clock.now()
        self._model(self._x).sum().backward()
        seconds = self._clock.now() - began
        self._model.zero_grad(set_to_none=True)
        self._x.grad = None
        return seconds


def measure(configuration: Configuration) -> dict[str, Cost]:
    """All systems' costs, in turn; ends the process group of this process."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=configuration.ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (configuration.ranks,))
    clock = HostClock()
    makers: dict[str, Callable[[], Trainer]] = {
        "stock": lambda: Trainer(stock, configuration, mesh, clock),
        "shardkit": lambda: Trainer(shardkit.core, configuration, mesh, clock),
    }
    if configuration.budget is not None:
        makers["budget"] = lambda: Trainer(shardkit.core, configuration, mesh, clock, configuration.budget)
    small = replace(configuration, groups=2)
    for library in (stock, shardkit.core):  # imports, and objects that are made once
        warm = Trainer(library, small, mesh, clock)
        warm.step()
        warm.step()
    del warm
    with clock.without_collectives():
        taken = {name: _taken(make, configuration) for name, make in makers.items()}
        begun: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
        for _ in range(MODELS):
            trainers: dict[str, Trainer] = {}  # those of the turn before go
            for name, make in makers.items():
                trainers[name], first = _begun(make)
                begun[name].append((trainers[name].sharding, first))
        gc.collect()
        gc.freeze()
        turns = [{name: trainer.step() for name, trainer in trainers.items()} for _ in range(TURNS)]
    dist.destroy_process_group()
    costs = {}
    for name in makers:
        sharding, first = (median(seconds) for seconds in zip(*begun[name], strict=True))
        costs[name] = Cost(sharding, first, median(turn[name] for turn in turns), taken[name])
    return costs


def _begun(make: Callable[[], Trainer]) -> tuple[Trainer, float]:
    """A new model, and the seconds of its first step.

    A full garbage collection goes through all models that exist, so the model that is made last would pay most.
    """
    gc.collect()
    gc.freeze()
    trainer = make()
    gc.collect()
    gc.freeze()
    first = trainer.step()
    gc.unfreeze()
    return trainer, first


def _taken(make: Callable[[], Trainer], configuration: Configuration) -> float:
    """Bytes of Python's objects for each parameter, after two steps."""
    gc.collect()
    tracemalloc.start()
    trainer = make()
    trainer.step()
    trainer.step()
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / (configuration.groups * PARAMETERS)


HEAD = [
    "ranks",
    "groups",
    "system",
    "sharding, s",
    "first step, s",
    "later step, s",
    "a group, ms",
    "/ stock",
    "bytes / parameter",
]


def cells(results: list[tuple[Configuration, dict[str, Cost]]]) -> Iterator[tuple[object, ...]]:
    for one, costs in results:
        for name, cost in costs.items():
            seconds = (f"{value:.3f}" for value in (cost.sharding, cost.first, cost.later))
            each = f"{cost.later / one.groups * 1e3:.2f}", f"{cost.later / costs['stock'].later:.2f}"
            yield one.ranks, one.groups, name, *seconds, *each, f"{cost.bytes_each:.0f}"


def main() -> None:
    """Runs every configuration asked for in a process of its own; prints a table."""
    args = _arguments()
    os.environ |= KEPT_MEMORY  # read when a process starts
    results = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for ranks, groups in itertools.product(args.ranks, args.groups):
            one = Configuration(ranks, groups, args.budget)
            results.append((one, processes.submit(measure, one).result()))
            print(f"{ranks} ranks, {groups} groups: done", file=sys.stderr, flush=True)
    print(table(HEAD, cells(results)))
    if args.json is not None:
        runs = [asdict(one) | {"costs": {name: asdict(cost) for name, cost in each.items()}} for one, each in results]
        args.json.write_text(
            json.dumps({"surroundings": surroundings("cpu", "adamw", None), "runs": runs}, indent=1) + "\n"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024, 8192, 16384])
    parser.add_argument("--groups", type=int, nargs="+", default=[32])
    parser.add_argument("--budget", type=float, help="also a prefetch budget of this part of all unsharded bytes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, such as results/scale.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
