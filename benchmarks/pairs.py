"""Steps under two conditions side by side, in the same processes, in turn: the cost of one against the other.

A round is four blocks, A B B A, so that a machine whose speed drifts meets both alike. A block is one step that is not
timed, as a condition may have a beginning, and two that are. Each timed step under B is held against the one in its
place under A: four pairs a round. A step is as long as the slowest rank says; beside that stands the processor time
of the ranks' main threads, which other programs on the machine disturb less.
"""

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

ORDER = (False, True, True, False)
TIMED = 2

Block = list[tuple[float, float]]
"""Of each timed step of a block: seconds, and seconds of processor time of the main thread."""


def rounds(seconds: float) -> Iterator[bool]:
    """Whether the next block is one under B; whole rounds, until so many seconds are over by rank 0's clock."""
    going, end = torch.tensor(1), time.perf_counter() + seconds
    while going:
        yield from ORDER
        going.fill_(time.perf_counter() < end)
        dist.broadcast(going, 0)


def timed_block(step: Callable[[], object]) -> Block:
    """Runs the steps of a block on this rank; all ranks begin each timed one together."""
    gc.collect()  # else garbage of the block before, such as a report, would be collected within a timed step
    step()
    seconds = []
    for _ in range(TIMED):
        dist.barrier()
        began, worked = time.perf_counter(), time.thread_time()
        step()
        seconds.append((time.perf_counter() - began, time.thread_time() - worked))
    return seconds


def on_ranks(body: Callable[..., dict], ranks: int, *args: object) -> list[dict]:
    """The results of `body(rank, ranks, *args)` on each of so many fresh processes of one group."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(_one_rank, (ranks, directory, body, args), nprocs=ranks)
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _one_rank(rank: int, ranks: int, directory: str, body: Callable[..., dict], args: tuple) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    found = body(rank, ranks, *args)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compared(blocks_of_ranks: list[list[Block]]) -> str:
    """The step and its processor time, B against A."""
    blocks = [list(zip(*block, strict=True)) for block in zip(*blocks_of_ranks, strict=True)]
    wall = [[max(seconds for seconds, _ in step) for step in block] for block in blocks]
    worked = [[statistics.fmean(work for _, work in step) for step in block] for block in blocks]
    return f"time {_change(wall)}; processor time {_change(worked)}"


def _change(blocks: list[list[float]]) -> str:
    """Median of B over A over all pairs, with an interval and quartiles, and the median under A."""
    under = ORDER * (len(blocks) // len(ORDER))
    plain, changed = (
        [step for one, block in zip(under, blocks, strict=True) if one is wanted for step in block]
        for wanted in (False, True)
    )
    ratios = [one / other for one, other in zip(changed, plain, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    first, last = interval(ratios)
    return (
        f"{statistics.median(ratios) - 1:+.1%} of {statistics.median(plain) * 1e3:.0f} ms "
        f"(95 %: {first - 1:+.1%} to {last - 1:+.1%}; quartiles of {len(ratios)} pairs {low - 1:+.1%} to "
        f"{high - 1:+.1%})"
    )


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median lies, 95 %, by resampling."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-50]
