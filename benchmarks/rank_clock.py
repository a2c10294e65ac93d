"""Time on rank processes for pytest-benchmark: the ranks measure, and the fixture gets their times."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import run_ranks

SAMPLES = 12
_WARMUP = 3


class RankClock:
    """A timer that advances by one measured sample each time that `tick` is called."""

    def __init__(self) -> None:
        self._now = 0.0
        self._samples: list[float] = []

    def __call__(self) -> float:
        return self._now

    def tick(self) -> None:
        self._now += self._samples.pop(0)

    def measure(self, benchmark: Any, world_size: int, body: Callable[..., list[float]], *args: Any) -> None:
        """Report the times of `body(rank, world_size, *args)`, see `sampled`: for each sample the slowest rank's."""
        self.report(benchmark, run_ranks(world_size, body, *args, timeout=120.0))

    def report(self, benchmark: Any, ranks: Sequence[Sequence[float]]) -> None:
        """Report the ranks' times, a list of seconds each."""
        self._samples = [max(sample) for sample in zip(*ranks, strict=True)]
        benchmark.pedantic(self.tick, rounds=len(self._samples))


clock = RankClock()
by_ranks = pytest.mark.benchmark(timer=clock)
"""Marks a benchmark whose time is `clock`'s."""


def sampled(step: Callable[[], object]) -> list[float]:
    """Seconds of `step` on this rank, `SAMPLES` times after warm-up; all ranks begin each one together."""
    return in_turn({"": step})[""]


def in_turn(steps: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The same of several steps, one of each in turn, so that other load on the machine meets them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(_WARMUP + SAMPLES):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if index >= _WARMUP:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
