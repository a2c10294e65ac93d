"""Several ways to do one thing, in turn on the ranks of one host, so that other load meets them alike; and ratios."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

Seconds = dict[str, list[float]]


def timed(action: Callable[[], Any]) -> float:
    """Seconds of this rank; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def in_turn(actions: Mapping[str, Callable[[], Any]], rounds: int, warmup: int) -> Seconds:
    """The seconds of each action in each round, one of each in turn; the first rounds do not count."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(warmup + rounds):
        for name, action in actions.items():
            taken = timed(action)
            if number >= warmup:
                seconds[name].append(taken)
    return seconds


def slowest(ranks: Sequence[Seconds]) -> Seconds:
    """The slowest rank's seconds in each round."""
    return {name: [max(values) for values in zip(*(one[name] for one in ranks), strict=True)] for name in ranks[0]}


def ratio(seen: Sequence[float], beside: Sequence[float]) -> str:
    """The median of the ratios of a round, with the least and the most."""
    ratios = [one / other for one, other in zip(seen, beside, strict=True)]
    return f"{median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def milliseconds(values: Sequence[float]) -> str:
    return f"{median(values) * 1e3:.0f}"
