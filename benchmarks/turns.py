"""Several ways to do one thing, in turn on the ranks of one host, so that other load meets them alike; tables."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

Seconds = dict[str, list[float]]


def in_turn(actions: Mapping[str, Callable[[], Any]], rounds: int, warmup: int) -> Seconds:
    """This rank's seconds of each action, which all ranks begin together, in each round but the first ones."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(warmup + rounds):
        for name, action in actions.items():
            dist.barrier()
            begin = time.perf_counter()
            action()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def slowest(ranks: Sequence[Seconds]) -> Seconds:
    """The slowest rank's seconds in each round."""
    return {name: [max(values) for values in zip(*(one[name] for one in ranks), strict=True)] for name in ranks[0]}


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of each round, with their extremes. A count has one ratio only."""

    median: float
    least: float
    most: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f}" + (f" [{self.least:.2f}-{self.most:.2f}]" if self.rounds > 1 else "")


def ratio(seen: Sequence[float], beside: Sequence[float]) -> Ratio:
    ratios = [one / other for one, other in zip(seen, beside, strict=True)]
    return Ratio(median(ratios), min(ratios), max(ratios), len(ratios))


def milliseconds(values: Sequence[float]) -> str:
    return f"{median(values) * 1e3:.0f}"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [[str(cell) for cell in line] for line in (head, ["---"] * len(head), *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)
