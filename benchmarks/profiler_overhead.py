"""The cost of recording: steps with and without a recorder side by side (`benchmarks/pairs.py` says how).

    python benchmarks/profiler_overhead.py --ranks 2 --seconds 60
    python benchmarks/profiler_overhead.py --ranks 1 --calls

Beside the median of the pairs stands the recorder's own figure. `--calls` counts the calls of functions in a step,
Python's and built-in ones, which no other program on the machine disturbs.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pairs import compared, on_ranks, rounds, timed_block
from benchmarks.side_by_side.networks import GPT
from shardkit.core import fully_shard
from shardkit.tools import profile


def training_step(ranks: int) -> tuple[GPT, torch.optim.Optimizer, Callable[[], None]]:
    """A GPT of 11 M parameters sharded over `ranks`, its optimizer, and a function that runs one step."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=128, width=384, heads=6, hidden=[1536] * 6)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(256, (4 // ranks, 128))

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


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


def calls_of_a_step(rank: int, ranks: int, activations: bool) -> dict:
    model, optimizer, step = training_step(ranks)
    for _ in range(3):
        step()
    found = []
    for recorded in (False, True):
        with profile(model, optimizer, activations=activations) if recorded else nullcontext():
            step()
            with cProfile.Profile() as counted:
                step()
        found.append(pstats.Stats(counted).total_calls)
    return {"calls": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--activations", choices=["counted", "left-out", "both"], default="both")
    parser.add_argument("--calls", action="store_true", help="calls of functions in a step, in the place of times")
    options = parser.parse_args()
    for name in ("counted", "left-out"):
        if options.activations not in (name, "both"):
            continue
        if options.calls:
            plain, recorded = on_ranks(calls_of_a_step, options.ranks, name == "counted")[0]["calls"]
            print(
                f"{options.ranks} ranks, activations {name}: {recorded - plain} calls beside {plain} of the step itself"
            )
        else:
            found = on_ranks(steps_in_turn, options.ranks, options.seconds, name == "counted")
            says = statistics.median(found[0]["told"])
            result = compared([one["blocks"] for one in found])
            print(f"{options.ranks} ranks, activations {name}: {result}; it says {says:.1%}", flush=True)


if __name__ == "__main__":
    main()
