"""What recording costs: steps with and without a recorder side by side (`benchmarks/pairs.py` says how).

    python benchmarks/profiler_overhead.py --ranks 2 --seconds 60

Beside the median of the pairs stands what the recorder says of itself.
"""

import argparse
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_profiler import training_step
from benchmarks.pairs import compared, on_ranks, rounds, timed_block
from shardkit.tools import profile


def steps_in_turn(rank: int, ranks: int, seconds: float, activations: bool) -> dict:
    torch.set_num_threads(1)
    model, optimizer, step = training_step(ranks)
    for _ in range(3):
        step()
    blocks, told = [], []
    for recorded in rounds(seconds):
        with profile(model, optimizer, activations=activations) if recorded else nullcontext() as run:
            blocks.append(timed_block(step))
        if run is not None and run.report is not None:
            told.append(max(one.overhead.share for one in run.report.ranks))
    return {"blocks": blocks, "told": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--activations", choices=["counted", "left-out", "both"], default="both")
    options = parser.parse_args()
    for name in ("counted", "left-out"):
        if options.activations in (name, "both"):
            found = on_ranks(steps_in_turn, options.ranks, options.seconds, name == "counted")
            says = statistics.median(found[0]["told"])
            result = compared([one["blocks"] for one in found])
            print(f"{options.ranks} ranks, activations {name}: {result}; it says {says:.1%}", flush=True)


if __name__ == "__main__":
    main()
