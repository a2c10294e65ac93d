"""What recording costs: steps with and without a recorder side by side, in the same processes, in turn.

    python benchmarks/profiler_overhead.py --ranks 2 --rounds 24

A round takes one step without a recorder, two with one, and one without (A B B A), so that a machine whose speed drifts
meets both alike. Its ratio is that of the two sums, each step as long as the slowest rank says. Printed are the median
of the rounds' ratios, the quartiles, and an interval for the median (by resampling); beside them what the recorder says
of itself.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_profiler import training_step
from shardkit.tools import profile

ORDER = (False, True, True, False)


def rank_main(rank: int, ranks: int, rounds: int, activations: bool, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    model, optimizer, step = training_step(ranks)
    for _ in range(4):
        step()
    seconds, told = [], []
    for _ in range(rounds):
        for recorded in ORDER:
            dist.barrier()
            if not recorded:
                seconds.append(timed(step))
                continue
            with profile(model, optimizer, activations=activations) as run:
                dist.barrier()
                seconds.append(timed(step))
            told.append(max(one.overhead.share for one in run.report.ranks))
    (Path(directory) / f"{rank}.json").write_text(json.dumps([seconds, told]))
    dist.barrier()
    dist.destroy_process_group()


def timed(step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def ratios(seconds: list[float]) -> list[float]:
    """With a recorder over without, of each round."""
    rounds = [seconds[i : i + len(ORDER)] for i in range(0, len(seconds), len(ORDER))]
    return [(one[1] + one[2]) / (one[0] + one[3]) for one in rounds]


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median lies, 95 %, by resampling."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-50]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    for activations in (True, False):
        with tempfile.TemporaryDirectory() as directory:
            spawn(rank_main, (options.ranks, options.rounds, activations, directory), nprocs=options.ranks)
            found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(options.ranks)]
        seconds = [max(step) for step in zip(*(one[0] for one in found), strict=True)]
        values = ratios(seconds)
        low, _, high = statistics.quantiles(values, n=4)
        first, last = interval(values)
        print(
            f"{options.ranks} ranks, activations {'counted' if activations else 'left out':8}  "
            f"step {statistics.median(seconds) * 1e3:.0f} ms  with a recorder {statistics.median(values) - 1:+.1%} "
            f"(95 %: {first - 1:+.1%} to {last - 1:+.1%}; quartiles of {options.rounds} rounds {low - 1:+.1%} to "
            f"{high - 1:+.1%})  it says {statistics.median(found[0][1]):.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
